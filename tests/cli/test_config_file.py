"""Options from a file, flags as vLLM spells them, and what is said of those that are not here."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from pellucid.cli.config_file import with_file
from pellucid.cli.main import build_parser
from pellucid.cli.options import engine_options
from pellucid.cli.serve import serve_options
from pellucid.config import EngineConfig, all_options
from pellucid.no_effect import ENGINE, SERVER, UNSERVED
from pellucid.server.options import ServeOptions


def parsed(words: list[str]) -> tuple[EngineConfig, tuple[str, ...]]:
    args = build_parser().parse_args(with_file(words))
    return EngineConfig.from_options(engine_options(args)), serve_options(args).served_model_name


@pytest.mark.parametrize("flag", ["--config {}", "--config={}"])
def test_a_file_says_options_and_the_command_line_more(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nmax_model_len: 4096\nmax-num-seqs: 8\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\n"
    )
    words = ["serve", *flag.format(file).split(), "--max-num-seqs", "4"]
    config, names = parsed(words)
    assert (config.model.model, config.model.max_model_len, config.scheduler.max_num_seqs) == ("m", 4096, 4)
    assert config.cache.enable_prefix_caching is False and names == ("a", "b")
    assert parsed([*words, "--served_model_name", "c"])[1] == ("c",)


def test_a_model_is_not_taken_for_one_of_a_list(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nverbose: false\napi-key: []\nserved-model-name: [a, b]\n")
    said = ["--config", str(file)]
    for words, names in (
        (["x", *said], ("a", "b")),
        ([*said, "x", "-tp", "1"], ("a", "b")),
        (["--served-model-name", "c", *said, "x"], ("c",)),
    ):
        args = build_parser().parse_args(with_file(["serve", *words]))
        assert args.model_tag == "x" and "model" not in engine_options(args), "the command line goes before"
        assert serve_options(args).served_model_name == names


def test_adapters_of_a_file_may_be_objects(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("lora-modules: [a=/a, {name: b, path: /b}]\n")
    (plain, said) = build_parser().parse_args(with_file(["serve", "--config", str(file)])).lora_modules
    assert plain == "a=/a" and json.loads(said) == {"name": "b", "path": "/b"}


@pytest.mark.parametrize("text,message", [("a: [", "--config"), ("words", "has no options")])
def test_a_file_that_says_no_options_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        with_file(["serve", "--config", str(file)])
    with pytest.raises(ValueError, match="is no file"):
        with_file(["serve", "--config", f"{file}s"])
    with pytest.raises(ValueError, match="needs a file"):
        with_file(["serve", "--config"])


def test_short_flags_are_vllms() -> None:
    config, _ = parsed(["serve", "m", "-tp", "2", "-pp", "3", "-dp", "4", "-q", "fp8"])
    underscored = ["serve", "m", "--max_model_len", "64", "--served_model_name=a_b"]
    assert parsed(underscored)[0].model.max_model_len == 64 and parsed(underscored)[1] == ("a_b",)
    parallel = config.parallel
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (2, 3)
    assert parallel.data_parallel_size == 4


def test_what_is_not_here_says_what_to_do_instead(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--cpu-offload-gb", "4"])
    assert "--cpu-offload-gb is not supported: weights are where the model runs" in capsys.readouterr().err


def test_each_option_is_served_ignored_or_refused() -> None:
    served = {name for _, field in all_options() for name in (field.name, *field.metadata["alias"])}
    served |= {field.name for field in fields(ServeOptions)}
    assert not UNSERVED.keys() & {*ENGINE, *SERVER, *served}
