"""Processes that compile do what they are asked, and whatever becomes of them, their owner does not wait."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("triton")

from pellucid import EngineConfig
from pellucid.engine import build
from pellucid.kernels.compile.compilers import (
    EARLY,
    FEW,
    FEWEST_WORKERS,
    Compilers,
    Share,
    Task,
    compilers_for,
    note_of,
    start_early,
)

GPU = ("cuda", 90, 32)
PR_SET_CHILD_SUBREAPER = 36  # Linux: orphans become this process's children
NO_KERNELS = [Task("os:path", str(i), GPU) for i in range(FEW + 1)]
ALL = list(range(FEW + 1))


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    both = Compilers(2, Share(0, 2))
    yield both
    both.close()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_fails_elsewhere_is_left_to_the_owner(compilers: Compilers) -> None:
    for task in NO_KERNELS:
        compilers.submit(task)
    finished = list(compilers.finished())
    assert sorted(finished) == ALL
    assert 0 < len(compilers._later) < len(ALL), "another rank has a share of its own"
    assert compilers._is_listening and not compilers._is_gone


def test_an_owner_does_not_wait_for_a_process_that_has_died(compilers: Compilers) -> None:
    for task in NO_KERNELS:
        compilers.submit(task)
    compilers._process.kill()
    assert sorted(compilers.finished()) == ALL


def test_an_owner_does_not_wait_for_a_worker_that_has_died(compilers: Compilers) -> None:
    compilers._send(seconds=60)
    for process in psutil.Process(compilers._process.pid).children():
        process.kill()
    for task in NO_KERNELS:
        compilers.submit(task)
    assert sorted(compilers.finished()) == ALL


def test_an_owner_does_not_wait_for_a_process_that_says_nothing(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.kernels.compile.compilers.PATIENCE", 0.01)
    for task in NO_KERNELS:
        compilers.submit(task)
    assert sorted(compilers.finished()) == ALL


def test_an_owner_does_not_wait_for_few(compilers: Compilers) -> None:
    assert list(compilers.finished()) == [] and not compilers._is_listening


def test_processes_end_with_their_owner(compilers: Compilers) -> None:
    compilers._send(seconds=60)
    everybody = [psutil.Process(compilers._process.pid)]
    everybody += everybody[0].children()
    assert len(everybody) == 3
    compilers._connection.close()
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_nobody_has_to_wait_for_workers(compilers: Compilers) -> None:
    """As in a container, where the owner may be who inherits them."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        compilers._send(seconds=60)
        workers = psutil.Process(compilers._process.pid).children()
        compilers.submit(NO_KERNELS[0])
        compilers.close()
        assert len(workers) == 2 and not any(worker.is_running() for worker in workers)
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def test_there_are_none_where_all_has_been_compiled_or_cores_are_few(cache: Path) -> None:
    with pytest.raises(ZeroDivisionError), compilers_for("bad", FEWEST_WORKERS) as compilers:
        assert compilers is not None and 1 / 0
    assert compilers is not None and compilers._process.poll() is not None
    assert not any(cache.iterdir()), "a start that has failed says nothing"
    with compilers_for("good", FEWEST_WORKERS) as compilers:
        assert compilers is not None
    assert os.listdir(cache) == [note_of("good").name]
    with compilers_for("good", FEWEST_WORKERS) as compilers:
        assert compilers is None
    with compilers_for("few", FEWEST_WORKERS - 1) as compilers:
        assert compilers is None


def test_there_are_none_where_the_cache_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", f"/tmp/{'x' * 300}")  # which the system refuses, whoever asks
    with compilers_for("any", FEWEST_WORKERS) as compilers:
        assert compilers is None


def test_a_start_that_fails_leaves_no_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Compilers] = []

    def start(configuration: str, _: int, share: Share) -> None:
        start_early(configuration, FEWEST_WORKERS, share)
        started.extend(EARLY)

    monkeypatch.setattr(build, "has_gpu", lambda: True)
    monkeypatch.setattr(build, "start_early", start)
    with pytest.raises(ValueError, match="no folder"):
        build.start_engine(EngineConfig.from_options({"model": str(cache / "nowhere")}))
    assert len(started) == 1 and started[0]._process.poll() is not None and not EARLY


def test_they_import_what_their_owner_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('another one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(entry).absolute()) for entry in sys.path if entry])
    compilers = Compilers(1)
    try:
        compilers._send(seconds=60)
        assert compilers._is_listening
    finally:
        compilers.close()
