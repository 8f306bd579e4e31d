"""The kernels behind the draw against their plain references: which drafts stand, and what the slots get."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels import advance_slots as slots_kernels
from pellucid.kernels.verify_chain import verify_chain, verify_chain_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS, LENGTH = 20, 64


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize("max_new", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 13])
def test_the_same_drafts_stand(max_new: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(max_new)
    seen: set[int] = set()
    for _ in range(10):
        # Tokens of two kinds, so that drafts often stand; rows without logits, and without room.
        counts = integers(generator, max_new + 1, num_rows)
        cu_logits = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
        chosen, inputs = (integers(generator, 2, int(counts.sum())).int() for _ in range(2))
        room = integers(generator, max_new + 2, num_rows) - 1
        samples = integers(generator, 5, num_rows) > 0
        args = (chosen, inputs, cu_logits, room, samples)
        flat, expected = verify_chain(*args, max_new=max_new), verify_chain_ref(*args, max_new=max_new)
        assert flat.dtype == expected.dtype == torch.int32 and flat.shape == expected.shape
        (tokens, num_new), (tokens_ref, num_new_ref) = (
            part.split([num_rows * max_new, num_rows]) for part in (flat, expected)
        )
        assert torch.equal(num_new, num_new_ref)
        counted = torch.arange(max_new, device=DEVICE) < num_new[:, None]
        assert torch.equal(tokens.view(-1, max_new)[counted], tokens_ref.view(-1, max_new)[counted])
        seen |= set(num_new.tolist())
    assert num_rows == 1 or len(seen) >= min(3, max_new)


def step_of(num_rows: int, max_new: int) -> tuple[slots_kernels.RowState, Tensor, Tensor]:
    """Rows, tokens and how many of them count: prompt chunks, and rows with up to max_new - 1 drafts."""
    generator = torch.Generator().manual_seed(num_rows)
    num_drafts = integers(generator, max_new, num_rows)
    starts, samples = integers(generator, 30, num_rows), integers(generator, 4, num_rows) > 0
    query_lens = 1 + num_drafts + (~samples) * integers(generator, 9, num_rows)
    num_new = torch.minimum(integers(generator, max_new + 1, num_rows), 1 + num_drafts) * samples
    rows = slots_kernels.RowState(
        slots=torch.randperm(NUM_SLOTS - 1, generator=generator)[:num_rows].to(DEVICE),
        starts=starts,
        query_lens=query_lens,
        roots=starts + query_lens - 1 - num_drafts,
        room=torch.full_like(starts, 99),
        samples=samples,
    )
    return rows, 100 + integers(generator, 100, num_rows, max_new).int(), num_new.int()


@pytest.mark.parametrize("max_new", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 11])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_slots_get_the_same(max_new: int, num_rows: int, transposed: bool) -> None:
    rows, tokens, num_new = step_of(num_rows, max_new)
    drafts = tokens.flip(0).T.contiguous().T if transposed else tokens + 100
    states = [
        (
            torch.zeros((NUM_SLOTS, LENGTH), dtype=torch.int32, device=DEVICE),
            torch.arange(NUM_SLOTS, device=DEVICE) + 40,
        )
        for _ in range(2)
    ]
    newest = [
        advance(*state, rows, tokens, num_new)
        for advance, state in zip(
            (slots_kernels.advance_slots, slots_kernels.advance_slots_ref), states, strict=True
        )
    ]
    assert torch.equal(*newest)
    for write, state, places in zip(
        (slots_kernels.write_drafts, slots_kernels.write_drafts_ref), states, newest, strict=True
    ):
        write(state[0], rows.slots, places, rows.samples, drafts)
    spare = NUM_SLOTS - 1  # takes anything
    assert torch.equal(states[0][0][:spare], states[1][0][:spare])
    assert torch.equal(states[0][1], states[1][1])
    assert (states[0][0][:spare] > 0).any() == rows.samples.any()
