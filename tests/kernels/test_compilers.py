"""Processes that compile do what they are asked, and whatever becomes of them, their owner does not wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from pellucid.kernels.compilers import FEWEST_WORKERS, Compilers, Share, Task, compilers_for, note_of

GPU = ("cuda", 90, 32)
NO_KERNEL = Task("os:path", "", GPU)


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    both = Compilers(2, Share(0, 2))
    yield both
    both.close()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_fails_elsewhere_is_left_to_the_owner_and_other_ranks_shares_come_last(
    compilers: Compilers,
) -> None:
    for wanted in "abcdefgh":
        compilers.submit(Task("os:path", wanted, GPU))
    finished = list(compilers.finished())
    assert sorted(finished) == list(range(8))
    others = [index for index in finished if index in compilers._later]
    assert 0 < len(others) < 8


@pytest.mark.parametrize("is_listening", [False, True])
def test_an_owner_does_not_wait_for_a_process_that_has_died(compilers: Compilers, is_listening: bool) -> None:
    compilers.submit(NO_KERNEL)
    if is_listening:
        assert list(compilers.finished()) == [0]
    compilers._process.kill()
    compilers.submit(NO_KERNEL)
    assert sorted(compilers.finished()) == [0, 1]


def test_an_owner_does_not_wait_for_a_process_that_says_nothing(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.kernels.compilers.PATIENCE", 0.01)
    compilers.submit(NO_KERNEL)
    assert list(compilers.finished()) == [0]


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
