"""Compiled once, by one of many; and never needed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.native import build as building
from pellucid.native.build import build
from pellucid.native.library import Library
from pellucid.platform import CORES

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "toy 1.0" && exit 0
echo compiled >> "{log}"
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""
NO_CODE = """
from pellucid import LLM, SamplingParams
from pellucid.native.library import library
assert library() is None
with LLM("sprout", device="cpu", dtype="bfloat16", num_threads=1, cpu_kv_cache_gib=0.02) as llm:
    print(llm.generate(["1 + 1"], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids)
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """One that notes its calls in a file `log`."""
    return write(tmp_path / "toy", COMPILER.format(log=tmp_path / "log"))


def write(path: Path, script: str) -> Path:
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_second_start_finds_what_the_first_has_compiled(compiler: Path, tmp_path: Path) -> None:
    first, second = (build(tmp_path / "cache", str(compiler)) for _ in range(2))
    assert first is not None and first == second and first.read_text() == "library\n"
    assert (tmp_path / "log").read_text() == "compiled\n"


def test_another_source_compiler_or_cpu_is_another_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {build(tmp_path, str(compiler)), build(tmp_path, str(compiler), target=("-march=other",))}
    monkeypatch.setattr(building, "cpu_features", lambda: "flags: sse")
    made.add(build(tmp_path, str(compiler)))
    source = tmp_path / "cpu.cpp"
    source.write_text("other")
    monkeypatch.setattr(building, "SOURCE", source)
    made.add(build(tmp_path, str(compiler)))
    compiler.write_text(compiler.read_text().replace("1.0", "2.0"))
    made.add(build(tmp_path, str(compiler)))
    assert len(made) == 5 and None not in made


def test_of_several_processes_one_compiles(compiler: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=build, args=(tmp_path / "cache", str(compiler))) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert (tmp_path / "log").read_text() == "compiled\n"


@pytest.mark.parametrize(
    "script", ["exit 1", '[ "$1" = --version ] || { echo "no such option" >&2; exit 1; }', "sleep 60; exit 1"]
)
def test_a_compiler_that_fails_is_a_line_in_the_log(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "PATIENCE", 0.3)
    monkeypatch.setattr(building, "digest", lambda compiler, options: "x") if "sleep" in script else None
    broken = write(tmp_path / "broken", f"#!/bin/sh\n{script}\n")
    with caplog.at_level(logging.WARNING):
        assert build(tmp_path / "cache", str(broken)) is None
    assert len(caplog.records) == 1 and "no native code" in caplog.text
    assert "no such option" in caplog.text or "option" not in script
    assert not list((tmp_path / "cache").glob("*.so")) or not (tmp_path / "cache").exists()


def test_a_lock_that_nobody_opens_is_waited_for_only_so_long(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path, str(compiler))
    assert path is not None
    monkeypatch.setattr(building, "PATIENCE", 0.2)
    with building.alone(path.with_name(f"{path.name}.lock")):
        assert build(tmp_path, str(compiler)) is None


def test_a_cache_that_cannot_be_written_to_is_passed_by(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = build(tmp_path / "file" / "cache", str(compiler))
    assert made is not None and made.exists() and tmp_path not in made.parents


def test_no_library_is_made_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "cpu.so").write_text("no library")
    with pytest.raises(OSError):
        Library(tmp_path / "cpu.so")


@pytest.mark.parametrize("change", [{"PELLUCID_NATIVE": "0"}, {"PATH": "/nowhere"}])
def test_torch_does_without(change: dict[str, str]) -> None:
    command = [sys.executable, "-c", NO_CODE]
    environment = os.environ | change
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(eval(done.stdout.splitlines()[-1])) == 3


@pytest.mark.skipif(sys.platform != "linux" or len(CORES) < 2, reason="nothing to pin, or one core")
def test_whoever_imports_torch_first_has_a_core_for_each_thread_too() -> None:
    code = f"import os; os.sched_setaffinity(0, {set[int]().union(*CORES)}); import torch; "
    code += "from pellucid.platform import CORES; print(len(CORES))"
    pinned = {"OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | pinned, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == len(CORES), done.stderr
