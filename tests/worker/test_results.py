"""What a step yields comes out of its one packed row as it went in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pellucid.features.logprobs import worker as logprobs_worker
from pellucid.kernels.compile.compilations import LateCompilations
from pellucid.sample.logprobs import LogprobTensors
from pellucid.sample.output import SampleOutput
from pellucid.schedule.plan import StepResult
from pellucid.types import TokenLogprobs
from pellucid.worker.inputs import StepCounts
from pellucid.worker.results import Packed, ResultReader, pack


def packed(tokens: list[list[int]], num_new: list[int]) -> Packed:
    """Of rows with so many new tokens each; those behind them mean nothing."""
    output = SampleOutput(
        tokens=torch.tensor(tokens, dtype=torch.int32), num_new=torch.tensor(num_new, dtype=torch.int32)
    )
    return pack(output, {})


def read(step: Packed, num_rows: int) -> StepResult:
    counts = StepCounts.uniform(np.arange(num_rows), 1)
    return ResultReader(LateCompilations()).begin(7, counts, step).result()


def test_a_token_for_each_row() -> None:
    result = read(packed([[11], [12], [151_643]], [1, 1, 1]), 3)
    assert result.plan_id == 7 and result.tokens == [[11], [12], [151_643]]


def test_rows_of_padding_are_left_out() -> None:
    assert read(packed([[11], [12], [13]], [1, 1, 0]), 2).tokens == [[11], [12]]


def test_a_row_without_a_token_among_others() -> None:
    assert read(packed([[11], [12], [13]], [1, 0, 1]), 3).tokens == [[11], [], [13]]


def test_several_tokens_a_row() -> None:
    step = packed([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [3, 1, 2])
    assert read(step, 3).tokens == [[1, 2, 3], [4], [7, 8]]
    assert read(packed([[1, 2], [3, 4]], [2, 2]), 2).tokens == [[1, 2], [3, 4]]


def test_rows_that_lie_elsewhere() -> None:
    step = packed([[11], [0], [13], [14]], [1, 0, 1, 1])
    there = Packed(flat=step.flat, shapes=step.shapes, places=np.array([0, 2]))
    assert read(there, 2).tokens == [[11], [13]]


def with_logprobs(num_rows: int, asked: np.ndarray) -> Packed:
    """Of a step in which some rows want so many logprobs; each has as many as any wants."""
    n, numbers = int(asked.max()), torch.arange(num_rows, dtype=torch.int32)
    tokens, num_new = numbers[:, None], torch.ones(num_rows, dtype=torch.int32)
    ids = numbers[:, None, None] * 10_000 + torch.arange(n + 1, dtype=torch.int32)
    logprobs = LogprobTensors(ids, -ids.float(), numbers[:, None])
    output = SampleOutput(tokens=tokens, num_new=num_new, logprobs=logprobs)
    facts: Any = SimpleNamespace(sampler=SimpleNamespace(state=SimpleNamespace(num_logprobs=asked)))
    rows: Any = SimpleNamespace(counts=StepCounts.uniform(np.arange(num_rows), 1))
    yielded: Any = SimpleNamespace(output=output)
    home = logprobs_worker.Logprobs(facts).after(rows, yielded)
    return pack(output, {"logprobs": home, "other": None})


def test_logprobs_cost_the_rows_that_ask_and_those_as_many_as_they_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[int]()

    def count(ids: list[int], logprobs: list[float], rank: int) -> TokenLogprobs:
        made.append(len(ids))
        return TokenLogprobs(ids, logprobs, rank)

    monkeypatch.setattr(logprobs_worker, "TokenLogprobs", count)
    asked = np.full(256, -1)
    asked[17], asked[200] = 1000, 2
    step = with_logprobs(256, asked)
    result = read(step, 256)
    entries = result.told["logprobs"].rows
    assert made == [1001, 3] and sorted(entries) == [17, 200]
    (entry,) = entries[200]
    assert entry == TokenLogprobs([2_000_000, 2_000_001, 2_000_002], [-2e6, -2_000_001, -2_000_002], 200)
    assert step.flat.numel() == 2 * 256 + 2 * (2 * 1001 + 1), "others' logprobs come home, too"


def test_a_row_with_nothing_left_to_take_says_so_and_no_other_does() -> None:
    output = SampleOutput(
        tokens=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
        num_new=torch.tensor([2, 1, 0], dtype=torch.int32),
        is_stuck=torch.tensor([[False, True], [False, True], [True, True]]),
    )
    result = read(pack(output, {}), 3)
    assert result.tokens == [[1, 2], [3], []]
    assert result.failed.keys() == {0}, "row 1 has not got so far"


def test_it_may_be_asked_twice() -> None:
    counts = StepCounts.uniform(np.arange(2), 1)
    pending = ResultReader(LateCompilations()).begin(7, counts, packed([[5], [6]], [1, 1]))
    assert pending.result() == pending.result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_of_several_sizes_are_under_way_and_read_late() -> None:
    reader, pending = ResultReader(LateCompilations()), []
    for round in range(6):
        num_rows = (3, 5, 2)[round % 3]
        step = packed([[100 * round + row] for row in range(num_rows)], [1] * num_rows)
        there = replace(step, flat=step.flat.cuda())
        pending.append((round, reader.begin(round, StepCounts.uniform(np.arange(num_rows), 1), there)))
        if len(pending) > 2:
            first, oldest = pending.pop(0)
            assert oldest.result().tokens == [[100 * first + row] for row in range((3, 5, 2)[first % 3])]
    for last, result in pending:
        assert result.result().tokens == [[100 * last + row] for row in range((3, 5, 2)[last % 3])]
