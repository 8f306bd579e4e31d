# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Where a drafter's own passes compute: known for a whole chain before its first token is drawn.

One launch for each block table, instead of a dozen for each draft.  The passes of a row take places one after
another: the first of them n, its newest known tokens, each of the others one.

Legend: B rows, P passes, n queries of a row in the first pass, T tokens of the step before, M blocks a row,
L columns of the token table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton

BLOCK = 32  # places of a row that a program looks at together
ALIGNED = 4  # rows: what a pass has begins at a multiple of 16 bytes, as kernels' variants want it


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The rows of a step, and behind what to go on."""

    slots: Tensor  # [B] int64
    newest: Tensor  # [B] int64, the place of the newest token that is known
    token_ids: Tensor  # [slots, L] int32
    positions: Tensor  # [T] int64, of the step's tokens
    cu_seqlens_q: Tensor  # [B + 1] int32, whose they are
    block_tables: tuple[Tensor, ...]  # [B, M] int32 each, at least one
    block_size: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlaces:
    """What P passes see, but for the tokens that they draw."""

    input_ids: Tensor  # [B * n] int32, of the first pass
    positions: tuple[Tensor, ...]  # per pass: [B * n] int64, then [B] of each
    seq_lens: tuple[Tensor, ...]  # per pass: [B] int32
    slot_mappings: tuple[tuple[Tensor, ...], ...]  # per pass, per table: as many int64 as positions
    cu_seqlens_q: tuple[Tensor, Tensor]  # of the first pass, and of each other: [B + 1] int32
    logits_index: tuple[Tensor, Tensor]  # of the same, [B] int64: each row's last token
    drawn: tuple[Tensor, ...]  # per pass: [B] int64, positions of the tokens to be drawn


def draft_places_ref(behind: Behind, num_query: int, num_passes: int) -> DraftPlaces:
    """The places of P = `num_passes` passes, the first of which has n = `num_query` queries a row, 1 or 2.

    A row that has nothing new, such as padding, never goes back before the step's own tokens if n is 2, nor
    before place 0.
    """
    newest = behind.newest
    start = newest
    if num_query > 1:
        first, end = behind.cu_seqlens_q[:-1].long(), behind.cu_seqlens_q[1:]
        fed = behind.positions[first.clamp(max=len(behind.positions) - 1)].where(first < end, 0)
        start = torch.maximum(newest, fed + 1) - (num_query - 1)
    num_rows, device = len(newest), newest.device
    places = [start[:, None] + torch.arange(num_query, device=device)]
    places += [(start + num_query - 1 + i)[:, None] for i in range(1, num_passes)]
    tables, size = behind.block_tables, behind.block_size
    ends = [torch.arange(num_rows + 1, device=device) * queries for queries in (num_query, 1)]
    return DraftPlaces(
        input_ids=behind.token_ids[behind.slots[:, None], places[0]].flatten(),
        positions=tuple(place.flatten() for place in places),
        seq_lens=tuple((place[:, -1] + 1).int() for place in places),
        slot_mappings=tuple(
            tuple((t.gather(1, place // size).long() * size + place % size).flatten() for t in tables)
            for place in places
        ),
        cu_seqlens_q=(ends[0].int(), ends[1].int()),
        logits_index=(ends[0][1:] - 1, ends[1][1:] - 1),
        drawn=tuple(newest + i for i in range(1, num_passes + 1)),
    )


def draft_places(behind: Behind, num_query: int, num_passes: int) -> DraftPlaces:
    """As `draft_places_ref`, in one launch for each block table."""
    slots, token_ids = behind.slots, behind.token_ids
    assert slots.is_contiguous() and behind.newest.is_contiguous() and behind.positions.is_contiguous()
    assert behind.block_tables, "no block table"
    num_rows = len(slots)
    width = -(-num_rows // ALIGNED) * ALIGNED
    num_places = num_query + num_passes - 1

    def by_pass(flat: Tensor) -> tuple[Tensor, ...]:
        """A tensor of all places, cut into what each pass has."""
        first, rest = flat[: num_rows * num_query], flat[num_query * width :].view(-1, width)
        return (first, *rest[:, :num_rows].unbind())

    input_ids = token_ids.new_empty(num_rows * num_query)
    positions = slots.new_empty(num_places * width)
    seq_lens = slots.new_empty((num_passes, width), dtype=torch.int32)
    cu_seqlens = slots.new_empty((2, width + ALIGNED), dtype=torch.int32)
    logits_index, drawn = slots.new_empty((2, width)), slots.new_empty((num_passes, width))
    mappings = [torch.empty_like(positions) for _ in behind.block_tables]
    for table, mapping in zip(behind.block_tables, mappings, strict=True):
        draft_places_kernel[(num_rows,)](
            slots,
            behind.newest,
            token_ids,
            behind.positions,
            behind.cu_seqlens_q,
            table,
            input_ids,
            positions,
            seq_lens,
            cu_seqlens,
            logits_index,
            drawn,
            mapping,
            token_ids.stride(0),
            table.stride(0),
            num_query,
            num_places,
            width,
            BLOCK_SIZE=behind.block_size,
            BLOCK=BLOCK,
            ALIGNED=ALIGNED,
            num_warps=1,
            **dependent(),
        )
    return DraftPlaces(
        input_ids=input_ids,
        positions=by_pass(positions),
        seq_lens=seq_lens[:, :num_rows].unbind(),
        slot_mappings=tuple(zip(*map(by_pass, mappings), strict=True)),
        cu_seqlens_q=cu_seqlens[:, : num_rows + 1].unbind(),
        logits_index=logits_index[:, :num_rows].unbind(),
        drawn=drawn[:, :num_rows].unbind(),
    )


@triton.jit(
    do_not_specialize=["num_query", "num_places", "width"],
    do_not_specialize_on_alignment=["slots_ptr", "cu_seqlens_q_ptr"],
)
def draft_places_kernel(
    slots_ptr,  # [B]
    newest_ptr,  # [B]
    token_ids_ptr,
    step_positions_ptr,  # [T]
    cu_seqlens_q_ptr,  # [B + 1]
    table_ptr,
    input_ids_ptr,  # [B * n]
    positions_ptr,  # [B * n], then from n * width on [P - 1, width]
    seq_lens_ptr,  # [P, width]
    cu_seqlens_ptr,  # [2, width + ALIGNED]
    logits_index_ptr,  # [2, width]
    drawn_ptr,  # [P, width]
    mapping_ptr,  # as positions
    token_stride,
    table_stride,
    num_query,  # n
    num_places,  # n - 1 + P
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row.  Launches for several tables write the same, but for the mapping."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait(DEPENDENT)
    slot = tl.load(slots_ptr + row)
    newest = tl.load(newest_ptr + row)
    start = newest
    if num_query > 1:
        token, end = tl.load(cu_seqlens_q_ptr + row), tl.load(cu_seqlens_q_ptr + row + 1)
        fed = tl.load(step_positions_ptr + token, mask=token < end, other=0)
        start = tl.maximum(newest, fed + 1) - (num_query - 1)
    for first in range(0, num_places, BLOCK):
        at = first + lane
        is_place = at < num_places
        place = start + at
        own = tl.where(at < num_query, row * num_query + at, at * width + row)
        block = tl.load(table_ptr + row * table_stride + place // BLOCK_SIZE, mask=is_place, other=0)
        tl.store(mapping_ptr + own, block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE, mask=is_place)
        tl.store(positions_ptr + own, place, mask=is_place)
        ids = tl.load(token_ids_ptr + slot * token_stride + place, mask=at < num_query, other=0)
        tl.store(input_ids_ptr + own, ids, mask=at < num_query)
        number = at - (num_query - 1)  # of the pass, where `at` is its last place
        is_last = is_place & (number >= 0)
        tl.store(seq_lens_ptr + number * width + row, (place + 1).to(tl.int32), mask=is_last)
        tl.store(drawn_ptr + number * width + row, newest + 1 + number, mask=is_last)
    # Each row's last token is the one before the next row's, of the first pass and of each other.
    cu_others_ptr = cu_seqlens_ptr + width + ALIGNED
    tl.store(logits_index_ptr + row, (row + 1) * num_query - 1)
    tl.store(logits_index_ptr + width + row, row)
    tl.store(cu_seqlens_ptr + row + 1, (row + 1) * num_query)
    tl.store(cu_others_ptr + row + 1, row + 1)
    if row == 0:
        tl.store(cu_seqlens_ptr, 0)
        tl.store(cu_others_ptr, 0)
