"""From a step's input to those of a drafter's own passes: the same rows, few queries each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid.forward import ForwardInput
from pellucid.spec.base import Known
from pellucid.spec.passes import EvenTiles, Passes
from pellucid.taps import Taps

TEXTS = torch.arange(4 * 24, dtype=torch.int32).view(4, 24)  # token 24 s + p at place p of slot s


def step() -> ForwardInput:
    """A chunk of three tokens, a decode, and a verification of one draft; two block tables."""
    return ForwardInput(
        input_ids=torch.tensor([11, 12, 13, 21, 31, 32], dtype=torch.int32),
        positions=torch.tensor([4, 5, 6, 9, 2, 3]),
        slots=torch.tensor([0, 2, 1]),
        cu_seqlens_q=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        seq_lens=torch.tensor([7, 10, 4], dtype=torch.int32),
        block_tables=(
            torch.tensor([[5, 6, 7], [8, 9, 4], [1, 2, 3]], dtype=torch.int32),
            torch.tensor([[15, 16, 17], [18, 19, 14], [11, 12, 13]], dtype=torch.int32),
        ),
        slot_mappings=(torch.zeros(6, dtype=torch.int64),) * 2,
        logits_index=torch.tensor([3, 4, 5]),
        query_lens=[3, 1, 2],
        max_query=3,
        block_size=4,
        attn=("planned",),
        taps=Taps((0,)),
    )


def passes(lengths: list[int], num_query: int, num_wanted: int = 2) -> Passes:
    known = Known(
        token_ids=TEXTS,
        newest=torch.tensor(lengths) - 1,
        samples=torch.ones(3, dtype=torch.bool),
        host_slots=np.array([0, 2, 1]),
        has_chunks=num_query == 1,
        num_wanted=num_wanted,
    )
    return Passes.behind(step(), known, num_query=num_query)


def test_the_first_pass_has_the_newest_known_token_in_the_block_of_its_place() -> None:
    ahead = passes([8, 11, 4], num_query=1)
    fwd = ahead.first()
    assert fwd.num_rows == 3 and fwd.query_lens == [1, 1, 1] and fwd.max_query == 1
    assert fwd.input_ids.tolist() == [7, 48 + 10, 24 + 3] and fwd.positions.tolist() == [7, 10, 3]
    assert fwd.seq_lens.tolist() == [8, 11, 4] and fwd.seq_lens.dtype == torch.int32
    assert fwd.cu_seqlens_q.tolist() == [0, 1, 2, 3] and fwd.logits_index.tolist() == [0, 1, 2]
    assert [mapping.tolist() for mapping in fwd.slot_mappings] == [
        [6 * 4 + 3, 4 * 4 + 2, 1 * 4 + 3],
        [16 * 4 + 3, 14 * 4 + 2, 11 * 4 + 3],
    ]
    assert fwd.attn == () and not fwd.taps.layers, "what another model's pass has left"
    assert ahead.drawn(0).tolist() == [8, 11, 4], "a token is drawn for the place behind"


def test_the_next_pass_is_one_place_further() -> None:
    ahead = passes([8, 11, 4], num_query=1)
    fwd = ahead.next(1, torch.tensor([4, 5, 6], dtype=torch.int32))
    assert fwd.input_ids.tolist() == [4, 5, 6] and fwd.positions.tolist() == [8, 11, 4]
    assert fwd.seq_lens.tolist() == [9, 12, 5] and fwd.query_lens == [1, 1, 1]
    assert [mapping.tolist() for mapping in fwd.slot_mappings] == [
        [7 * 4, 4 * 4 + 3, 2 * 4],
        [17 * 4, 14 * 4 + 3, 12 * 4],
    ]
    assert ahead.drawn(1).tolist() == [9, 12, 5]
    assert fwd.block_tables is ahead.first().block_tables


def test_the_first_pass_may_have_the_token_before_it_too() -> None:
    ahead = passes([9, 11, 4], num_query=2)
    fwd = ahead.first()
    assert fwd.query_lens == [2, 2, 2] and fwd.max_query == 2
    assert fwd.positions.tolist() == [7, 8, 9, 10, 2, 3] and fwd.seq_lens.tolist() == [9, 11, 4]
    assert fwd.input_ids.tolist() == [7, 8, 48 + 9, 48 + 10, 24 + 2, 24 + 3]
    assert fwd.cu_seqlens_q.tolist() == [0, 2, 4, 6] and fwd.logits_index.tolist() == [1, 3, 5]
    assert fwd.slot_mappings[0].tolist() == [6 * 4 + 3, 7 * 4, 4 * 4 + 1, 4 * 4 + 2, 1 * 4 + 2, 1 * 4 + 3]
    fwd = ahead.next(1, torch.tensor([7, 8, 9], dtype=torch.int32))
    expected = passes([10, 12, 5], num_query=1, num_wanted=1).first()
    for name in ("positions", "seq_lens", "cu_seqlens_q", "logits_index"):
        assert torch.equal(getattr(fwd, name), getattr(expected, name)), name
    assert [m.tolist() for m in fwd.slot_mappings] == [m.tolist() for m in expected.slot_mappings]
    assert fwd.query_lens == [1, 1, 1] and fwd.max_query == 1


def test_a_row_that_has_nothing_new_goes_on_behind_what_the_step_has_fed() -> None:
    ahead = passes([3, 10, 3], num_query=2)
    assert ahead.first().positions.tolist() == [4, 5, 9, 10, 2, 3]
    assert ahead.drawn(0).tolist() == [3, 10, 3], "what it draws is nobody's"


@pytest.mark.parametrize("num_query", [1, 9, 16, 33, 64])
def test_tiles_of_rows_that_are_even_are_those_of_any(num_query: int) -> None:
    """Made on the device, in the order in which the host makes them."""
    prefill = pytest.importorskip("pellucid.kernels.attention.prefill_attention")
    tiles = EvenTiles(3, num_query, torch.device("cpu"))
    made = tiles.get(16, prefill.prefill_tiles, all_wanted=True)
    assert made.tolist() == prefill.prefill_tiles([num_query] * 3, 16).tolist()
