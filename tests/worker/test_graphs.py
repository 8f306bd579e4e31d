"""Padded steps on static buffers give the tokens of steps as they are.  Here replaying is running again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.executor.local import LocalExecutor
from pellucid.worker.graphs import EagerLauncher, GraphLauncher, StaticRows, bucket_sizes, recording_stream
from pellucid.worker.inputs import StepCounts
from pellucid.worker.worker import Worker
from tests.llm.test_invariance import random_requests
from tests.spec.toy import tree_config

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 16,
    "max_num_seqs": 20,
    "check_invariants": True,
}


def worker_of(llm: LLM) -> Worker:
    executor = llm.llm_engine.engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor.worker


def graphed(worker: Worker) -> GraphLauncher:
    """The worker's launcher, in place, with recordings of up to 20 rows that run the step again."""
    eager, slots = worker.runner.launcher, worker.runner.slots
    assert isinstance(eager, EagerLauncher)
    static = StaticRows(20, 1 + worker.resolved.num_spec, slots.spare, torch.device("cpu"))
    runner = worker.runner
    launcher = GraphLauncher(eager, static, runner.state, runner.features, lambda: lambda run: run)
    launcher.capture()
    worker.runner.launcher = launcher
    return launcher


STANDARD = {"rejection_sample_method": "standard"}


@pytest.mark.parametrize("method", [{}, STANDARD], ids=["strict", "standard"])
@pytest.mark.parametrize("drafter", [None, "ngram", "tiny_draft"])
def test_padded_steps_give_the_same_tokens(
    tiny: Path, tiny_draft: Path, drafter: str | None, method: dict[str, object]
) -> None:
    model = str(tiny_draft) if drafter == "tiny_draft" else drafter
    drafts = {"speculative_config": {"model": model, "num_speculative_tokens": 3} | method} if model else {}
    plainly = drafts if method else {}  # other drafts are other tokens there
    prompts, params = random_requests(40, seed=4)
    plain = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens) for p in params]

    def run(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, plain, use_tqdm=False) + llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(str(tiny), **OPTIONS, **plainly) as llm:
        expected = run(llm)
    with LLM(str(tiny), **OPTIONS, **drafts) as llm:
        launcher = graphed(worker_of(llm))
        seen: list[int] = []
        load = launcher.static.load

        def counting(slots: np.ndarray, num_rows: int) -> None:
            seen.append(num_rows - len(slots))
            load(slots, num_rows)

        launcher.static.load = counting  # type: ignore[method-assign]
        assert run(llm) == expected
        assert len(seen) > 20 and any(seen), "no step was padded"


def test_padded_steps_with_trees_give_the_same_tokens(tiny: Path) -> None:
    prompts, params = random_requests(30, seed=4)
    plain = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens) for p in params]
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, plain, use_tqdm=False)]
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    with LLM(str(tiny), **OPTIONS, speculative_config=tree_config((0, 0, 1, 1, 2), texts)) as llm:
        launcher = graphed(worker_of(llm))
        assert launcher.num_rows_for(StepCounts.uniform(np.arange(3), 6)) == 4
        outputs = llm.generate(prompts, plain, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.llm_engine.stats.num_accepted_tokens > 100


def test_what_no_recording_serves_is_launched_as_it_is(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        worker = worker_of(llm)
        launcher = graphed(worker)

        def rows_for(num_rows: int, num_query: int = 1) -> int | None:
            return launcher.num_rows_for(StepCounts.uniform(np.arange(num_rows), num_query))

        assert rows_for(3) == 4
        assert rows_for(20) == 20
        assert rows_for(2, num_query=5) is None
        assert launcher.num_rows_for(replace(StepCounts.uniform(np.arange(3), 1), num_propose=2)) is None


@pytest.mark.parametrize(("max_rows", "expected"), [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 12, 16])])
def test_sizes_end_at_the_largest_step(max_rows: int, expected: list[int]) -> None:
    assert bucket_sizes(max_rows) == expected


def test_each_device_records_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    devices = (97, 98)  # which no machine has: what is made is kept
    streams = [recording_stream(device) for device in devices * 2]
    assert made == [97, 98] and streams[:2] == streams[2:]
