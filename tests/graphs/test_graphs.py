"""Padded steps on static buffers give the tokens of steps as they are.  Here replaying is running again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.executor.local import LocalExecutor
from pellucid.graphs.launch import EagerLauncher, GraphLauncher, Recording, recording_stream
from pellucid.graphs.shapes import StepShape, bucket_sizes, chunk_shapes, decode_shapes
from pellucid.spec.drafter import Drafter
from pellucid.worker.inputs import StepCounts
from pellucid.worker.worker import Worker
from tests.llm.test_invariance import random_requests
from tests.spec.toy import tree_config

T = TypeVar("T")
OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 16,
    "max_num_seqs": 20,
    "check_invariants": True,
}


def worker_of(llm: LLM) -> Worker:
    executor = llm.llm_engine.engine.executor  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(executor, LocalExecutor)
    return executor.worker


def run_again(run: Callable[[], T]) -> Callable[[], T]:
    """As a CUDA graph is recorded: after one run, and replayed by running."""
    run()
    return run


def recorded_shapes(worker: Worker, max_rows: int = 20) -> dict[StepShape, bool]:
    resolved, takes_passes = worker.resolved, worker._drafter is Drafter.KEEPS_KV
    most = 1 + resolved.num_spec, resolved.max_num_batched_tokens
    return decode_shapes(max_rows, *most, max_short=8, takes_passes=takes_passes)


def graphed(worker: Worker, shapes: Mapping[StepShape, bool] | None = None) -> GraphLauncher:
    """The worker's launcher, in place, with recordings that run the step again."""
    eager, runner = worker.runner.launcher, worker.runner
    assert isinstance(eager, EagerLauncher)
    shapes = shapes or recorded_shapes(worker)
    launcher = GraphLauncher(eager, shapes, runner.state, runner.features, lambda: run_again)
    launcher.capture()
    worker.runner.launcher = launcher
    return launcher


class Seen:
    """Which recordings steps have taken, and with how much to spare."""

    def __init__(self, launcher: GraphLauncher) -> None:
        self.found: list[tuple[StepShape, StepCounts]] = []
        self.num_eager = 0
        self._find = launcher.find
        launcher.find = self  # type: ignore[method-assign]

    def __call__(self, counts: StepCounts, *, by_halves: bool = False) -> Recording | None:
        found = self._find(counts, by_halves=by_halves)
        if found is None:
            self.num_eager += 1
        else:
            self.found.append((found.rows.shape, counts))
        return found


def run(llm: LLM, num: int) -> list[list[int]]:
    """Of so many random requests, first without their filters and penalties."""
    prompts, params = random_requests(num, seed=4)
    plain = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens) for p in params]
    outputs = llm.generate(prompts, plain, use_tqdm=False) + llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def plainly(model: Path, num: int) -> list[list[int]]:
    with LLM(str(model), **OPTIONS) as llm:
        return run(llm, num)


STANDARD = {"rejection_sample_method": "standard"}


@pytest.mark.parametrize("num", [24, pytest.param(40, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("drafter", "method"),
    [(None, {}), ("ngram", {}), ("tiny_draft", {}), ("ngram", STANDARD), ("tiny_draft", STANDARD)],
    ids=["none", "ngram", "tiny_draft", "ngram, standard", "tiny_draft, standard"],
)
def test_padded_steps_give_the_same_tokens(
    tiny: Path, tiny_draft: Path, drafter: str | None, method: dict[str, object], num: int
) -> None:
    model = str(tiny_draft) if drafter == "tiny_draft" else drafter
    drafts = (
        {"speculative_config": {"model": model, "num_speculative_tokens": 3, "adaptive": False} | method}
        if model
        else {}
    )
    if method:  # other drafts are other tokens there
        with LLM(str(tiny), **OPTIONS, **drafts) as llm:
            expected = run(llm, num)
    else:
        expected = plainly(tiny, num)
    with LLM(str(tiny), **OPTIONS, **drafts) as llm:
        seen = Seen(graphed(worker_of(llm)))
        assert run(llm, num) == expected
    assert sum(shape.num_rows > counts.num_rows for shape, counts in seen.found) > 20, "no step was padded"


def test_steps_in_which_rows_have_a_draft_each_make_one_pass_and_give_the_same_tokens(
    tiny: Path, tiny_draft: Path
) -> None:
    drafts = {"model": str(tiny_draft), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(tiny), **OPTIONS, speculative_config=drafts) as llm:
        seen = Seen(graphed(worker_of(llm)))
        llm.llm_engine.engine.scheduler.wants._most = 1  # pyright: ignore
        assert run(llm, 24) == plainly(tiny, 24)
        assert sum(shape.max_query == 2 for shape, _ in seen.found) > 20
        launcher = llm.llm_engine.engine.executor.worker.runner.launcher  # pyright: ignore
        assert [shape_for(launcher, [2] * 8, num).max_query for num in (0, 1, 2, 3)] == [2, 2, 4, 4]  # pyright: ignore


def test_padded_steps_with_trees_give_the_same_tokens(tiny: Path) -> None:
    prompts, params = random_requests(30, seed=4)
    plain = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens) for p in params]
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, plain, use_tqdm=False)]
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    with LLM(str(tiny), **OPTIONS, speculative_config=tree_config((0, 0, 1, 1, 2), texts)) as llm:
        launcher = graphed(worker_of(llm))
        assert shape_for(launcher, [6, 6, 6]) == StepShape(24, 4, 0, 6, 24)
        outputs = llm.generate(prompts, plain, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.llm_engine.stats.num_accepted_tokens > 100


def counts_of(queries: list[int], num_propose: int = 0) -> StepCounts:
    """Decodes and verifications."""
    num_query = np.array(queries)
    return StepCounts(
        slots=np.arange(len(queries)),
        num_query=num_query,
        num_drafts=num_query - 1,
        num_sampled=num_query,
        num_scores=np.zeros_like(num_query),
        num_propose=num_propose,
    )


def shape_for(launcher: GraphLauncher, queries: list[int], num_propose: int = 0) -> StepShape | None:
    found = launcher.find(counts_of(queries, num_propose))
    return None if found is None else found.rows.shape


def test_a_step_takes_the_smallest_shape_with_room(tiny: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    with LLM(str(tiny), **OPTIONS, speculative_config=drafts) as llm:
        launcher = graphed(worker_of(llm))

        def tokens(queries: list[int], num_propose: int = 0) -> tuple[int, int] | None:
            shape = shape_for(launcher, queries, num_propose)
            return None if shape is None else (shape.num_tokens, shape.num_rows)

        assert tokens([1, 1, 1]) == (4, 4), "no drafts: the plain step"
        assert tokens([1, 1, 1], num_propose=4) == (20, 4), "drafts are to follow"
        assert tokens([5] * 4, num_propose=4) == (20, 4)
        assert tokens([5, 1, 2], num_propose=1) == (20, 4)
        assert tokens([5] * 4) == (20, 4), "those that follow are not looked at"
        assert tokens([5] * 4 + [1] * 12, num_propose=4) == (32, 16), "two tokens a row, however dealt out"
        assert tokens([5] * 5 + [1] * 12, num_propose=4) == (40, 20)
        assert tokens([5] * 20, num_propose=4) == (100, 20)
        assert tokens([6]) is None and tokens([1] * 21) is None
        halves = launcher.find(counts_of([5] * 4 + [1] * 12), by_halves=True)
        assert halves is not None and halves.rows.shape.num_tokens == 80


@pytest.mark.parametrize(("num_drafts", "expected"), [(0, (4, 4)), (3, (16, 4)), (9, (40, 5))])
def test_drafts_of_any_number_are_recorded(tiny: Path, num_drafts: int, expected: tuple[int, int]) -> None:
    """Rows of more queries than attention takes as short ones are chunks to it, with an empty one behind."""
    drafts = {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    }
    with LLM(str(tiny), **OPTIONS, **(drafts if num_drafts else {})) as llm:
        shape = shape_for(graphed(worker_of(llm)), [1 + num_drafts] * 4, num_drafts)
    assert shape is not None and (shape.num_tokens, shape.num_rows) == expected


@pytest.mark.parametrize(("max_rows", "expected"), [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 12, 16])])
def test_sizes_end_at_the_largest_step(max_rows: int, expected: list[int]) -> None:
    assert bucket_sizes(max_rows) == expected


def test_sizes_beyond_512_are_coarse() -> None:
    assert bucket_sizes(1100)[-4:] == [512, 768, 1024, 1100]


@pytest.mark.parametrize("takes_passes", [False, True])
@pytest.mark.parametrize("max_query", [1, 5, 8])
def test_no_more_is_recorded_than_start_has_time_for(max_query: int, takes_passes: bool) -> None:
    """A recording by halves is three graphs, one whole and one of chunks are one and two: 20 ms each."""

    def num_graphs(max_query: int) -> int:
        shapes = decode_shapes(256, max_query, 8192, max_short=8, takes_passes=takes_passes)
        return sum(1 + 2 * by_halves for by_halves in shapes.values())

    assert num_graphs(1) == 3 * len(bucket_sizes(256)) == 48
    assert (num_graphs(max_query) - 48) * 0.02 < 1
    assert len(chunk_shapes(8192, 256, 5, max_short=8)) <= 12


def test_no_shape_has_more_tokens_than_a_step() -> None:
    shapes = decode_shapes(64, 5, 100, max_short=8)
    assert max(shape.num_tokens for shape in shapes) == 100
    assert all(shape.num_tokens >= shape.num_rows for shape in shapes)


def test_each_device_records_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    devices = (97, 98)  # which no machine has: what is made is kept
    streams = [recording_stream(device) for device in devices * 2]
    assert made == [97, 98] and streams[:2] == streams[2:]


def test_recordings_go_without_the_garbage_collector(tiny: Path) -> None:
    """A graph that is let go while another one is recorded spoils that one."""

    def record(run: Callable[[], T]) -> Callable[[], T]:
        yielded = run()  # as a graph keeps it, and not what has launched it
        return lambda: yielded

    with LLM(str(tiny), **OPTIONS) as llm:
        worker = worker_of(llm)
        eager, runner = worker.runner.launcher, worker.runner
        assert isinstance(eager, EagerLauncher)
        shapes = recorded_shapes(worker) | {StepShape(64, 0, 8, 1, 8): True}
        launcher = GraphLauncher(eager, shapes, runner.state, runner.features, lambda: record)
        launcher.capture()
        recordings = [weakref.ref(recording) for recording in launcher._recordings.values()]
        gc.disable()
        try:
            launcher._recordings.clear()
            assert [recording() for recording in recordings] == [None] * len(recordings)
        finally:
            gc.enable()
