"""Padded steps on static buffers give the tokens of steps as they are.  Here replaying is running again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pellucid import LLM
from pellucid.executor.local import LocalExecutor
from pellucid.forward import ForwardInput
from pellucid.worker.graphs import EagerForward, GraphedForward, StaticInput, bucket_sizes
from pellucid.worker.worker import Worker
from tests.llm.test_invariance import random_requests

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


def graphed(eager: EagerForward, slots_tables: tuple[torch.Tensor, ...]) -> GraphedForward:
    widths = tuple(table.shape[1] for table in slots_tables)
    return GraphedForward(
        eager, StaticInput(20, widths, torch.device("cpu")), make_recorder=lambda: lambda run: run
    )


def test_padded_steps_give_the_same_tokens(tiny: Path) -> None:
    prompts, params = random_requests(40, seed=4)
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(tiny), **OPTIONS) as llm:
        runner = worker_of(llm).runner
        assert isinstance(runner.forward, EagerForward)
        forward = graphed(runner.forward, runner.slots.block_tables)
        forward.capture()
        seen: list[int] = []
        load = forward.static.load

        def counting(fwd: ForwardInput, num_rows: int) -> None:
            seen.append(num_rows - fwd.num_rows)
            load(fwd, num_rows)

        forward.static.load = counting  # type: ignore[method-assign]
        runner.forward = forward
        tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        assert tokens == expected
        assert len(seen) > 20 and any(seen), "no step was padded"


def test_prompt_chunks_and_steps_that_are_too_large_run_as_they_are(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        runner = worker_of(llm).runner
        assert isinstance(runner.forward, EagerForward)
        forward = graphed(runner.forward, runner.slots.block_tables)
        forward.capture()
        assert forward.num_rows_for(forward.static.view(3)) == 4
        assert forward.num_rows_for(forward.static.view(20)) == 20
        chunk = forward.static.view(2)
        chunk.max_query = 5
        assert forward.num_rows_for(chunk) is None


@pytest.mark.parametrize(("max_rows", "expected"), [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 12, 16])])
def test_sizes_end_at_the_largest_step(max_rows: int, expected: list[int]) -> None:
    assert bucket_sizes(max_rows) == expected
