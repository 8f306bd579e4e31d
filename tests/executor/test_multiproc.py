"""Workers in their own processes: one that dies, fails or hangs is named, and every request is answered."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pellucid import LLM, LLMEngine, SamplingParams

OPTIONS = {"dtype": "float32", "device": "cpu", "block_size": 16, "cpu_kv_cache_gib": 0.05}


def worker(rank: int) -> BaseProcess:
    (process,) = (
        p for p in multiprocessing.active_children() if p.name.startswith(f"pellucid worker {rank} of")
    )
    return process


def started(tiny: Path, **options: object) -> LLMEngine:
    engine = LLMEngine.from_options(model=str(tiny), tensor_parallel_size=2, **(OPTIONS | options))
    for _ in range(3):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(4):
        engine.step()
    return engine


def finish(engine: LLMEngine) -> list[str | None]:
    """Step until every request is answered; the reasons."""
    reasons = []
    while engine.has_unfinished_requests():
        reasons += [output.outputs[0].finish_reason for output in engine.step() if output.finished]
    return reasons


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_is_named_and_ends_the_engine(tiny: Path, rank: int) -> None:
    engine = started(tiny)
    worker(rank).kill()
    assert finish(engine) == ["error"] * 3
    assert f"worker {rank} has died (exit code -9), its last plan was" in (engine.engine.error or "")
    assert not multiprocessing.active_children(), "the others live on"
    engine.shutdown()


def test_a_worker_that_hangs_is_named_in_time(tiny: Path) -> None:
    engine = started(tiny, worker_timeout=1.0)
    os.kill(worker(1).pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    assert finish(engine) == ["error"] * 3
    assert time.monotonic() - began < 10
    error = engine.engine.error or ""
    assert "waiting for worker 1, its last plan was" in error
    assert "worker 0" not in error
    assert not multiprocessing.active_children(), "a stopped worker lives on"
    engine.shutdown()


def test_what_the_user_can_mend_is_a_value_error(tiny: Path) -> None:
    with pytest.raises(ValueError, match="lower max_model_len to 48"):
        LLM(
            str(tiny),
            tensor_parallel_size=2,
            **(OPTIONS | {"max_model_len": 256, "num_gpu_blocks_override": 3}),
        )
    assert not multiprocessing.active_children()


def test_one_worker_may_have_a_process_of_its_own(tiny: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(str(tiny), executor="multiproc", depth=2, **OPTIONS) as llm:
        assert llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert not multiprocessing.active_children(), "shutdown leaves workers behind"


def test_a_wish_that_contradicts_itself_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="executor is 'local', which runs one worker, not 2"):
        LLM(str(tiny), tensor_parallel_size=2, executor="local", **OPTIONS)
