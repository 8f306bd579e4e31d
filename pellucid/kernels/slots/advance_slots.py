# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""What a step has yielded, back into the slots: new tokens, how far each row is, and drafts behind them.

Two launches for a dozen of torch's; moves a few bytes a row.
Legend: B rows, K tokens a row can yield, k drafts, L columns of the token table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.rows import SlotRows


def append_ref(token_ids: Tensor, slots: Tensor, roots: Tensor, tokens: Tensor, num_new: Tensor) -> None:
    """Write the first `num_new` [B] of tokens [B, K] behind place `roots` [B] of slots [B].

    token_ids: [slots + 1, L] int32; the last slot takes what belongs to nobody, at place 0.
    """
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    kept = offsets < num_new[:, None]
    places = torch.where(kept, roots[:, None] + 1 + offsets, 0)
    token_ids[torch.where(kept, slots[:, None], len(token_ids) - 1), places] = tokens.int()


def advance_slots_ref(
    token_ids: Tensor, num_computed: Tensor, rows: SlotRows, tokens: Tensor, num_new: Tensor
) -> Tensor:
    """Append the new tokens, and move on by what was accepted, or computed where nothing is sampled.

    token_ids: [slots, L] int32.  num_computed: [slots] int64.  tokens: [B, K] int32.  num_new: [B] int32.
    Returns the place of each row's newest token, the next one to compute; [B] int64.
    """
    append_ref(token_ids, rows.slots, rows.roots, tokens, num_new)
    newest = torch.where(rows.samples, rows.roots + num_new, rows.starts + rows.num_query)
    num_computed[rows.slots] = newest
    return newest


def write_drafts_ref(
    token_ids: Tensor, slots: Tensor, newest: Tensor, samples: Tensor, drafts: Tensor
) -> None:
    """Write drafts [B, k] behind place `newest` [B], in slots [B] of rows that sample [B]."""
    num_drafts = torch.where(samples, drafts.shape[1], 0)
    append_ref(token_ids, slots, newest, drafts, num_drafts)


def advance_slots(
    token_ids: Tensor, num_computed: Tensor, rows: SlotRows, tokens: Tensor, num_new: Tensor
) -> Tensor:
    """As `advance_slots_ref`, in one launch."""
    assert tokens.dtype == num_new.dtype == token_ids.dtype and tokens.stride(1) == 1, tokens.stride()
    assert num_new.stride(0) == 1, num_new.stride()
    num_rows, max_new = tokens.shape
    newest = torch.empty_like(rows.starts)
    advance_kernel[(num_rows,)](
        token_ids,
        num_computed,
        rows.slots,
        rows.starts,
        rows.num_query,
        rows.roots,
        rows.samples,
        tokens,
        num_new,
        newest,
        token_ids.stride(0),
        tokens.stride(0),
        K=max_new,
        K_PADDED=triton.next_power_of_2(max_new),
        num_warps=1,
        **dependent(),
    )
    return newest


def write_drafts(token_ids: Tensor, slots: Tensor, newest: Tensor, samples: Tensor, drafts: Tensor) -> None:
    """As `write_drafts_ref`, in one launch."""
    num_rows, num_drafts = drafts.shape
    drafts_kernel[(num_rows,)](
        token_ids,
        slots,
        newest,
        samples,
        drafts,
        token_ids.stride(0),
        drafts.stride(0),
        drafts.stride(1),
        K=num_drafts,
        K_PADDED=triton.next_power_of_2(num_drafts),
        num_warps=1,
        **dependent(),
    )


@triton.jit(
    do_not_specialize=["tokens_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "num_query_ptr", "num_new_ptr"],
)
def advance_kernel(
    token_ids_ptr,
    num_computed_ptr,
    slots_ptr,
    starts_ptr,
    num_query_ptr,
    roots_ptr,
    samples_ptr,
    tokens_ptr,
    num_new_ptr,
    newest_ptr,
    table_stride,
    tokens_stride,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    offset = tl.arange(0, K_PADDED)
    wait(DEPENDENT)
    slot, root = tl.load(slots_ptr + row), tl.load(roots_ptr + row)
    num_new = tl.load(num_new_ptr + row)
    ends = tl.load(starts_ptr + row) + tl.load(num_query_ptr + row)
    newest = tl.where(tl.load(samples_ptr + row) != 0, root + num_new, ends)
    is_new = (offset < num_new) & (offset < K)
    tokens = tl.load(tokens_ptr + row * tokens_stride + offset, mask=is_new)
    tl.store(token_ids_ptr + slot * table_stride + root + 1 + offset, tokens, mask=is_new)
    tl.store(num_computed_ptr + slot, newest)
    tl.store(newest_ptr + row, newest)


@triton.jit(
    do_not_specialize=["row_stride", "column_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "drafts_ptr"],
)
def drafts_kernel(
    token_ids_ptr,
    slots_ptr,
    newest_ptr,
    samples_ptr,
    drafts_ptr,
    table_stride,
    row_stride,
    column_stride,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    offset = tl.arange(0, K_PADDED)
    wait(DEPENDENT)
    slot, newest = tl.load(slots_ptr + row), tl.load(newest_ptr + row)
    is_draft = offset < tl.where(tl.load(samples_ptr + row) != 0, K, 0)
    drafts = tl.load(drafts_ptr + row * row_stride + offset * column_stride, mask=is_draft)
    at = token_ids_ptr + slot * table_stride + newest + 1 + offset
    tl.store(at, drafts.to(tl.int32), mask=is_draft)
