"""The kernel that gathers a step's inputs against its plain reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.slots.gather_rows import gather_rows, gather_rows_ref
from pellucid.rows import SlotViews, StepRows
from pellucid.worker.inputs import StepCounts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS, LENGTH = 40, 1024


def held(num_tables: int, block_size: int, seed: int) -> SlotViews:
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    return SlotViews(
        token_ids=numbers(0, 1000, NUM_SLOTS, LENGTH).int(),
        num_computed=numbers(0, 500, NUM_SLOTS),
        limits=numbers(0, LENGTH, NUM_SLOTS),  # of some slots less than what is computed
        block_tables=tuple(
            numbers(1, 99, NUM_SLOTS, 2 + LENGTH // block_size).int() for _ in range(num_tables)
        ),
        block_size=block_size,
    )


def rows_of(queries: list[int], drafts: list[int], logits: list[int], padding: int = 0) -> StepRows:
    """padding: tokens, and twice as many logits."""
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(len(queries)))[: len(queries)]
    # Cut out of one tensor as in a step, so at addresses of any kind.
    ends = [torch.tensor([0, *counts]).cumsum(0) for counts in (queries, logits)]
    parts = [slots, *ends, *map(torch.tensor, (drafts, queries, logits))]
    cut = torch.cat(parts).to(DEVICE).split([len(part) for part in parts])
    counts = StepCounts(
        slots=slots.numpy(),
        num_query=np.array(queries),
        num_drafts=np.array(drafts),
        num_sampled=np.array(logits),
        num_scores=np.zeros(len(queries), dtype=np.int64),
    )
    return StepRows(
        counts=counts,
        num_tokens=sum(queries) + padding,
        slots=cut[0],
        cu_query=cut[1],
        cu_logits=cut[2],
        num_drafts=cut[3],
        num_query=cut[4],
        num_sampled=cut[5],
        logits_index=cut[0].new_empty(sum(logits) + 2 * padding),
        score_index=cut[0].new_empty(0),
        score_slots=cut[0].new_empty(0),
    )


@pytest.mark.parametrize(
    ("queries", "drafts", "logits"),
    [
        ([1], [0], [1]),
        ([1] * 33, [0] * 33, [1] * 33),
        ([5, 5, 5], [4, 4, 4], [5, 5, 5]),
        ([1, 3, 300, 7], [0, 2, 0, 0], [1, 3, 0, 1]),
        ([512, 1], [0, 0], [0, 0]),
        ([2, 1, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize(("num_tables", "block_size"), [(0, 16), (1, 16), (2, 64)])
@pytest.mark.parametrize("padding", [0, 3, 700])
def test_rows_of_any_kind_match(
    queries: list[int], drafts: list[int], logits: list[int], num_tables: int, block_size: int, padding: int
) -> None:
    step, slots = rows_of(queries, drafts, logits, padding), held(num_tables, block_size, seed=len(queries))
    expected, got = gather_rows_ref(step, slots), gather_rows(step, slots)
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, tuple) else [(ours, theirs)]
        for one, other in pairs:
            assert one.dtype == other.dtype and torch.equal(one, other), field.name
    if padding:
        assert expected.logit_slots[-1] == NUM_SLOTS - 1 and not expected.input_ids[-padding:].any()
        assert not any(mapping[-padding:].any() for mapping in expected.slot_mappings), "beside block 0"
