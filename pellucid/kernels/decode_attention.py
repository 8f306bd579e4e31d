# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Attention of rows with few queries, decodes and verifications, over the paged cache: split-KV.

The keys that a row sees are cut into chunks, one program each, and the last of a row's to finish merges them.
How they are cut follows from the row's length and from how many rows there are, never from the other rows'
lengths.  The grid depends on nothing that only the device knows: programs without work leave at once.

Moves each key and value once.  On an H200, pages of 64, bfloat16, head dim 128, 32 heads on 8: 256 rows of
100 to 2,000 keys at 4.1 TB/s, 64 of 1,024 at 3.2, one of 1,024 in 9.4 us (benchmarks/kernels.py).

Legend: T tokens, B rows, S chunks of a row, M packed rows of a tile, N query heads, K KV heads, G query heads
a KV head, H head dim.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.paged_attention import (
    LOG2_E,
    PagedRows,
    attend_range,
    check_operands,
    keys_per_tile,
    paged_attention_ref,
    stages_for,
    tree_arguments,
)

MAX_QUERY = 8  # queries a row
# Pairs of a row and a KV head -> fewest keys of a chunk: few pairs are cut fine to fill the GPU; many are cut
# to balance long rows alone, for each cut costs a merge.
MIN_CHUNKS = ((32, 64), (128, 128), (512, 256), (1024, 512))
LARGE_CHUNK = 2048
MAX_PROGRAMS = 8192  # of a launch, chunks without work included
MAX_CHUNKS = 32  # of a row

decode_attention_ref = paged_attention_ref


def cut(num_pairs: int, max_keys: int) -> tuple[int, int]:
    """(fewest keys of a chunk, most chunks of a row) for so many pairs of a row and a KV head."""
    min_chunk = next((chunk for pairs, chunk in MIN_CHUNKS if num_pairs <= pairs), LARGE_CHUNK)
    most = max(8, min(MAX_CHUNKS, MAX_PROGRAMS // num_pairs))
    return min_chunk, min(most, triton.cdiv(max_keys, min_chunk))


@cache
def arrivals(num_pairs: int, device: torch.device) -> Tensor:
    """Zeros in which the chunks of each pair are counted; zeros again when a launch is done.

    One for all launches, so two on different streams of a process must not overlap.
    """
    return torch.zeros(num_pairs, dtype=torch.int32, device=device)


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor,
) -> Tensor:
    """Attend with q [T, N, H] over kv_cache [num_blocks, 2, K, block_size, H] into out [T, N, H], its result.

    Rows have at most rows.max_query <= 8 queries, causal among themselves.  window: keys a query sees, itself
    included.  rows.tree: drafts that are a tree, not causal among themselves.  The cache holds keys / k_scale
    and values / v_scale.  Reads no device value on the host.
    """
    check_operands(q, kv_cache, rows)
    assert 1 <= rows.max_query <= MAX_QUERY, f"{rows.max_query} queries a row, at most {MAX_QUERY}"
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert out.shape == q.shape and out.stride()[1:] == (head_dim, 1), (out.shape, out.stride())
    if rows.num_rows == 0:
        return out
    group_size = q.shape[1] // num_kv_heads
    packed = rows.max_query * group_size
    max_keys = rows.block_table.shape[1] * block_size
    if window is not None:
        max_keys = min(max_keys, window + rows.max_query - 1)
    min_chunk, num_chunks = cut(rows.num_rows * num_kv_heads, max_keys)
    partial = torch.empty(
        (rows.num_rows, num_kv_heads, num_chunks, packed, head_dim) if num_chunks > 1 else (0,),
        dtype=torch.float32,
        device=q.device,
    )
    statistics = partial.new_empty((*partial.shape[:-1], 2))
    dim_padded = triton.next_power_of_2(head_dim)
    tile = keys_per_tile(block_size, q.dtype)
    padded = max(16, triton.next_power_of_2(packed))
    decode_kernel[(rows.num_rows, num_kv_heads, num_chunks)](
        q,
        kv_cache,
        out,
        partial,
        statistics,
        arrivals(triton.next_power_of_2(rows.num_rows * num_kv_heads), q.device),
        rows.block_table,
        rows.seq_lens,
        rows.cu_seqlens_q,
        *tree_arguments(rows),
        scale * k_scale * LOG2_E,
        v_scale,
        min_chunk,
        num_chunks,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        rows.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        PACKED=packed,
        WINDOW=window or 0,
        TILE=tile,
        MAX_CHUNKS=MAX_CHUNKS,
        BLOCK_SIZE=block_size,
        M=padded,
        TREE=rows.tree is not None,
        num_warps=4,
        num_stages=min(2, stages_for(2 * tile * dim_padded * q.itemsize, padded * dim_padded * q.itemsize)),
    )
    return out


@triton.jit
def chunks_of(seq_len, num_query, min_chunk, num_chunks, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """A row's (first key in sight, keys of a chunk, number of chunks, at least 1)."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - num_query - WINDOW + 1, 0) // TILE * TILE
    in_sight = seq_len - first
    share = (in_sight + num_chunks - 1) // num_chunks
    chunk = tl.maximum((share + TILE - 1) // TILE * TILE, min_chunk)
    return first, chunk, tl.maximum((in_sight + chunk - 1) // chunk, 1)


# Numbers that change with the rows are not specialized on: one variant serves all.
@triton.jit(do_not_specialize=["min_chunk", "num_chunks"])
def decode_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,  # [B, K, S, PACKED, H]
    statistics_ptr,  # [B, K, S, PACKED, 2]: maximum, total
    arrivals_ptr,  # [B, K]
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    positions_ptr,
    ancestors_ptr,
    first_drafts_ptr,
    scale,
    v_scale,
    min_chunk,  # fewest keys of a chunk
    num_chunks,  # most chunks of a row
    q_token_stride,
    q_head_stride,
    out_token_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    TREE: tl.constexpr,
):
    """One program a row, KV head and chunk.  A row with one chunk in sight is finished here."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    first_token = tl.load(cu_seqlens_q_ptr + row).to(tl.int64)
    num_query = (tl.load(cu_seqlens_q_ptr + row + 1) - first_token).to(tl.int32)
    first_key, keys, chunks_in_sight = chunks_of(seq_len, num_query, min_chunk, num_chunks, TILE, WINDOW)
    if chunk >= chunks_in_sight:
        return

    packed = tl.arange(0, M)
    query, head = packed // GROUP_SIZE, kv_head * GROUP_SIZE + packed % GROUP_SIZE
    dim = tl.arange(0, DIM_PADDED)
    inside = (query < num_query)[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = (first_token + query) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=inside, other=0.0)

    half: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM  # a block's keys; its values follow
    begin = first_key + chunk * keys
    position = seq_len - num_query + query
    ancestors, first_draft = position, seq_len
    if TREE:
        first_draft = tl.load(first_drafts_ptr + row)
        position = tl.load(positions_ptr + first_token + query, mask=query < num_query, other=0)
        ancestors = tl.load(ancestors_ptr + first_token + query, mask=query < num_query, other=0)
    accumulator, maximum, total = attend_range(
        q,
        block_table_ptr + row * block_table_stride,
        cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM,
        None,
        0,
        seq_len - num_query,
        seq_len - 1,
        begin,
        begin + keys,
        position,
        ancestors,
        first_draft,
        scale,
        half,
        2 * half,
        BLOCK_SIZE,
        TILE,
        HEAD_DIM,
        DIM_PADDED,
        M,
        WINDOW,
        TREE,
    )
    if chunks_in_sight == 1:
        result = accumulator * v_scale / tl.where(total > 0, total, 1.0)[:, None]
        out_at = (first_token + query) * out_token_stride + head * HEAD_DIM
        tl.store(out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        pair = row * NUM_KV_HEADS + kv_head
        line = (pair * num_chunks + chunk) * PACKED + packed
        tl.store(partial_ptr + line[:, None] * HEAD_DIM + dim[None, :], accumulator, mask=inside)
        tl.store(statistics_ptr + line * 2, maximum, mask=query < num_query)
        tl.store(statistics_ptr + line * 2 + 1, total, mask=query < num_query)
        # All of this program's threads have stored before one of them reports.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel") == chunks_in_sight - 1:
            tl.store(arrivals_ptr + pair, 0)
            out_ptr += first_token * out_token_stride + kv_head * GROUP_SIZE * HEAD_DIM
            for i in range(0, num_query * GROUP_SIZE):
                merge_chunks(
                    out_ptr + (i // GROUP_SIZE) * out_token_stride + (i % GROUP_SIZE) * HEAD_DIM,
                    partial_ptr, statistics_ptr, pair * num_chunks * PACKED + i, chunks_in_sight, v_scale,
                    HEAD_DIM, DIM_PADDED, PACKED, MAX_CHUNKS,
                )  # fmt: skip


@triton.jit
def merge_chunks(
    out_ptr,  # of this query and head
    partial_ptr,
    statistics_ptr,
    first_line,  # of its first chunk
    chunks_in_sight,
    v_scale,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    """The weighted mean of a query's chunks, for one head."""
    chunk = tl.arange(0, MAX_CHUNKS)
    dim = tl.arange(0, DIM_PADDED)
    line = first_line + chunk * PACKED
    present = chunk < chunks_in_sight
    # Written by other programs: not to be found in this one's cache.
    maximum = tl.load(statistics_ptr + line * 2, mask=present, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(statistics_ptr + line * 2 + 1, mask=present, other=0.0, cache_modifier=".cg")
    inside = present[:, None] & (dim < HEAD_DIM)[None, :]
    at = partial_ptr + line[:, None] * HEAD_DIM + dim[None, :]
    accumulator = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    weight = tl.exp2(maximum - tl.max(maximum, 0))
    result = tl.sum(accumulator * weight[:, None], 0) * v_scale / tl.sum(total * weight, 0)
    tl.store(out_ptr + dim, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
