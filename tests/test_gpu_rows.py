"""benchmarks/gpu.py runs rows of a table, here some that need no GPU; its own rows say what there is."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pellucid.cli.main import build_parser

ROOT = Path(__file__).parents[1]
TABLE = r"""
[fine.both]
run = "echo GPUs $CUDA_VISIBLE_DEVICES"
gpus = 2
[fine.first]
run = "touch $SCRATCH/../first; until test -e $SCRATCH/../second; do sleep 0.01; done"
[fine.second]
run = "touch $SCRATCH/../second; until test -e $SCRATCH/../first; do sleep 0.01; done"
[fine.figures]
run = '''python -c "print('│ ms/step │ 1,003.5 │ 2 │'); print('behind')"'''
figures = "^ms/step (.*)"
at_most = {1 = 1003.5}
[bad.worse]
run = "echo 8.5 tok/s"
at_least = {1 = 8.6}
[bad.large]
run = '''python -c "print('x' * 300_000); 1 / 0"'''
[bad.hangs]
run = "echo begun; while true; do touch $BEAT; sleep 0.01; done & wait"
limit = 0.2
[bad.leaves]
run = '''echo begun; python -c "import subprocess
beat = 'while true; do touch $BEAT; sleep 0.01; done'
subprocess.Popen(['timeout', '9', 'sh', '-c', beat], process_group=0)"; exit 3'''
[slow.waits]
run = "echo begun; touch $SCRATCH/../begun; sleep 60"
[slow.sees]
run = "until test -e $SCRATCH/../begun; do sleep 0.01; done"
[no.module]
run = "true"
needs = ["no_such_module"]
[no.gpus]
run = "true"
gpus = 3
[no.memory]
run = "true"
gib = 81
[no.time]
run = "true"
seconds = 1e9
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """On a machine of two GPUs, as far as it can tell."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, Imagined, 81920'\necho '1, Imagined, 81920'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BEAT", str(tmp_path / "beat"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = re.sub(r"(?m)^\[.*\]$", r'\g<0>\nshows = "something"', TABLE)
    lines = re.sub(r"(?m)^\[(?!no.time).*\]$", r"\g<0>\nseconds = 0.1", lines)
    (tmp_path / "table.toml").write_text(lines)
    table = ["--table", str(tmp_path / "table.toml"), "--out", str(tmp_path / "out")]
    return [sys.executable, str(ROOT / "benchmarks/gpu.py"), *table]


def verdicts(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "summary.json").read_text())
    assert found["machine"]["gpus"] == ["Imagined", "Imagined"]
    return {row["path"]: row["verdict"] for row in found["rows"]}


def test_rows_run_beside_each_other_and_what_they_show_is_kept(command: list[str], tmp_path: Path) -> None:
    wanted = [*command, "fine", "bad", "no"]
    done = subprocess.run(wanted, capture_output=True, text=True, check=False)
    (tmp_path / "beat").unlink(missing_ok=True)
    assert done.returncode == 1, done.stderr
    assert verdicts(tmp_path / "out") == {
        "no/module": "skipped", "no/gpus": "skipped", "no/memory": "skipped", "no/time": "skipped",
        "fine/both": "passed", "fine/first": "passed", "fine/second": "passed", "fine/figures": "passed",
        "bad/worse": "worse", "bad/large": "failed", "bad/hangs": "too long", "bad/leaves": "failed",
    }  # fmt: skip
    assert re.search(r"fine/figures .* exit 0: 1,003.5 2\n", done.stdout)
    assert "GPUs 0,1\n" in done.stdout and "it needs 81 GiB of a GPU, which has 80\n" in done.stdout
    files = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
    assert set(files) == {"summary.json", "summary.md", "log.txt"}
    assert "| bad/worse | worse | 0 | 8.5 tok/s |  | number 1 >= 8.6 |" in files["summary.md"]
    assert "[...]" in files["log.txt"] and "ZeroDivisionError" in files["log.txt"]
    assert len(files["log.txt"]) < 120_000
    left_out = [*command, "fine", "no", "--done", str(tmp_path / "out" / "summary.json"), "--list"]
    listed = subprocess.run(left_out, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^\w+/\w+", listed, re.MULTILINE) == ["no/module", "no/gpus", "no/memory", "no/time"]
    assert not (tmp_path / "beat").exists(), "a child of what hung or failed goes on"


def test_who_interrupts_it_has_what_was_shown_until_then(command: list[str], tmp_path: Path) -> None:
    with subprocess.Popen([*command, "slow"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "slow/sees" in process.stdout.readline()
        assert verdicts(tmp_path / "out") == {"slow/sees": "passed"}
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert verdicts(tmp_path / "out") == {"slow/sees": "passed", "slow/waits": "interrupted"}
    assert "begun" in (tmp_path / "out" / "log.txt").read_text()


def test_without_a_gpu_it_says_what_it_needs(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nvidia-smi shows no NVIDIA GPU, and each row needs one or two" in done.stderr


class ParsedError(Exception):
    """All that was to be seen."""


@pytest.mark.matrix
def test_commands_of_its_own_rows_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts, their imports, and options; of tests the files and the words of their names."""
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(*args: object) -> None:
        parse(*args)  # type: ignore[arg-type]
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    for folder in "benchmarks", "tools/sprout":  # where scripts find each other
        monkeypatch.syspath_prepend(str(ROOT / folder))
    table = tomllib.loads((ROOT / "benchmarks" / "gpu.toml").read_text(encoding="utf-8"))
    scripts: dict[str, dict[str, Any]] = {}
    for row in (row for group in table.values() for row in group.values()):
        re.compile(row.get("figures", ""))
        for command in row["run"].split(" && "):
            match shlex.split(command):
                case ["python", "-m", "pytest", *words]:
                    check_tests(words)
                case ["python", "-m", "pellucid", *words]:
                    build_parser().parse_args(words)
                case ["python", script, *words]:
                    if script not in scripts:
                        scripts[script] = runpy.run_path(str(ROOT / script))
                    monkeypatch.setattr(sys, "argv", [script, *words])
                    if words or "argparse" in scripts[script]:
                        with pytest.raises(ParsedError):
                            scripts[script]["main"]()


def check_tests(words: list[str]) -> None:
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    files = [file for path in paths for file in ([path] if path.suffix else path.rglob("*.py"))]
    assert files and all(path.exists() for path in paths), words
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    names = "".join(re.findall(r"(?m)^def test_\w+|^@pytest.mark.parametrize.*", text))
    if "-k" in words:
        for word in words[words.index("-k") + 1].split(" or "):
            assert word in names, word
