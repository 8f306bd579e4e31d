"""Scripts written for vLLM start: what means nothing here is told, and taken."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.cli.main import build_parser
from pellucid.cli.options import engine_options
from pellucid.cli.serve import serve_options
from pellucid.config import EngineConfig
from pellucid.no_effect import ENGINE, SERVER, WITH_VALUE
from tests.patience import PATIENCE

SCRIPT = """
    serve --disable-log-requests m --swap-space 4 --disable-log-stats --trust-remote-code --enforce-eager
    --gpu-memory-utilization 0.9 --enable-chunked-prefill --max-num-seqs 8 --served-model-name a b
    --enable-prefix-caching --uvicorn-log-level warning --disable-frontend-multiprocessing
    --num-scheduler-steps 8 --block-size 32 --no-enable-log-requests --no-enable-prefix-caching
    --max-log-len 100 --disable-custom-all-reduce --distributed-executor-backend mp --tokenizer-mode auto
    --limit-mm-per-prompt image=0 --no-async-scheduling
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


def test_a_server_tells_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pellucid", "serve", str(tmp_path), "--port", "0", "--swap-space", "4"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False).stderr
    assert "config.json" in said, "it has read its options, and found no model"
    assert said.count("swap_space has no effect") == 1


def test_no_option_is_taken_twice() -> None:
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    served = {action.dest for action in commands["serve"]._actions}  # type: ignore[index, call-overload]
    assert set(ENGINE) | set(SERVER) <= served and not set(ENGINE) & set(SERVER)
    assert set(ENGINE) | set(SERVER) >= WITH_VALUE


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
