"""The command line and the Python API know the same options, and refuse the same nonsense in one line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

from pellucid.cli.generate import MAX_TOKENS
from pellucid.cli.main import COMMANDS, build_parser
from pellucid.cli.options import SAMPLING_HELP, engine_options, sampling_params
from pellucid.cli.quantize import recipe_of
from pellucid.config import EngineConfig, all_options
from pellucid.sampling_params import SamplingParams

POSITIONALS = {"bench": ["throughput"]}
NEEDED = {"run-batch": ["-i", "in", "-o", "out"]}
WITH_ENGINE = [name for name in COMMANDS if name not in ("agent", "doctor", "merge", "replay", "route")]


def parse(*argv: str):
    return build_parser().parse_args(argv)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "an error is one line"
    return message


@pytest.mark.parametrize("command", WITH_ENGINE)
def test_every_command_takes_every_engine_option(command):
    known = {flag for flag in help_of(command).split() if flag.startswith("--")}
    for _, field in all_options():
        for name in (field.name, *field.metadata["alias"]):
            assert any(flag.rstrip(",") == "--" + name.replace("_", "-") for flag in known), name


@pytest.mark.parametrize("command", WITH_ENGINE)
def test_help_says_what_each_option_does_and_its_default(command):
    text = " ".join(help_of(command).split())
    for _, field in all_options():
        assert " ".join(field.metadata["help"].split()) in text, field.name
    assert "(default sprout)" in text
    assert "None" not in text and "==SUPPRESS==" not in text


def help_of(command: str) -> str:
    parser = build_parser()
    for name in (command, *POSITIONALS.get(command, [])):
        action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = action.choices[name]
    return parser.format_help()


def test_an_option_of_a_measure_that_is_unknown_has_a_near_one(capsys):
    assert "did you mean --request-rate?" in refused(capsys, "bench", "serve", "--request-rates", "3")
    assert "did you mean --repeat?" in refused(capsys, "bench", "latency", "--repeats", "3")


@pytest.mark.parametrize("command", WITH_ENGINE)
def test_options_that_are_not_given_leave_the_config_alone(command):
    args = parse(command, *POSITIONALS.get(command, []), *NEEDED.get(command, []))
    assert engine_options(args) == {}


def test_given_options_reach_the_config_with_their_types():
    args = parse(
        "generate", "--model", "m", "--max-model-len", "2048", "--no-enable-prefix-caching",
        "--gpu-memory-utilization", "0.5", "--kvcache-block-size", "16", "--dtype", "float32",
    )  # fmt: skip
    config = EngineConfig.from_options(engine_options(args))
    assert (config.model.model, config.model.max_model_len, config.model.dtype) == ("m", 2048, "float32")
    assert (config.cache.enable_prefix_caching, config.cache.block_size) == (False, 16)
    assert config.cache.gpu_memory_utilization == 0.5


def test_every_sampling_parameter_has_its_option():
    # The seed is the engine's --seed; text is not made where there is no tokenizer; what is of several
    # words, as a grammar, is for code.
    without = {"seed", "detokenize", "structured_outputs", "extra_args"}
    assert set(SAMPLING_HELP) == {field.name for field in fields(SamplingParams)} - without


def test_sampling_options_reach_the_parameters():
    args = parse(
        "generate", "--temperature", "0.5", "--top-k", "7", "--stop", "a", "--stop", "b", "--stop-token-ids",
        "1,2", "--logit-bias", "5:-100,6:2.5", "--ignore-eos", "--logprobs", "3", "--bad-words", "no",
    )  # fmt: skip
    assert sampling_params(args, SamplingParams(), max_tokens=MAX_TOKENS) == SamplingParams(
        temperature=0.5, top_k=7, stop=["a", "b"], stop_token_ids=[1, 2], logit_bias={5: -100.0, 6: 2.5},
        ignore_eos=True, logprobs=3, bad_words=["no"], max_tokens=MAX_TOKENS,
    )  # fmt: skip


def test_what_is_not_given_comes_from_the_checkpoint_and_then_from_the_command():
    checkpoint = SamplingParams(temperature=0.6, top_k=20)
    params = sampling_params(parse("generate", "--top-k", "5"), checkpoint, max_tokens=256)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 256)
    given = sampling_params(parse("generate", "--max-tokens", "9"), checkpoint, max_tokens=256)
    assert given.max_tokens == 9


def test_a_sampling_value_out_of_range_is_refused_with_its_range():
    with pytest.raises(ValueError, match=r"top_p is 2\.0, must be in \(0, 1\]"):
        sampling_params(parse("generate", "--top-p", "2"), SamplingParams(), max_tokens=None)


def test_an_unknown_option_is_refused_with_the_nearest_name(capsys):
    assert "did you mean --temperature?" in refused(capsys, "generate", "--temprature", "1")


def test_a_refusal_names_the_help_and_the_options_of_its_own_command(capsys):
    message = refused(capsys, "generate", "--batch-sise", "1")
    assert "`pellucid generate --help`" in message and "--batch-size" not in message


def test_a_bad_value_is_refused_with_the_option_and_the_value(capsys):
    message = refused(capsys, "generate", "--top-k", "many")
    assert "--top-k" in message and "'many'" in message and "--help" in message


def test_a_bad_token_id_is_refused(capsys):
    assert "'x' is no token id" in refused(capsys, "generate", "--stop-token-ids", "1,x")


def test_a_bad_bias_is_refused(capsys):
    assert "'7=3' is no bias" in refused(capsys, "generate", "--logit-bias", "7=3")


def test_options_are_not_abbreviated(capsys):
    assert "--temp" in refused(capsys, "generate", "--temp", "1")


def test_the_parser_imports_nothing_heavy():
    code = "import sys; from pellucid.cli.main import build_parser; build_parser(); "
    code += "print({'torch', 'rich', 'numpy', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


PROGRAM = """
import contextlib, os, sys
from pellucid.cli.main import main
with contextlib.suppress(SystemExit):
    main(["--version"])
assert sys.stdin.read() == ""
sys.stdout.write("nowhere"), sys.stderr.write("nowhere")
assert min(os.pipe()) > 2
"""


def test_a_command_needs_no_open_files():
    """As `pellucid serve <&- >&- 2>&-` has none."""
    script = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", script, sys.executable, PROGRAM], check=False).returncode == 0


def test_quantize_takes_what_its_method_has() -> None:
    made = recipe_of(
        parse("quantize", "sprout", "out", "--method", "gptq", "--bits", "3", "--act-order", "none")
    )
    assert (made.bits, made.group_size, made.act_order) == (3, 128, "none")
    assert recipe_of(parse("quantize", "sprout", "out", "--method", "fp8")).bits == 4
    with pytest.raises(ValueError, match="--bits is of int4, awq, gptq, not of nf4"):
        recipe_of(parse("quantize", "sprout", "out", "--method", "nf4", "--bits", "3"))
