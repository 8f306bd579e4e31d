# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Causal attention of prompt chunks on Hopper GPUs: copies, products and softmax each at their own pace.

Twelve warps a program, one program a multiprocessor.  One warp copies queries and pages of keys and values by
the TMA unit, as far ahead as there is room.  Two groups of four warps multiply, each with queries of its own
and both with the same keys: while one takes its softmax the other has the tensor cores, and a group's own
softmax, too, runs while its product before that is still at work.  Programs go on to the next tile of queries
until there are none, so that the copies for a tile run while the one before it ends.

Keys are taken from the newest to the oldest: what the diagonal hides lies in the first tile or two.

Legend: T tokens, B rows, N query heads, K KV heads, G query heads a KV head, H head dim.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.paged_attention import PagedRows

ROWS = gl.constexpr(64)  # packed rows of a group of warps: queries times heads
KEYS = gl.constexpr(128)  # of a tile
PART = gl.constexpr(64)  # keys of a copy, and numbers of a head: what swizzled lines of 128 bytes hold
STAGES = gl.constexpr(2)  # tiles of keys, and of values, on their way or in use
GROUPS = gl.constexpr(2)


@gluon.jit
def place(round, num_items, NUM_KV_HEADS: gl.constexpr):
    """What a program takes in its n-th round: back and forth, so that all get long tiles and short ones."""
    width, program = gl.num_programs(0), gl.program_id(0)
    item = round * width + gl.where(round % 2 == 0, program, width - 1 - program)
    return item // NUM_KV_HEADS, item % NUM_KV_HEADS


@gluon.jit
def num_rounds(num_items):
    width, program = gl.num_programs(0), gl.program_id(0)
    whole = num_items // width
    last = whole * width + gl.where(whole % 2 == 0, program, width - 1 - program)
    return whole + (last < num_items).to(gl.int32)


@gluon.jit
def row_of(tile, tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, TILE_QUERIES: gl.constexpr):
    """(row, first query there, one behind the last, the row's first token, keys before it, tokens)."""
    row = gl.load(tiles_ptr + tile * 2)
    first_query = gl.load(tiles_ptr + tile * 2 + 1)
    first_token = gl.load(cu_seqlens_q_ptr + row)
    num_query = gl.load(cu_seqlens_q_ptr + row + 1) - first_token
    seq_len = gl.load(seq_lens_ptr + row)
    end_query = gl.minimum(first_query + TILE_QUERIES, num_query)
    return row, first_query, end_query, first_token, seq_len - num_query, seq_len


@gluon.jit
def copy_tiles(
    queries, lines, q_parts, k_parts, v_parts, q_bars, k_bars, v_bars,
    tiles_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr, block_table_stride, num_items,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The copying warp: all tiles of this program, in the order in which they are used."""
    SPLITS: gl.constexpr = HEAD_DIM // PART
    QUERIES: gl.constexpr = ROWS // GROUP_SIZE
    bytes: gl.constexpr = KEYS * HEAD_DIM * 2
    step = 0
    for round in range(num_rounds(num_items)):
        tile, kv_head = place(round, num_items, NUM_KV_HEADS)
        row, first_query, end_query, first_token, prefix, seq_len = row_of(
            tile, tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, QUERIES * GROUPS
        )
        buffer = round % 2
        mbarrier.wait(q_bars.index(2 + buffer), (round // 2 & 1) ^ 1)
        mbarrier.expect(q_bars.index(buffer), GROUPS * ROWS * HEAD_DIM * 2)
        for group in gl.static_range(GROUPS):
            for split in gl.static_range(SPLITS):
                tma.async_copy_global_to_shared(
                    queries,
                    [first_token + first_query + group * QUERIES, kv_head * GROUP_SIZE, split * PART],
                    q_bars.index(buffer),
                    q_parts.index((buffer * GROUPS + group) * SPLITS + split),
                )
        num_keys = prefix + end_query
        last_part = (num_keys - 1) // PART
        pages = block_table_ptr + row.to(gl.int64) * block_table_stride
        num_tiles = (num_keys + KEYS - 1) // KEYS
        for i in range(num_tiles):
            part = (num_tiles - 1 - i) * (KEYS // PART)
            stage, phase = step % STAGES, (step // STAGES & 1) ^ 1
            # Behind the last key there may be no page: its place takes any other, and is hidden.
            other = gl.minimum(part + 1, last_part)
            line = line_of(part, pages, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            other_line = line_of(other, pages, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            mbarrier.wait(k_bars.index(STAGES + stage), phase)
            mbarrier.expect(k_bars.index(stage), bytes)
            for split in gl.static_range(SPLITS):
                at = (stage * SPLITS + split) * 2
                tma.async_copy_global_to_shared(
                    lines, [line, split * PART], k_bars.index(stage), k_parts.index(at)
                )
                tma.async_copy_global_to_shared(
                    lines, [other_line, split * PART], k_bars.index(stage), k_parts.index(at + 1)
                )
            values: gl.constexpr = NUM_KV_HEADS * BLOCK_SIZE
            mbarrier.wait(v_bars.index(STAGES + stage), phase)
            mbarrier.expect(v_bars.index(stage), bytes)
            for split in gl.static_range(SPLITS):
                at = (stage * SPLITS + split) * 2
                tma.async_copy_global_to_shared(
                    lines, [line + values, split * PART], v_bars.index(stage), v_parts.index(at)
                )
                tma.async_copy_global_to_shared(
                    lines, [other_line + values, split * PART], v_bars.index(stage), v_parts.index(at + 1)
                )
            step += 1


@gluon.jit
def line_of(part, pages, kv_head, NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Where the keys of a part lie among the lines of the cache."""
    key = part * PART
    page = gl.load(pages + key // BLOCK_SIZE)
    return (page * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE


@gluon.jit
def fold(s, maximum, total, scale, key, position, MASKED: gl.constexpr):
    """Scores into weights.  Returns (weights, maximum, total, by what to shrink what was summed before)."""
    if MASKED:
        s = gl.where(key[None, :] <= position[:, None], s, float("-inf"))
    higher = gl.maximum(maximum, gl.max(s, 1))
    shrink = gl.exp2((maximum - higher) * scale)
    weights = gl.exp2(s * scale - (higher * scale)[:, None])
    return weights, higher, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def attend(
    q, k_tiles, v_tiles, k_bars, v_bars, weights, accumulator, maximum, total, scale, start, step, position,
    MASKED: gl.constexpr, S: gl.constexpr, O: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Multiply this tile's keys, then the values of the tile before, and take the softmax meanwhile."""
    stage, phase = step % STAGES, step // STAGES & 1
    before = (step - 1) % STAGES
    mbarrier.wait(k_bars.index(stage), phase)
    none = gl.zeros([ROWS, KEYS], gl.float32, S)
    s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    sum = warpgroup_mma(weights, v_tiles.index(before), accumulator, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_bars.index(STAGES + stage))
    key = start + gl.arange(0, KEYS, gl.SliceLayout(0, S))
    fresh, maximum, total, shrink = fold(s, maximum, total, scale, key, position, MASKED)
    fresh = gl.convert_layout(fresh.to(v_tiles.dtype), OPERAND)
    # For the step after this one; here, since across it no compiler moves the wait for the product.
    mbarrier.wait(v_bars.index(stage), phase)
    accumulator, weights = warpgroup_mma_wait(0, deps=[sum, weights])
    mbarrier.arrive(v_bars.index(STAGES + before))
    accumulator = accumulator * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
    return fresh, accumulator, maximum, total


@gluon.jit
def attend_tiles(
    q_tiles, k_tiles, v_tiles, v_parts, q_bars, k_bars, v_bars,
    out_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, scale, v_scale, out_token_stride, num_items,
    GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps: its half of the queries of all tiles of this program."""
    QUERIES: gl.constexpr = ROWS // GROUP_SIZE
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    packed = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    step = 0
    for round in range(num_rounds(num_items)):
        tile, kv_head = place(round, num_items, NUM_KV_HEADS)
        row, first_query, end_query, first_token, prefix, seq_len = row_of(
            tile, tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, QUERIES * GROUPS
        )
        num_tiles = (prefix + end_query + KEYS - 1) // KEYS
        first_query += GROUP * QUERIES
        position = prefix + first_query + packed // GROUP_SIZE
        num_whole = gl.minimum((prefix + first_query + 1) // KEYS, num_tiles - 1)
        # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
        maximum = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, S))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)

        buffer, q_phase = round % 2, round // 2 & 1
        q = q_tiles.index(buffer * GROUPS + GROUP)
        stage, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(q_bars.index(buffer), q_phase)
        mbarrier.wait(k_bars.index(stage), phase)
        none = gl.zeros([ROWS, KEYS], gl.float32, S)
        s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_bars.index(STAGES + stage))
        start = (num_tiles - 1) * KEYS
        key = start + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        fresh, maximum, total, shrink = fold(s, maximum, total, scale, key, position, True)
        weights = gl.convert_layout(fresh.to(v_tiles.dtype), OPERAND)
        mbarrier.wait(v_bars.index(stage), phase)
        if start + KEYS > seq_len:
            clear(v_parts, stage, seq_len - start, HEAD_DIM)

        step += 1
        for i in range(num_tiles - 1 - num_whole):
            start -= KEYS
            weights, accumulator, maximum, total = attend(
                q, k_tiles, v_tiles, k_bars, v_bars, weights, accumulator, maximum, total, scale, start,
                step, position, True, S, O, OPERAND,
            )  # fmt: skip
            step += 1
        for i in range(num_whole):
            start -= KEYS
            weights, accumulator, maximum, total = attend(
                q, k_tiles, v_tiles, k_bars, v_bars, weights, accumulator, maximum, total, scale, start,
                step, position, False, S, O, OPERAND,
            )  # fmt: skip
            step += 1

        mbarrier.arrive(q_bars.index(2 + buffer))
        stage = (step - 1) % STAGES
        sum = warpgroup_mma(weights, v_tiles.index(stage), accumulator, is_async=True)
        total = gl.convert_layout(v_scale / total, gl.SliceLayout(1, O))
        accumulator, weights = warpgroup_mma_wait(0, deps=[sum, weights])
        mbarrier.arrive(v_bars.index(STAGES + stage))
        result = (accumulator * total[:, None]).to(out_ptr.dtype.element_ty)
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, O))
        query, head = first_query + lane // GROUP_SIZE, kv_head * GROUP_SIZE + lane % GROUP_SIZE
        at = (first_token + query).to(gl.int64) * out_token_stride + head * HEAD_DIM
        dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O))
        gl.store(out_ptr + at[:, None] + dim[None, :], result, mask=(query < end_query)[:, None])


@gluon.jit
def clear(v_parts, stage, num_keys, HEAD_DIM: gl.constexpr):
    """Zero values behind the sequence's end, which may be anything, NaN too: a weight of zero silences none.

    Both groups do so, and write the same.
    """
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SPLITS: gl.constexpr = HEAD_DIM // PART
    for split in gl.static_range(SPLITS):
        for half in gl.static_range(2):
            part = v_parts.index((stage * SPLITS + split) * 2 + half)
            key = half * PART + gl.arange(0, PART, gl.SliceLayout(1, BLOCKED))
            v = part.load(BLOCKED)
            part.store(gl.where((key < num_keys)[:, None], v, gl.zeros_like(v)))
    fence_async_shared()
    gl.thread_barrier()


STEADY = ["block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"]


@gluon.jit(do_not_specialize=["num_items", "block_table_stride"], do_not_specialize_on_alignment=STEADY)
def hopper_prefill_kernel(
    queries,  # descriptor of [T, N, H], in boxes [queries, G, PART]
    lines,  # descriptor of the cache as lines of one token and head, in boxes [PART, PART]
    out_ptr,
    tiles_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    scale,
    v_scale,
    out_token_stride,
    block_table_stride,
    num_items,
    NUM_KV_HEADS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One program a multiprocessor; an item is a tile of queries and a KV head."""
    let_next_start(DEPENDENT)
    SPLITS: gl.constexpr = HEAD_DIM // PART
    dtype: gl.constexpr = lines.dtype
    q_parts = gl.allocate_shared_memory(
        dtype, [2 * GROUPS * SPLITS, ROWS // GROUP_SIZE, GROUP_SIZE, PART], queries.layout
    )
    k_parts = gl.allocate_shared_memory(dtype, [STAGES * SPLITS * 2, PART, PART], lines.layout)
    v_parts = gl.allocate_shared_memory(dtype, [STAGES * SPLITS * 2, PART, PART], lines.layout)
    # Parts of a tile lie as the tensor cores expect the lines of a whole one.
    q_tiles = q_parts._reinterpret(dtype, [2 * GROUPS, ROWS, HEAD_DIM], lines.layout)
    k_tiles = k_parts._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], lines.layout)
    v_tiles = v_parts._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], lines.layout)
    # First those that say "full", then those that say "empty".
    q_bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_bars.index(i), count=1)
        mbarrier.init(q_bars.index(2 + i), count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(i), count=1)
        mbarrier.init(v_bars.index(i), count=1)
        mbarrier.init(k_bars.index(STAGES + i), count=GROUPS)
        mbarrier.init(v_bars.index(STAGES + i), count=GROUPS)
    fence_async_shared()
    wait(DEPENDENT)
    gl.warp_specialize(
        [
            (
                attend_tiles,
                (
                    q_tiles, k_tiles, v_tiles, v_parts, q_bars, k_bars, v_bars,
                    out_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, scale, v_scale, out_token_stride, num_items,
                    gl.constexpr(0), NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM,
                ),  # fmt: skip
            ),
            (
                attend_tiles,
                (
                    q_tiles, k_tiles, v_tiles, v_parts, q_bars, k_bars, v_bars,
                    out_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, scale, v_scale, out_token_stride, num_items,
                    gl.constexpr(1), NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM,
                ),  # fmt: skip
            ),
            (
                copy_tiles,
                (
                    queries, lines, q_parts, k_parts, v_parts, q_bars, k_bars, v_bars,
                    tiles_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr, block_table_stride, num_items,
                    NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE,
                ),  # fmt: skip
            ),
        ],
        [4, 1],
        [232, 40],
    )


def hopper_prefill(
    q: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    tiles: Tensor,
    scale: float,
    v_scale: float,
    out: Tensor,
) -> Tensor:
    """prefill_attention, for what `hopper_takes`.  scale: to base 2, with that of the keys."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    group_size = q.shape[1] // num_kv_heads
    num_items = tiles.shape[0] * num_kv_heads
    width = min(num_items, num_multiprocessors(q.device))
    hopper_prefill_kernel[(width,)](
        boxes_of(q, [ROWS.value // group_size, group_size, PART.value]),
        boxes_of(kv_cache.view(-1, head_dim), [PART.value, PART.value]),
        out,
        tiles,
        rows.block_table,
        rows.seq_lens,
        rows.cu_seqlens_q,
        scale,
        v_scale,
        out.stride(0),
        rows.block_table.stride(0),
        num_items,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        num_warps=4,
        **dependent(),
    )
    return out


def boxes_of(x: Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor for copies by the TMA unit, in lines of 128 bytes, as the tensor cores want them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
    return TensorDescriptor.from_tensor(x, box, layout)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
