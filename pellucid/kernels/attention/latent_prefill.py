# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Latent attention of rows with many queries: over keys and values that have been made of all their latents.

A product makes of each latent what every head's key and value are, but for the part that turns, which heads
share (latent_expand.py); queries attend over that, tile by tile.  To a query and key that is 640 operations a
head for DeepSeek's sizes, and 2,176 over latents themselves.

Legend: T tokens, B rows, S keys of all rows, N heads, C rank of the latent, R features that turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.attention.decode_tiles import sight_of, visible_keys
from pellucid.kernels.attention.paged_attention import (
    LOG2_E,
    PagedRows,
    hidden_keys,
    shared_memory,
    tree_arguments,
)
from pellucid.kernels.attention.prefill_attention import STEP_POINTERS, stages_for
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait


def queries_per_tile(dtype: torch.dtype) -> int:
    """Queries that attend at once; float32 has no tensor cores, and would run out of registers."""
    return 32 if dtype == torch.float32 else 128


def latent_prefill(
    q: Tensor,
    expanded: Tensor,
    keys_turned: Tensor,
    rows: PagedRows,
    *,
    tiles: Tensor,
    cu_keys: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Attend with q [T, N, nope + R] over expanded keys and values into out [T, N, value], its result.

    expanded: [S, N, nope + value], contiguous; keys_turned: [S, R], for all heads.  tiles: [num_tiles, 2]
    int32, each tile's row and its first query there, of queries_per_tile(dtype).  cu_keys: [B] int64, where
    each row's keys begin.  rows.tree: who sees which drafts.  Other strides are free but for the last ones.
    Reads no device value on the host.
    """
    num_heads, head_dim = q.shape[1:]
    rotary_dim, value_dim = keys_turned.shape[1], out.shape[2]
    nope_dim = head_dim - rotary_dim
    assert expanded.shape[1:] == (num_heads, nope_dim + value_dim), (expanded.shape, q.shape, out.shape)
    assert expanded.is_contiguous() and q.stride(2) == keys_turned.stride(1) == out.stride(2) == 1
    if len(tiles) == 0:
        return out
    nope_padded, rotary_padded, value_padded = (
        max(16, triton.next_power_of_2(dim)) for dim in (nope_dim, rotary_dim, value_dim)
    )
    is_wide, queries = q.dtype == torch.float32, queries_per_tile(q.dtype)
    keys = 16 if is_wide else 64
    query_bytes = queries * (nope_padded + rotary_padded) * q.itemsize
    tile_bytes = keys * (nope_padded + rotary_padded + value_padded) * q.itemsize
    latent_prefill_kernel[(num_heads, len(tiles))](
        q,
        expanded,
        keys_turned,
        out,
        tiles,
        rows.seq_lens,
        rows.cu_seqlens_q,
        cu_keys,
        *tree_arguments(rows),
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        keys_turned.stride(0),
        out.stride(0),
        out.stride(1),
        NOPE=nope_dim,
        NOPE_PADDED=nope_padded,
        ROTARY=rotary_dim,
        ROTARY_PADDED=rotary_padded,
        VALUE=value_dim,
        VALUE_PADDED=value_padded,
        TILE=keys,
        M=queries,
        TREE=rows.tree is not None,
        num_warps=4 if is_wide else 8,
        num_stages=1 if is_wide else stages_for(tile_bytes, query_bytes, shared_memory(q.device)),
        **dependent(),
    )
    return out


def latent_prefill_ref(
    q: Tensor,
    expanded: Tensor,
    keys_turned: Tensor,
    rows: PagedRows,
    *,
    cu_keys: Tensor,
    value_dim: int,
    scale: float,
) -> Tensor:
    """The same, row by row in float32.  Returns [T, N, value]."""
    out = torch.zeros(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
    starts = rows.cu_seqlens_q.tolist()
    for row, seq_len in enumerate(rows.seq_lens.tolist()):
        own, first = slice(starts[row], starts[row + 1]), int(cu_keys[row])
        made = expanded[first : first + seq_len].float()
        turned = keys_turned[first : first + seq_len].float()
        nope, values = made.split((made.shape[2] - value_dim, value_dim), dim=-1)
        keys = torch.cat((nope, turned[:, None].expand(-1, q.shape[1], -1)), dim=-1)
        scores = torch.einsum("qnh,snh->nqs", q[own].float(), keys) * scale
        weights = scores.masked_fill(hidden_keys(rows, row, own, seq_len), -torch.inf).softmax(-1)
        out[own] = torch.einsum("nqs,snh->qnh", weights, values).to(q.dtype)
    return out


@triton.jit
def attend_keys(
    q,  # [M, nope]
    turned,  # [M, R]
    accumulator,
    maximum,
    total,
    keys_ptr,  # of the row and head, first key
    turned_ptr,  # of the row
    begin,
    end,
    position,  # [M]
    ancestors,  # [M]
    first_draft,  # of this row
    scale,
    key_stride,
    turned_stride,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TREE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys begin .. end into the running softmax.  Returns (accumulator, maximum, total)."""
    nope, rotary, value = tl.arange(0, NOPE_PADDED), tl.arange(0, ROTARY_PADDED), tl.arange(0, VALUE_PADDED)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        at = keys_ptr + key.to(tl.int64)[:, None] * key_stride
        turned_at = turned_ptr + key.to(tl.int64)[:, None] * turned_stride
        present = (key < end)[:, None]
        if MASKED or NOPE_PADDED != NOPE or ROTARY_PADDED != ROTARY or VALUE_PADDED != VALUE:
            k = tl.load(at + nope[None, :], mask=present & (nope < NOPE)[None, :], other=0.0)
            k_turned = tl.load(
                turned_at + rotary[None, :], mask=present & (rotary < ROTARY)[None, :], other=0.0
            )
            v = tl.load(at + NOPE + value[None, :], mask=present & (value < VALUE)[None, :], other=0.0)
        else:
            k = tl.load(at + nope[None, :])
            k_turned = tl.load(turned_at + rotary[None, :])
            v = tl.load(at + NOPE + value[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(k_turned), scores, input_precision="ieee")
        if MASKED:
            seen = visible_keys(key[None, :], position[:, None], ancestors[:, None], first_draft, 0, TREE)
            scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit(do_not_specialize_on_alignment=STEP_POINTERS)
def latent_prefill_kernel(
    q_ptr,
    expanded_ptr,
    keys_turned_ptr,
    out_ptr,
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    cu_keys_ptr,
    positions_ptr,
    ancestors_ptr,
    first_drafts_ptr,
    scale,  # to base 2
    q_token_stride,
    q_head_stride,
    turned_stride,
    out_token_stride,
    out_head_stride,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
    TREE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a head and tile of queries."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)
    head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    first_query = tl.load(tiles_ptr + tile * 2 + 1)
    first_token = tl.load(cu_seqlens_q_ptr + row).to(tl.int64)
    num_query = (tl.load(cu_seqlens_q_ptr + row + 1) - first_token).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + row)
    prefix = seq_len - num_query
    first_key = tl.load(cu_keys_ptr + row)

    query = first_query + tl.arange(0, M)
    asked = (query < num_query)[:, None]
    nope, rotary, value = tl.arange(0, NOPE_PADDED), tl.arange(0, ROTARY_PADDED), tl.arange(0, VALUE_PADDED)
    q_at = q_ptr + ((first_token + query) * q_token_stride + head * q_head_stride)[:, None]
    q = tl.load(q_at + nope[None, :], mask=asked & (nope < NOPE)[None, :], other=0.0)
    turned = tl.load(q_at + NOPE + rotary[None, :], mask=asked & (rotary < ROTARY)[None, :], other=0.0)
    expanded_token_stride = tl.num_programs(0) * (NOPE + VALUE)  # of all heads that have room at once
    keys_ptr = expanded_ptr + first_key * expanded_token_stride + head * (NOPE + VALUE)
    turned_ptr = keys_turned_ptr + first_key * turned_stride
    position, ancestors, first_draft = sight_of(
        row, first_token + query, query < num_query, prefix + query, seq_len,
        positions_ptr, ancestors_ptr, first_drafts_ptr, TREE,
    )  # fmt: skip

    # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    accumulator = tl.zeros([M, VALUE_PADDED], dtype=tl.float32)
    end = prefix + tl.minimum(first_query + M, num_query)
    if TREE:  # a draft may see later ones, as bits say
        end = seq_len
    # Keys before it every query sees; drafts, behind their row's token, are never before it.
    whole_end = tl.minimum(prefix + first_query + 1, first_draft) // TILE * TILE
    accumulator, maximum, total = attend_keys(
        q, turned, accumulator, maximum, total, keys_ptr, turned_ptr, 0, whole_end, position,
        ancestors, first_draft, scale,
        expanded_token_stride, turned_stride,
        NOPE, NOPE_PADDED, ROTARY, ROTARY_PADDED, VALUE, VALUE_PADDED, TILE, TREE, False,
    )  # fmt: skip
    accumulator, maximum, total = attend_keys(
        q, turned, accumulator, maximum, total, keys_ptr, turned_ptr, whole_end, end, position,
        ancestors, first_draft, scale,
        expanded_token_stride, turned_stride,
        NOPE, NOPE_PADDED, ROTARY, ROTARY_PADDED, VALUE, VALUE_PADDED, TILE, TREE, True,
    )  # fmt: skip
    result = accumulator / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + ((first_token + query) * out_token_stride + head * out_head_stride)[:, None]
    tl.store(
        out_at + value[None, :], result.to(out_ptr.dtype.element_ty), mask=asked & (value < VALUE)[None, :]
    )
