# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Attention of rows with many queries, prompt chunks behind any prefix, over the paged cache.

Queries are cut into tiles, and the map from tile to row is made on the host, which knows how many queries a
row has; how many keys stand before them only the device knows.  On a Hopper GPU most goes to the kernel made
for it (hopper_prefill.py); here is the one for all else: trees, soft caps, FP8 caches, any head dim and GPU.

Legend: T tokens, B rows, M packed rows of a tile, N query heads, K KV heads, G query heads a KV head, H head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.attention.cache_lines import cache_lines, has_lines
from pellucid.kernels.attention.decode_merge import sink_weight
from pellucid.kernels.attention.decode_tiles import sight_of, visible_keys
from pellucid.kernels.attention.hopper_prefill import hopper_prefill, hopper_takes
from pellucid.kernels.attention.paged_attention import (
    LOG2_E,
    PagedRows,
    check_operands,
    padded_heads,
    paged_attention_ref,
    shared_memory,
    tree_arguments,
)
from pellucid.kernels.attention.prefill_plan import STEADY, PromptTiles
from pellucid.kernels.attention.scores import capped, first_key, reach_of
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait

PACKED_ROWS = 128  # of a tile: queries times heads

prefill_attention_ref = paged_attention_ref


def queries_per_tile(group_size: int, *, by_hopper: bool = False) -> int:
    """Queries a tile holds, given how many heads each has in it.  by_hopper: for hopper_prefill."""
    return max(1, PACKED_ROWS // (padded_heads(group_size) if by_hopper else group_size))


def prefill_tiles(
    query_lens: Sequence[int], tile_queries: int, num_wanted: Sequence[int] | None = None
) -> np.ndarray:
    """[num_tiles, 2] int32 on the host: each tile's row and its first query there, late queries first.

    num_wanted: how many of each row's last queries are to be in tiles; None: all.
    """
    num_wanted = query_lens if num_wanted is None else num_wanted
    tiles = [
        (row, start)
        for row, (length, wanted) in enumerate(zip(query_lens, num_wanted, strict=True))
        for start in reversed(range(length - wanted, length, tile_queries))
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)


def keys_per_tile(block_size: int, dtype: torch.dtype) -> int:
    """Keys a tile holds: a power of two that divides the page, so that a tile lies in one page.

    float32 multiplies without tensor cores and would run out of registers with larger tiles.
    """
    return min(block_size & -block_size, 16 if dtype == torch.float32 else 64)


def stages_for(tile_bytes: int, query_bytes: int, room: int) -> int:
    """Stages of the loop over tiles, at least 1: as fit beside the queries in `room` bytes of shared memory.

    tile_bytes: of keys and values together.
    """
    return max(1, min(3, 1 + (room - query_bytes) // tile_bytes))


def prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    tiles: PromptTiles,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Attend with q [T, N, H] over kv_cache [num_blocks, 2, K, block_size, H] into out [T, N, H], its result.

    tiles: of these rows, with queries_per_tile(N // K).  window: keys a query sees, itself included.
    chunk: or it sees its own of the chunks of so many.  sinks: [N], logits that take weight from a head's
    keys.  The cache holds keys / k_scale and values / v_scale.  Reads no device value on the host.
    """
    check_operands(q, kv_cache, rows)
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert out.shape == q.shape and out.stride()[1:] == (head_dim, 1), (out.shape, out.stride())
    num_tiles = len(tiles.tiles)
    if num_tiles == 0:
        return out
    if softcap is None and chunk is None and hopper_takes(q, kv_cache, rows):
        scales = {"scale": scale * k_scale * LOG2_E, "v_scale": v_scale}
        return hopper_prefill(q, kv_cache, rows, tiles=tiles, **scales, window=window, sinks=sinks, out=out)
    group_size = q.shape[1] // num_kv_heads
    dim_padded = triton.next_power_of_2(head_dim)
    tile = keys_per_tile(block_size, q.dtype)
    padded = max(PACKED_ROWS, triton.next_power_of_2(group_size))
    prefill_kernel[(num_kv_heads, num_tiles)](
        q,
        kv_cache,
        cache_lines(kv_cache, tile) if has_lines(q, kv_cache) else None,
        out,
        tiles.longest_first(),
        rows.block_table,
        rows.seq_lens,
        rows.cu_seqlens_q,
        *tree_arguments(rows),
        sinks,
        scale * k_scale * LOG2_E,
        (softcap or 1.0) * LOG2_E,
        v_scale,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        rows.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        REACH=reach_of(window, chunk),
        BLOCK_SIZE=block_size,
        TILE=tile,
        TILE_QUERIES=tiles.tile_queries,
        M=padded,
        TREE=rows.tree is not None,
        CAPPED=softcap is not None,
        num_warps=4 if q.itemsize == 2 and dim_padded <= 128 else 8,
        num_stages=stages_for(
            2 * tile * dim_padded * q.itemsize, padded * dim_padded * q.itemsize, shared_memory(q.device)
        ),
        **dependent(),
    )
    return out


STEP_POINTERS = STEADY + ["block_table_ptr", "positions_ptr", "ancestors_ptr", "first_drafts_ptr"]


@triton.jit
def attend_pages(
    q,  # [M, H]
    accumulator,  # [M, H] float32
    maximum,  # [M] float32, in base 2
    total,  # [M] float32
    pages_ptr,  # this row's block table
    keys_ptr,  # this KV head's keys in page 0
    lines,  # a descriptor of the cache as lines [TILE, H], for tiles that every query sees whole; or None
    first_line,  # of this KV head's keys in page 0
    begin,  # first key, a multiple of TILE
    end,  # behind the last key
    position,  # [M], of each packed row's query
    ancestors,  # [M], its bits
    first_draft,  # of this row
    scale,  # to base 2
    cap,  # of scores, to base 2
    VALUES_OFFSET: tl.constexpr,  # from a page's keys to its values
    PAGE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    REACH: tl.constexpr,  # see `reach_of`
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,  # whether some key of begin .. end is hidden from some query
):
    """Fold keys begin .. end into the running softmax.  Returns (accumulator, maximum, total)."""
    key = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PADDED)
    inside = dim[None, :] < HEAD_DIM
    for start in range(begin, end, TILE):
        page = tl.load(pages_ptr + start // BLOCK_SIZE)
        line = page * (PAGE_STRIDE // HEAD_DIM) + first_line + start % BLOCK_SIZE
        at = keys_ptr + page.to(tl.int64) * PAGE_STRIDE
        at = at + (start % BLOCK_SIZE + key)[:, None] * HEAD_DIM + dim[None, :]
        # Places behind the end may hold anything, NaN too, which a weight of zero would not silence.
        present = inside & ((start + key) < end)[:, None] if MASKED else inside
        if lines is not None and not MASKED:
            k = lines.load([line, 0])
            v = lines.load([line + VALUES_OFFSET // HEAD_DIM, 0])
        elif MASKED or DIM_PADDED != HEAD_DIM:
            k = tl.load(at, mask=present, other=0.0)
            v = tl.load(at + VALUES_OFFSET, mask=present, other=0.0)
        else:
            k = tl.load(at)
            v = tl.load(at + VALUES_OFFSET)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        factor = scale
        if CAPPED:
            scores = capped(scores * scale, cap)
            factor = 1.0
        if MASKED:
            visible = visible_keys(
                (start + key)[None, :], position[:, None], ancestors[:, None], first_draft, REACH, TREE
            )
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(q.dtype), v.to(q.dtype), accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit
def attend_range(
    q,
    pages_ptr,
    keys_ptr,
    lines,
    first_line,
    first_position,  # of the oldest query, before the first draft
    last_position,  # of the newest query
    begin,  # keys before it are not looked at, a multiple of TILE
    end,  # nor keys from here on
    position,
    ancestors,
    first_draft,
    scale,
    cap,
    VALUES_OFFSET: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    M: tl.constexpr,
    REACH: tl.constexpr,
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attend over the keys of begin .. end that queries at places first_position .. last_position see.

    Tiles that every query sees whole, nearly all, take the loop without masks.  Returns (accumulator,
    maximum, total): the result is accumulator / total, and a query that sees nothing has a total of zero.
    """
    # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    accumulator = tl.zeros([M, DIM_PADDED], dtype=tl.float32)
    end = tl.minimum(end, last_position + 1)
    whole_end = tl.minimum(
        tl.maximum((first_position + 1) // TILE * TILE, begin), tl.maximum(end // TILE * TILE, begin)
    )
    whole_begin = begin
    if REACH != 0:
        oldest = first_key(first_position, REACH) // TILE * TILE
        begin = tl.maximum(begin, oldest)
        everybody = (first_key(last_position, REACH) + TILE - 1) // TILE * TILE
        whole_end = tl.maximum(whole_end, begin)
        whole_begin = tl.minimum(tl.maximum(everybody, begin), whole_end)
        window_end = tl.minimum(whole_begin, end)
        accumulator, maximum, total = attend_pages(
            q, accumulator, maximum, total, pages_ptr, keys_ptr, lines, first_line,
            begin, window_end, position,
            ancestors, first_draft, scale, cap,
            VALUES_OFFSET, PAGE_STRIDE, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PADDED, REACH, TREE, CAPPED, True,
        )  # fmt: skip
    accumulator, maximum, total = attend_pages(
        q, accumulator, maximum, total, pages_ptr, keys_ptr, lines, first_line,
            whole_begin, whole_end, position,
        ancestors, first_draft, scale, cap,
        VALUES_OFFSET, PAGE_STRIDE, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PADDED, REACH, TREE, CAPPED, False,
    )  # fmt: skip
    accumulator, maximum, total = attend_pages(
        q, accumulator, maximum, total, pages_ptr, keys_ptr, lines, first_line,
            whole_end, end, position,
        ancestors, first_draft, scale, cap,
        VALUES_OFFSET, PAGE_STRIDE, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PADDED, REACH, TREE, CAPPED, True,
    )  # fmt: skip
    return accumulator, maximum, total


@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=STEP_POINTERS)
def prefill_kernel(
    q_ptr,
    cache_ptr,
    lines,  # the cache for TMA, or None
    out_ptr,
    tiles_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    positions_ptr,
    ancestors_ptr,
    first_drafts_ptr,
    sinks_ptr,  # [N], or None
    scale,
    cap,  # of scores, to base 2
    v_scale,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    M: tl.constexpr,
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of queries and KV head."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    first_query = tl.load(tiles_ptr + tile * 2 + 1)
    first_token = tl.load(cu_seqlens_q_ptr + row).to(tl.int64)
    num_query = (tl.load(cu_seqlens_q_ptr + row + 1) - first_token).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + row)
    prefix = seq_len - num_query

    packed = tl.arange(0, M)
    query, head = first_query + packed // GROUP_SIZE, kv_head * GROUP_SIZE + packed % GROUP_SIZE
    dim = tl.arange(0, DIM_PADDED)
    end_query = tl.minimum(first_query + TILE_QUERIES, num_query)
    inside = (query < end_query)[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = (first_token + query) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=inside, other=0.0)

    position, ancestors, first_draft = sight_of(
        row, first_token + query, query < end_query, prefix + query, seq_len,
        positions_ptr, ancestors_ptr, first_drafts_ptr, TREE,
    )  # fmt: skip

    half: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM  # a block's keys; its values follow
    accumulator, maximum, total = attend_range(
        q,
        block_table_ptr + row * block_table_stride,
        cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM,
        lines,
        kv_head * BLOCK_SIZE,
        tl.minimum(prefix + first_query, first_draft - 1),
        seq_len - 1 if TREE else prefix + end_query - 1,  # a draft may see later ones, as bits say
        0,
        seq_len,
        position,
        ancestors,
        first_draft,
        scale,
        cap,
        half,
        2 * half,
        BLOCK_SIZE,
        TILE,
        HEAD_DIM,
        DIM_PADDED,
        M,
        REACH,
        TREE,
        CAPPED,
    )
    if sinks_ptr is not None:
        total += sink_weight(sinks_ptr, head, query < end_query, maximum)
    result = accumulator * v_scale / tl.where(total > 0, total, 1.0)[:, None]
    out_at = (first_token + query) * out_token_stride + head * HEAD_DIM
    tl.store(out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
