"""Scripts written for vLLM start: what means nothing here is told, and taken."""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pellucid.cli.main import build_parser
from pellucid.cli.options import SHORT_UNSERVED, Parser, engine_options
from pellucid.cli.serve import serve_options
from pellucid.config import EngineConfig
from pellucid.no_effect import ENGINE, SERVER, UNSERVED, WITH_VALUE, WITH_VALUES
from tests.patience import PATIENCE

VLLM = (Path(__file__).parent / "vllm_options.txt").read_text(encoding="utf-8").split()  # of 0.4 to 0.26
SCRIPT = """
    serve --disable-log-requests m --swap-space 4 --disable-log-stats --trust-remote-code --enforce-eager
    --gpu-memory-utilization 0.9 --enable-chunked-prefill --max-num-seqs 8 --served-model-name a b
    --enable-prefix-caching --uvicorn-log-level warning --disable-frontend-multiprocessing
    --num-scheduler-steps 8 --block-size 32 --no-enable-log-requests --no-enable-prefix-caching
    --max-log-len 100 --disable-custom-all-reduce --distributed-executor-backend mp --tokenizer-mode auto
    --limit-mm-per-prompt image=0 --no-async-scheduling --runner pooling -O3 -cc {} -dpl 1
    --cudagraph-capture-sizes 1 2 4 --moe-backend triton
"""


def test_flags_of_scripts_are_taken() -> None:
    args = build_parser().parse_args(SCRIPT.split())
    assert args.model_tag == "m"
    config = EngineConfig.from_options(engine_options(args))
    assert (config.scheduler.max_num_seqs, config.cache.block_size) == (8, 32)
    assert serve_options(args).served_model_name == ("a", "b")


def test_what_has_no_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig.from_options({"swap_space": 4, "disable_log_stats": True})
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "swap_space has no effect: preempted requests are computed anew, nothing is swapped"
    assert told[1].startswith("disable_log_stats has no effect: ")


def test_what_is_not_served_says_what_to_do_instead() -> None:
    with pytest.raises(ValueError, match="cpu_offload_gb is not supported: .*quantize"):
        EngineConfig.from_options({"cpu_offload_gb": 4})


@pytest.mark.parametrize("name", VLLM)
def test_each_of_vllms_is_served_or_says_what_to_do_instead(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if f"--{name}" in _served():
        return
    with pytest.raises(SystemExit, match="2"):
        _parser().parse_args(["serve", "m", f"--{name}", "1"])
    said = capsys.readouterr().err
    assert f"--{name} is not supported: {UNSERVED[name.replace('-', '_')]}" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("-dcp=2", "-dcp is not supported: a sequence's KV lies whole"),
        (
            "--structured-outputs-config.backend=xgrammar",
            "--structured-outputs-config is not supported: there",
        ),
        ("--speculative-config.method=ngram", """say --speculative-config '{"method": ..}'"""),
        ("--no-enable-eplb", "--no-enable-eplb is not supported: experts stay"),
    ],
)
def test_other_spellings_are_told_the_same(
    option: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _parser().parse_args(["serve", "m", option])
    assert line in capsys.readouterr().err


def test_a_server_tells_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pellucid", "serve", str(tmp_path), "--port", "0", "--swap-space", "4"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False).stderr
    assert "config.json" in said, "it has read its options, and found no model"
    assert said.count("swap_space has no effect") == 1


def test_no_option_is_taken_twice() -> None:
    served = {action.dest for action in _served().values()}
    assert set(ENGINE) | set(SERVER) <= served and not set(ENGINE) & set(SERVER)
    assert set(ENGINE) | set(SERVER) >= WITH_VALUE | WITH_VALUES and not WITH_VALUE & WITH_VALUES
    assert not set(UNSERVED) & served and set(SHORT_UNSERVED.values()) <= set(UNSERVED)
    assert not set(SHORT_UNSERVED) & set(_served())


@cache
def _parser() -> Parser:
    return build_parser()


def _served() -> dict[str, argparse.Action]:
    commands = _parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    return commands["serve"]._option_string_actions  # type: ignore[index, call-overload, no-any-return]


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_start_tells_what_it_does(tiny: Path, is_shown: bool) -> None:
    ours, theirs = pty.openpty() if is_shown else os.pipe()
    command = [sys.executable, "-m", "pellucid", "generate", "--model", str(tiny), "--device", "cpu"]
    more = ["--max-tokens", "1", "--cpu-kv-cache-gib", "0.01", "the quick"]
    subprocess.run([*command, *more], stderr=theirs, stdout=subprocess.DEVNULL, check=True, timeout=120)
    os.set_blocking(ours, False)
    try:
        said = os.read(ours, 2**16).decode()
    except BlockingIOError:
        said = ""
    os.close(theirs)
    os.close(ours)
    assert ("loading weights ..." in said and f"starting {tiny} ..." in said) == is_shown
    assert is_shown or not said
