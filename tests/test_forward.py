"""From a step's input to those of a proposer's own steps: the same rows, few queries each."""

from __future__ import annotations

import torch

from pellucid.forward import ForwardInput


def step() -> ForwardInput:
    """A chunk of three tokens, a decode, and a verification of one draft; two KV groups."""
    return ForwardInput(
        input_ids=torch.tensor([11, 12, 13, 21, 31, 32], dtype=torch.int32),
        positions=torch.tensor([4, 5, 6, 9, 2, 3]),
        slots=torch.tensor([0, 2, 1]),
        cu_seqlens_q=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        seq_lens=torch.tensor([7, 10, 4], dtype=torch.int32),
        block_tables=(
            torch.tensor([[5, 6, 7], [8, 9, 4], [1, 2, 3]], dtype=torch.int32),
            torch.tensor([[15, 16], [18, 19], [11, 12]], dtype=torch.int32),
        ),
        slot_mappings=(torch.zeros(6, dtype=torch.int64),) * 2,
        logits_index=torch.tensor([3, 4, 5]),
        query_lens=[3, 1, 2],
        max_query=3,
        block_sizes=(4, 8),
        attn=("planned",),
        taps={"layer": torch.zeros(6)},
    )


def restarted(tokens: list[list[int]], positions: list[list[int]]) -> ForwardInput:
    return step().restart(torch.tensor(tokens, dtype=torch.int32), torch.tensor(positions))


def test_a_restart_has_one_query_a_row_in_the_blocks_of_its_place() -> None:
    fwd = restarted([[1], [2], [3]], [[7], [10], [3]])
    assert fwd.num_rows == 3 and fwd.query_lens == [1, 1, 1] and fwd.max_query == 1
    assert fwd.input_ids.tolist() == [1, 2, 3] and fwd.positions.tolist() == [7, 10, 3]
    assert fwd.seq_lens.tolist() == [8, 11, 4] and fwd.seq_lens.dtype == torch.int32
    assert fwd.cu_seqlens_q.tolist() == [0, 1, 2, 3] and fwd.logits_index.tolist() == [0, 1, 2]
    assert [mapping.tolist() for mapping in fwd.slot_mappings] == [
        [6 * 4 + 3, 4 * 4 + 2, 1 * 4 + 3],
        [15 * 8 + 7, 19 * 8 + 2, 11 * 8 + 3],
    ]
    assert fwd.attn == () and not fwd.taps, "what another model's pass has left"


def test_the_next_step_is_one_position_further() -> None:
    first = restarted([[1], [2], [3]], [[7], [10], [3]])
    fwd = first.next(torch.tensor([4, 5, 6], dtype=torch.int32))
    assert fwd.input_ids.tolist() == [4, 5, 6] and fwd.positions.tolist() == [8, 11, 4]
    assert fwd.seq_lens.tolist() == [9, 12, 5] and fwd.query_lens == [1, 1, 1]
    assert [mapping.tolist() for mapping in fwd.slot_mappings] == [[7 * 4, 4 * 4 + 3, 2 * 4], [128, 155, 92]]
    assert fwd.block_tables is first.block_tables


def test_a_restart_may_have_several_queries_a_row_and_the_next_step_has_one() -> None:
    first = restarted([[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [2, 3]])
    assert first.query_lens == [2, 2, 2] and first.max_query == 2
    assert first.input_ids.tolist() == [1, 2, 3, 4, 5, 6] and first.positions.tolist() == [7, 8, 9, 10, 2, 3]
    assert first.seq_lens.tolist() == [9, 11, 4] and first.cu_seqlens_q.tolist() == [0, 2, 4, 6]
    assert first.logits_index.tolist() == [1, 3, 5]
    assert first.slot_mappings[0].tolist() == [6 * 4 + 3, 7 * 4, 4 * 4 + 1, 4 * 4 + 2, 1 * 4 + 2, 1 * 4 + 3]
    fwd = first.next(torch.tensor([7, 8, 9], dtype=torch.int32))
    expected = restarted([[7], [8], [9]], [[9], [11], [4]])
    for name in ("input_ids", "positions", "seq_lens", "cu_seqlens_q", "logits_index"):
        assert torch.equal(getattr(fwd, name), getattr(expected, name)), name
    assert [m.tolist() for m in fwd.slot_mappings] == [m.tolist() for m in expected.slot_mappings]
    assert fwd.query_lens == [1, 1, 1] and fwd.max_query == 1
