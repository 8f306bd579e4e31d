# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""From slots to a step's inputs: token ids, positions, lengths, block tables, and what sampling must know.

One launch, and another for each further table, instead of dozens; moves a few bytes a token and the rows'
block tables, so what counts is the launches that are saved.

Legend: T tokens, B rows, S logits to sample, M blocks a row, L columns of the token table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.rows import SlotRows, SlotViews, StepRows

BLOCK = 256  # tokens, and columns of a block table, a program copies at a time


def gather_rows_ref(step: StepRows, held: SlotViews) -> SlotRows:
    """A step's inputs, as far as one gets by copying and counting."""
    slots, cu_query, cu_logits = step.slots, step.cu_query, step.cu_logits
    num_query, num_sampled = cu_query.diff(), cu_logits.diff()
    starts, spare = held.num_computed[slots], len(held.token_ids) - 1
    token, row = owners(cu_query, step.num_tokens)
    is_token = token < cu_query[-1]
    places = (token + (starts - cu_query[:-1])[row]).where(is_token, 0)
    input_ids = held.token_ids[slots[row], places].where(is_token, 0)
    roots = starts + num_query - 1 - step.num_drafts
    logit, row_of_logit = owners(cu_logits, step.num_logits)
    is_logit = logit < cu_logits[-1]
    at = (logit + (cu_query - cu_logits)[1:][row_of_logit]).where(is_logit, 0)
    tables, size = tuple(table[slots] for table in held.block_tables), held.block_size
    return SlotRows(
        slots=slots,
        num_query=step.num_query,
        input_ids=input_ids,
        places=places,
        starts=starts,
        roots=roots,
        room=(held.limits[slots] - roots - 1).clamp_(min=0),
        samples=num_sampled > 0,
        seq_lens=(starts + num_query).clamp(min=1).to(torch.int32),
        cu_seqlens_q=cu_query.to(torch.int32),
        logit_slots=slots[row_of_logit].where(is_logit, spare),
        logit_places=places[at].where(is_logit, 0) + 1,
        logit_inputs=input_ids[at].where(is_logit, 0),
        block_tables=tables,
        slot_mappings=tuple(
            (table[row, places // size].long() * size + places % size).where(is_token, 0) for table in tables
        ),
    )


def owners(ends: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """[num] integers each: 0, 1, .. and of which row each is, which has ends[b] up to ends[b + 1].

    What is behind all rows counts as the last one's.
    """
    items = torch.arange(num, dtype=ends.dtype, device=ends.device)
    rows = torch.searchsorted(ends[1:].contiguous(), items, right=True)
    return items, rows.clamp_(max=len(ends) - 2)


def gather_rows(step: StepRows, held: SlotViews) -> SlotRows:
    """As `gather_rows_ref`, in one launch for each block table."""
    slots, token_ids = step.slots, held.token_ids
    num_rows, num_tokens, num_logits = len(slots), step.num_tokens, step.num_logits
    out = SlotRows(
        slots=slots,
        num_query=step.num_query,
        input_ids=token_ids.new_empty(num_tokens),
        places=slots.new_empty(num_tokens),
        starts=slots.new_empty(num_rows),
        roots=slots.new_empty(num_rows),
        room=slots.new_empty(num_rows),
        samples=slots.new_empty(num_rows, dtype=torch.bool),
        seq_lens=slots.new_empty(num_rows, dtype=torch.int32),
        cu_seqlens_q=slots.new_empty(num_rows + 1, dtype=torch.int32),
        logit_slots=slots.new_empty(num_logits),
        logit_places=slots.new_empty(num_logits),
        logit_inputs=token_ids.new_empty(num_logits),
        block_tables=tuple(table.new_empty((num_rows, table.shape[1])) for table in held.block_tables),
        slot_mappings=tuple(slots.new_empty(num_tokens) for _ in held.block_tables),
    )
    tables = list(zip(held.block_tables, out.block_tables, out.slot_mappings, strict=True))
    for index, (table, rows, mapping) in enumerate(tables or [(None, None, None)]):
        width = 0 if table is None else table.shape[1]
        rows_kernel[(num_rows + 1, triton.cdiv(max(step.counts.max_query, width), BLOCK))](
            slots,
            step.cu_query,
            step.cu_logits,
            step.num_drafts,
            token_ids,
            held.num_computed,
            held.limits,
            out.input_ids,
            out.places,
            out.starts,
            out.roots,
            out.room,
            out.samples,
            out.seq_lens,
            out.cu_seqlens_q,
            out.logit_slots,
            out.logit_places,
            out.logit_inputs,
            table,
            rows,
            mapping,
            token_ids.stride(0),
            width,
            num_tokens,
            num_logits,
            len(token_ids) - 1,
            BLOCK_SIZE=held.block_size,
            BLOCK=BLOCK,
            IS_FIRST=index == 0,
            **dependent(),
        )
    return out


# What is cut out of the step's one upload lies at any multiple of 8 bytes.
@triton.jit(
    do_not_specialize=["num_tokens", "num_logits"],
    do_not_specialize_on_alignment=["slots_ptr", "cu_query_ptr", "cu_logits_ptr", "num_drafts_ptr"],
)
def rows_kernel(
    slots_ptr,
    cu_query_ptr,
    cu_logits_ptr,
    num_drafts_ptr,
    token_ids_ptr,
    num_computed_ptr,
    limits_ptr,
    input_ids_ptr,
    places_ptr,
    starts_ptr,
    roots_ptr,
    room_ptr,
    samples_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    logit_slots_ptr,
    logit_places_ptr,
    logit_inputs_ptr,
    table_ptr,
    rows_ptr,
    mapping_ptr,
    token_stride,
    width,  # M
    num_tokens,  # T
    num_logits,  # S
    spare,  # the last slot
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FIRST: tl.constexpr,  # of the tables: the launch that has all that is not the tables'
    DEPENDENT: tl.constexpr,
):
    """One program a row and BLOCK of its tokens and of its table's columns; the last ones are for padding."""
    let_next_start(DEPENDENT)
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0) - 1
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    if row == num_rows:
        zeros = tl.zeros_like(at)
        stride = tl.num_programs(1) * BLOCK
        first = tl.load(cu_query_ptr + num_rows)
        for start in range(first, num_tokens, stride):
            is_token = start + at < num_tokens
            if table_ptr is not None:
                tl.store(mapping_ptr + start + at, zeros, mask=is_token)
            if IS_FIRST:
                tl.store(input_ids_ptr + start + at, zeros, mask=is_token)
                tl.store(places_ptr + start + at, zeros, mask=is_token)
        if IS_FIRST:
            first = tl.load(cu_logits_ptr + num_rows)
            for start in range(first, num_logits, stride):
                is_logit = start + at < num_logits
                tl.store(logit_slots_ptr + start + at, zeros + spare, mask=is_logit)
                tl.store(logit_places_ptr + start + at, zeros + 1, mask=is_logit)
                tl.store(logit_inputs_ptr + start + at, zeros, mask=is_logit)
        return
    slot = tl.load(slots_ptr + row)
    first, end = tl.load(cu_query_ptr + row), tl.load(cu_query_ptr + row + 1)
    start = tl.load(num_computed_ptr + slot)
    is_token = at < end - first
    place = start + at
    if table_ptr is not None:
        table_ptr += slot * width
        blocks = tl.load(table_ptr + at, mask=at < width)
        tl.store(rows_ptr + row * width + at, blocks, mask=at < width)
        block = tl.load(table_ptr + place // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        tl.store(mapping_ptr + first + at, block * BLOCK_SIZE + place % BLOCK_SIZE, mask=is_token)
    if IS_FIRST:
        ids = tl.load(token_ids_ptr + slot * token_stride + place, mask=is_token)
        tl.store(input_ids_ptr + first + at, ids, mask=is_token)
        tl.store(places_ptr + first + at, place, mask=is_token)
        logits, logits_end = tl.load(cu_logits_ptr + row), tl.load(cu_logits_ptr + row + 1)
        logit = logits_end - (end - first) + at  # the last logit is that of the last token
        is_logit = is_token & (logit >= logits)
        tl.store(logit_slots_ptr + logit, slot + tl.zeros_like(logit), mask=is_logit)
        tl.store(logit_places_ptr + logit, place + 1, mask=is_logit)
        tl.store(logit_inputs_ptr + logit, ids, mask=is_logit)
        if tl.program_id(1) == 0:
            root = start + end - first - 1 - tl.load(num_drafts_ptr + row)
            tl.store(starts_ptr + row, start)
            tl.store(roots_ptr + row, root)
            tl.store(room_ptr + row, tl.maximum(tl.load(limits_ptr + slot) - root - 1, 0))
            tl.store(samples_ptr + row, logits_end > logits)
            tl.store(seq_lens_ptr + row, tl.maximum(start + end - first, 1).to(tl.int32))
            tl.store(cu_seqlens_ptr + row + 1, end.to(tl.int32))
            if row == 0:
                tl.store(cu_seqlens_ptr, 0)
