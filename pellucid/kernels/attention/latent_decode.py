# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""Attention of rows with few queries over latents in the paged cache: each tile is key and value at once.

Queries have been brought to the width of a latent, so all heads see the same keys.  A program takes as many
heads as one tile of products has room for: up to 16 of them at one query cost no more than one, and beyond
64 packed queries a cached row is read again.  A latent's two halves are two chains of products, since one of
all its features would take longer than a tile takes to come.

Rows are cut into chunks as `decode_attention` cuts them; what the chunks of a row found, a second launch
merges, a program a query and head: one program would have to read 32 KB of each chunk.

Legend: T tokens, B rows, S chunks of a row, M packed rows of a tile, N heads, G heads a program, C rank of
the latent, R features that turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.attention.decode_attention import Cut, Tile, chunks_of, up_to
from pellucid.kernels.attention.decode_tiles import lines_of, pages_of, sight_of, visible_keys
from pellucid.kernels.attention.paged_attention import (
    LOG2_E,
    MAX_SHORT_QUERY,
    PagedRows,
    hidden_keys,
    shared_memory,
    tree_arguments,
)
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait

MAX_PACKED = 64  # packed queries of a program: their sums fill its registers
MAX_REGISTERS = 128  # of a thread, with 16 queries: a multiprocessor then has two programs
MERGED = 8  # chunks that are merged at once

# Most pairs of a row and a group of heads: keys up to which a row stays whole, fewest keys of a chunk, most
# chunks.  Few pairs are cut to fill the GPU, many for balance.
CUTS = {8: (64, 64, 64), 16: (64, 64, 32), 32: (128, 128, 16), 64: (256, 128, 8)}
CUT_OF_MANY = (2048, 2048, 8)


def heads_per_program(num_heads: int, max_query: int) -> int:
    """The most heads that divide all and whose packed queries a program has room for."""
    most = max(1, MAX_PACKED // max_query)
    return max(each for each in range(1, min(most, num_heads) + 1) if num_heads % each == 0)


def tile_for(row_bytes: int, query_bytes: int, padded: int, block_size: int, room: int) -> Tile:
    """Keys, warps and stages of a tile.

    row_bytes: of a key, as it is padded; query_bytes: of the `padded` queries of a program.  room: bytes of
    shared memory.
    """
    keys, stages = (64, 2) if padded == 16 else (32, 2)
    if row_bytes > 2048:  # float32, which multiplies without tensor cores
        keys, stages = 16, 1
    if (divisor := block_size & -block_size) != block_size:  # a tile is part of a page, or some pages
        keys = min(keys, divisor)
    while keys > 16 and keys * row_bytes + query_bytes > room:
        keys //= 2
    return Tile(keys, 8, max(1, min(stages, 1 + (room - query_bytes) // (keys * row_bytes))))


def cut(num_pairs: int, max_keys: int, tile: int) -> Cut:
    """How to cut so many pairs of a row and a group of heads.  max_keys: that a row may see; tile: keys."""
    whole, chunk, most = up_to(num_pairs, CUTS, CUT_OF_MANY)
    min_chunk = max(chunk, tile)
    num_chunks = 1 if max_keys <= whole else min(most, triton.cdiv(max_keys, min_chunk))
    return Cut(whole, min_chunk, num_chunks, num_chunks)


def latent_decode(
    q: Tensor,
    q_turned: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    row_scale: float = 1.0,
    out: Tensor,
) -> Tensor:
    """Attend with q [T, N, C] and q_turned [T, N, R] over kv_cache [num_blocks, block_size, C + R].

    out: [T, N, C], its result: means of latents.  Rows have at most rows.max_query <= 8 queries, causal among
    themselves, or a tree of drafts (rows.tree).  The cache holds rows / row_scale, in FP8 or in q's
    dtype.  Strides of q, q_turned and out are free but for the last one.  Reads no device value on the host.
    """
    num_heads, rank, rotary_dim = q.shape[1], q.shape[2], q_turned.shape[2]
    block_size = kv_cache.shape[1]
    assert q.stride(2) == q_turned.stride(2) == out.stride(2) == 1, (q.stride(), out.stride())
    assert q_turned.shape[:2] == q.shape[:2] and out.shape == q.shape, (q.shape, q_turned.shape, out.shape)
    assert out.stride(1) == rank, out.stride()
    assert kv_cache.shape[2] == rank + rotary_dim and kv_cache.is_contiguous(), (kv_cache.shape, rank)
    assert block_size % 16 == 0, f"pages of {block_size} tokens, must be a multiple of 16"
    assert 1 <= rows.max_query <= MAX_SHORT_QUERY, rows.max_query
    if rows.num_rows == 0:
        return out
    heads = heads_per_program(num_heads, rows.max_query)
    packed, groups = rows.max_query * heads, num_heads // heads
    padded, num_pairs = max(16, triton.next_power_of_2(packed)), rows.num_rows * groups
    rank_padded = max(32, triton.next_power_of_2(rank))  # each half is wide enough for tl.dot
    rotary_padded = max(16, triton.next_power_of_2(rotary_dim))
    row_bytes = (rank_padded + rotary_padded) * q.itemsize
    tile = tile_for(row_bytes, padded * row_bytes, padded, block_size, shared_memory(q.device))
    pieces = cut(num_pairs, rows.block_table.shape[1] * block_size, tile.keys)
    num_lines = num_pairs * pieces.num_chunks * packed if pieces.num_chunks > 1 else 0
    partial = torch.empty(num_lines * (rank + 2), dtype=torch.float32, device=q.device)
    statistics = partial[num_lines * rank :]
    numbers = (rows.block_table.shape[1], pieces.whole, pieces.min_chunk.bit_length() - 1, pieces.num_chunks)
    latent_decode_kernel[(num_pairs, pieces.num_chunks)](
        q,
        q_turned,
        kv_cache,
        out,
        partial,
        statistics,
        rows.block_table,
        rows.seq_lens,
        rows.cu_seqlens_q,
        *tree_arguments(rows),
        scale * row_scale * LOG2_E,
        row_scale,
        *numbers,
        q.stride(0),
        q.stride(1),
        q_turned.stride(0),
        q_turned.stride(1),
        out.stride(0),
        rows.block_table.stride(0),
        GROUPS=groups,
        HEADS=heads,
        RANK=rank,
        HALF_PADDED=rank_padded // 2,
        ROTARY=rotary_dim,
        ROTARY_PADDED=rotary_padded,
        PACKED=packed,
        TILE=tile.keys,
        BLOCK_SIZE=block_size,
        M=padded,
        TREE=rows.tree is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=MAX_REGISTERS if padded == 16 else None,
        **dependent(),
    )
    if pieces.num_chunks > 1:
        latent_merge_kernel[(num_pairs, packed)](
            out,
            partial,
            statistics,
            rows.seq_lens,
            rows.cu_seqlens_q,
            row_scale,
            *numbers[1:],
            out.stride(0),
            GROUPS=groups,
            HEADS=heads,
            RANK=rank,
            RANK_PADDED=rank_padded,
            PACKED=packed,
            TILE=tile.keys,
            MERGED=MERGED,
            num_warps=4,
            **dependent(),
        )
    return out


def latent_decode_ref(
    q: Tensor,
    q_turned: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    row_scale: float = 1.0,
) -> Tensor:
    """The same, row by row in float32.  Returns [T, N, C]."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, rank = rows.cu_seqlens_q.tolist(), q.shape[2]
    for row, seq_len in enumerate(rows.seq_lens.tolist()):
        own = slice(starts[row], starts[row + 1])
        if seq_len == 0:
            continue
        blocks = rows.block_table[row, : -(-seq_len // kv_cache.shape[1])].long()
        keys = kv_cache[blocks].flatten(0, 1)[:seq_len].float() * row_scale
        queries = torch.cat((q[own], q_turned[own]), dim=-1).float()
        scores = torch.einsum("qnc,sc->nqs", queries, keys) * scale
        weights = scores.masked_fill(hidden_keys(rows, row, own, seq_len), -torch.inf).softmax(-1)
        out[own] = torch.einsum("nqs,sc->qnc", weights, keys[:, :rank]).to(q.dtype)
    return out


@triton.jit
def attend_latents(
    q_at,  # [M], pointers
    turned_at,  # [M], pointers
    asked,  # [M], whether there is such a query
    pages,  # of the first tile
    pages_ptr,  # this row's block table
    num_pages,  # it has room for
    cache_ptr,
    first_tile,
    step,  # tiles from one to the next
    seq_len,
    position,  # [M], of each packed row's query
    ancestors,  # [M], its bits
    first_draft,  # of this row
    scale,
    RANK: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    TREE: tl.constexpr,
):
    """Attend over every step-th tile.  Returns (sums of both halves [M, C / 2], maximum [M], total [M])."""
    LINE: tl.constexpr = RANK + ROTARY
    place = tl.arange(0, TILE)
    dim, rotary = tl.arange(0, HALF_PADDED)[None, :], tl.arange(0, ROTARY_PADDED)[None, :]
    in_first, in_second, in_rotary = dim < RANK, HALF_PADDED + dim < RANK, rotary < ROTARY
    q_at, turned_at, is_asked = q_at[:, None], turned_at[:, None], asked[:, None]
    q_first = tl.load(q_at + dim, mask=is_asked & in_first, other=0.0)
    q_second = tl.load(q_at + HALF_PADDED + dim, mask=is_asked & in_second, other=0.0)
    turned = tl.load(turned_at + rotary, mask=is_asked & in_rotary, other=0.0)
    # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([M, TILE], dtype=tl.float32)
    first = tl.zeros([M, HALF_PADDED], dtype=tl.float32)
    second = tl.zeros([M, HALF_PADDED], dtype=tl.float32)
    for start in range(first_tile * TILE, seq_len, step * TILE):
        key = start + place
        # Places behind the end may hold anything, NaN too, which a weight of zero would not silence.
        present = (key < seq_len)[:, None]
        line = lines_of(place, start, pages, BLOCK_SIZE * LINE, LINE, BLOCK_SIZE, 0)
        pages = pages_of(pages_ptr, start + step * TILE, num_pages, BLOCK_SIZE, len(pages))
        at = cache_ptr + line[:, None]
        c_first = tl.load(at + dim, mask=present & in_first, other=0.0).to(q_first.dtype)
        c_second = tl.load(at + HALF_PADDED + dim, mask=present & in_second, other=0.0).to(q_first.dtype)
        keys = tl.load(at + RANK + rotary, mask=present & in_rotary, other=0.0).to(q_first.dtype)
        scores = tl.dot(q_first, tl.trans(c_first), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee")
        scores += tl.dot(q_second, tl.trans(c_second), input_precision="ieee")
        visible = visible_keys(key[None, :], position[:, None], ancestors[:, None], first_draft, 0, TREE)
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink[:, None] + weights
        weights = weights.to(c_first.dtype)
        first = tl.dot(weights, c_first, first * shrink[:, None], input_precision="ieee")
        second = tl.dot(weights, c_second, second * shrink[:, None], input_precision="ieee")
        maximum = new_maximum
    return first, second, maximum, tl.sum(total, 1)


# Numbers that change with the rows are not specialized on: one variant serves all.
COUNTS = ["num_pages", "whole", "chunk_bits", "num_chunks"]


@triton.jit(do_not_specialize=COUNTS)
def latent_decode_kernel(
    q_ptr,
    turned_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,  # [B, N / G, S, PACKED, C]
    statistics_ptr,  # [B, N / G, S, PACKED, 2]: maximum, total
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    positions_ptr,
    ancestors_ptr,
    first_drafts_ptr,
    scale,  # to base 2
    row_scale,
    num_pages,  # that a row of the block table has room for
    whole,  # keys up to which a row stays whole
    chunk_bits,  # fewest keys of a chunk, as a power of two
    num_chunks,  # most chunks of a row
    q_token_stride,
    q_head_stride,
    turned_token_stride,
    turned_head_stride,
    out_token_stride,
    block_table_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    TREE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row, group of heads and chunk."""
    let_next_start(DEPENDENT)
    row, group, chunk = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS, tl.program_id(1)
    packed = tl.arange(0, M)
    query, head = packed // HEADS, group * HEADS + packed % HEADS
    pages_ptr = block_table_ptr + row.to(tl.int64) * block_table_stride
    PAGES: tl.constexpr = max(1, TILE // BLOCK_SIZE)  # of a tile
    wait(DEPENDENT)
    seq_len = tl.load(seq_lens_ptr + row)
    first_token = tl.load(cu_seqlens_q_ptr + row)
    num_query = tl.load(cu_seqlens_q_ptr + row + 1) - first_token
    pages = pages_of(pages_ptr, chunk * TILE, num_pages, BLOCK_SIZE, PAGES)
    _, chunks = chunks_of(seq_len, num_query, whole, chunk_bits, num_chunks, 0)
    if (chunk < chunks) & (num_query > 0):
        token = first_token.to(tl.int64) + query
        asked = query < num_query
        position, ancestors, first_draft = sight_of(
            row, token, asked, seq_len - num_query + query, seq_len,
            positions_ptr, ancestors_ptr, first_drafts_ptr, TREE,
        )  # fmt: skip
        first, second, maximum, weight = attend_latents(
            q_ptr + token * q_token_stride + head * q_head_stride,
            turned_ptr + token * turned_token_stride + head * turned_head_stride,
            asked, pages, pages_ptr, num_pages, cache_ptr, chunk, chunks,
            seq_len, position, ancestors, first_draft, scale,
            RANK, HALF_PADDED, ROTARY, ROTARY_PADDED, TILE, BLOCK_SIZE, M, TREE,
        )  # fmt: skip
        dim = tl.arange(0, HALF_PADDED)[None, :]
        in_first, in_second = asked[:, None] & (dim < RANK), asked[:, None] & (HALF_PADDED + dim < RANK)
        if chunks == 1:
            inverse = (row_scale / tl.where(weight > 0, weight, 1.0))[:, None]
            at = out_ptr + (token * out_token_stride + head * RANK)[:, None] + dim
            tl.store(at, (first * inverse).to(out_ptr.dtype.element_ty), mask=in_first)
            tl.store(at + HALF_PADDED, (second * inverse).to(out_ptr.dtype.element_ty), mask=in_second)
        else:
            line = (tl.program_id(0).to(tl.int64) * num_chunks + chunk) * PACKED + packed
            part_at = partial_ptr + line[:, None] * RANK + dim
            tl.store(part_at, first, mask=in_first)
            tl.store(part_at + HALF_PADDED, second, mask=in_second)
            tl.store(statistics_ptr + line * 2, maximum, mask=asked)
            tl.store(statistics_ptr + line * 2 + 1, weight, mask=asked)


@triton.jit(do_not_specialize=COUNTS[1:])
def latent_merge_kernel(
    out_ptr,
    partial_ptr,
    statistics_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    row_scale,
    whole,
    chunk_bits,
    num_chunks,
    out_token_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The weighted mean of a row's chunks, a program a query and head, MERGED chunks at once."""
    let_next_start(DEPENDENT)
    row, group, packed = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS, tl.program_id(1)
    query, head = packed // HEADS, group * HEADS + packed % HEADS
    dim = tl.arange(0, RANK_PADDED)
    wait(DEPENDENT)
    seq_len = tl.load(seq_lens_ptr + row)
    first_token = tl.load(cu_seqlens_q_ptr + row)
    num_query = tl.load(cu_seqlens_q_ptr + row + 1) - first_token
    _, chunks = chunks_of(seq_len, num_query, whole, chunk_bits, num_chunks, 0)
    if (chunks > 1) & (query < num_query):
        maximum = tl.full([1], -1.0e30, dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        accumulator = tl.zeros([RANK_PADDED], dtype=tl.float32)
        for start in tl.range(0, chunks, MERGED, num_stages=1):
            chunk = start + tl.arange(0, MERGED)
            present = chunk < chunks
            line = (tl.program_id(0).to(tl.int64) * num_chunks + chunk) * PACKED + packed
            maxima = tl.load(statistics_ptr + line * 2, mask=present, other=-1.0e30)
            totals = tl.load(statistics_ptr + line * 2 + 1, mask=present, other=0.0)
            inside = present[:, None] & (dim < RANK)[None, :]
            parts = tl.load(partial_ptr + line[:, None] * RANK + dim[None, :], mask=inside, other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
            weight, shrink = tl.exp2(maxima - new_maximum), tl.exp2(maximum - new_maximum)
            total = total * shrink + tl.sum(totals * weight, 0)
            accumulator = accumulator * shrink + tl.sum(parts * weight[:, None], 0)
            maximum = new_maximum
        result = accumulator * (row_scale / tl.where(total > 0, total, 1.0))
        at = out_ptr + (first_token + query).to(tl.int64) * out_token_stride + head * RANK + dim
        tl.store(at, result.to(out_ptr.dtype.element_ty), mask=dim < RANK)
