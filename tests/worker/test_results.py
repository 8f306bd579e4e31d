"""What a step yields comes out of its one packed row as it went in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid.kernels.compilations import LateCompilations
from pellucid.sample.output import SampleOutput
from pellucid.schedule.plan import StepResult
from pellucid.worker.inputs import StepCounts
from pellucid.worker.results import Packed, ResultReader, pack


def packed(tokens: list[list[int]], num_new: list[int]) -> Packed:
    """Of rows with so many new tokens each; those behind them mean nothing."""
    output = SampleOutput(
        tokens=torch.tensor(tokens, dtype=torch.int32), num_new=torch.tensor(num_new, dtype=torch.int32)
    )
    return pack(output, torch.empty(len(tokens), 0, dtype=torch.int32), None)


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
    there = Packed(
        flat=step.flat,
        shapes=step.shapes,
        has_drafts=False,
        has_logprobs=False,
        has_scores=False,
        places=np.array([0, 2]),
    )
    assert read(there, 2).tokens == [[11], [13]]


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
