# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""From slots to a step's inputs: token ids, positions, lengths, block tables and slot mappings of its rows.

Two launches, one for tokens and one for each KV group, instead of a dozen; moves a few bytes a token and the
rows' block tables, so what counts is the launches that are saved.

Legend: T tokens, B rows, M blocks a row, L columns of the token table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.kernels.language import tl, triton

BLOCK = 256  # tokens, and columns of a block table, a program copies at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTokens:
    """What the token table holds of the rows' queries."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    starts: Tensor  # [B] int64, tokens computed before the step
    seq_lens: Tensor  # [B] int32, with the step's


def gather_tokens_ref(
    slots: Tensor,
    cu_query: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    *,
    num_tokens: int,
    max_query: int,
) -> GatheredTokens:
    """Row b computes the cu_query[b + 1] - cu_query[b] tokens behind what is computed of slots[b].

    slots: [B] int64.  cu_query: [B + 1] int64.  token_ids: [slots, L] int32.  num_computed: [slots] int64.
    max_query: the most tokens of any row.
    """
    num_query = cu_query.diff()
    starts = num_computed[slots]
    row_of_token = torch.repeat_interleave(num_query, output_size=num_tokens)
    positions = torch.arange(num_tokens, device=slots.device) + (starts - cu_query[:-1])[row_of_token]
    return GatheredTokens(
        input_ids=token_ids[slots[row_of_token], positions],
        positions=positions,
        starts=starts,
        seq_lens=(starts + num_query).to(torch.int32),
    )


def gather_blocks_ref(
    slots: Tensor, cu_query: Tensor, positions: Tensor, table: Tensor, *, block_size: int, max_query: int
) -> tuple[Tensor, Tensor]:
    """The rows' block tables [B, M] int32, and where each token's KV goes: block * block_size + offset, [T].

    positions: [T] int64.  table: [slots, M] int32.
    """
    rows = table[slots]
    row_of_token = torch.repeat_interleave(cu_query.diff(), output_size=len(positions))
    blocks = rows[row_of_token, positions // block_size].long()
    return rows, blocks * block_size + positions % block_size


def gather_tokens(
    slots: Tensor,
    cu_query: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    *,
    num_tokens: int,
    max_query: int,
) -> GatheredTokens:
    """As `gather_tokens_ref`, in one launch."""
    out = GatheredTokens(
        input_ids=token_ids.new_empty(num_tokens),
        positions=slots.new_empty(num_tokens),
        starts=torch.empty_like(slots),
        seq_lens=torch.empty_like(slots, dtype=torch.int32),
    )
    tokens_kernel[(len(slots), triton.cdiv(max_query, BLOCK))](
        slots,
        cu_query,
        token_ids,
        num_computed,
        out.input_ids,
        out.positions,
        out.starts,
        out.seq_lens,
        token_ids.stride(0),
        BLOCK=BLOCK,
    )
    return out


def gather_blocks(
    slots: Tensor, cu_query: Tensor, positions: Tensor, table: Tensor, *, block_size: int, max_query: int
) -> tuple[Tensor, Tensor]:
    """As `gather_blocks_ref`, in one launch."""
    rows = table.new_empty((len(slots), table.shape[1]))
    mapping = torch.empty_like(positions)
    blocks_kernel[(len(slots), triton.cdiv(max(max_query, table.shape[1]), BLOCK))](
        slots,
        cu_query,
        positions,
        table,
        rows,
        mapping,
        table.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
    )
    return rows, mapping


@triton.jit
def tokens_kernel(
    slots_ptr,
    cu_query_ptr,
    token_ids_ptr,
    num_computed_ptr,
    input_ids_ptr,
    positions_ptr,
    starts_ptr,
    seq_lens_ptr,
    token_stride,
    BLOCK: tl.constexpr,
):
    """One program a row and BLOCK of its tokens."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    first = tl.load(cu_query_ptr + row)
    num_query = tl.load(cu_query_ptr + row + 1) - first
    start = tl.load(num_computed_ptr + slot)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_query
    ids = tl.load(token_ids_ptr + slot * token_stride + start + token, mask=inside)
    tl.store(input_ids_ptr + first + token, ids, mask=inside)
    tl.store(positions_ptr + first + token, start + token, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(starts_ptr + row, start)
        tl.store(seq_lens_ptr + row, (start + num_query).to(tl.int32))


@triton.jit
def blocks_kernel(
    slots_ptr,
    cu_query_ptr,
    positions_ptr,
    table_ptr,
    rows_ptr,
    mapping_ptr,
    width,  # M
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and BLOCK of its tokens and of its table's columns."""
    row = tl.program_id(0).to(tl.int64)
    table_ptr += tl.load(slots_ptr + row) * width
    first = tl.load(cu_query_ptr + row)
    num_query = tl.load(cu_query_ptr + row + 1) - first
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.load(table_ptr + at, mask=at < width)
    tl.store(rows_ptr + row * width + at, blocks, mask=at < width)
    inside = at < num_query
    position = tl.load(positions_ptr + first + at, mask=inside, other=0)
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    tl.store(mapping_ptr + first + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
