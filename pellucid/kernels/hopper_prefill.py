# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0915, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOptionalCall=false
"""Causal attention of prompt chunks on Hopper GPUs: copies, products and softmax each at their own pace.

Nine warps a program, one program a multiprocessor.  One warp copies queries and pages of keys and values by
the TMA unit, as far ahead as there is room.  Two groups of four warps multiply, each with queries of its own
and both with the same keys: while one takes its softmax the other has the tensor cores, and a group's own
softmax, too, runs while its product with the values before is still at work.  Programs go from item to item,
a tile of queries and a KV head each, so that what an item needs is copied while the one before it ends.
Where there is much to do, they go on to other heads together, and find keys and values in the L2 cache.

Keys are taken from the newest to the oldest: what the diagonal hides lies in the first tile or two.

Reaches on an H200, bfloat16, head dim 128, 16 heads on 8: 633 TFLOP/s for a prompt of 8,192 tokens, 505 for
four of 2,048, 284 for sixteen of 512, 586 for 2,048 tokens behind 6,144 (benchmarks/kernels.py).  At the
power limit, with 32 heads on 8: 566 for two prompts of 8,000, 538 for four of 4,096; with all heads at once
537 and 499.

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
K_STAGES = gl.constexpr(2)  # tiles of keys on their way or in use
V_STAGES = gl.constexpr(3)  # tiles of values: each is in use for longer
GROUPS = gl.constexpr(2)
MIN_ROUNDS = 3  # of items, before programs go on to other heads

# Triton 3.6 has these under other names than later versions.
barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def seen_as(parts, num: gl.constexpr, lines: gl.constexpr, width: gl.constexpr):
    """Parts as `num` tiles [lines, width], which parts make up as the tensor cores expect a tile to lie."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if HAS_REINTERPRET:
        return parts.reinterpret(parts.dtype, [num, lines, width], layout)
    else:
        return parts._reinterpret(parts.dtype, [num, lines, width], layout)


@gluon.jit
def num_rounds(batch):
    """Items of this program."""
    _, _, _, num_items, _ = batch
    width, program = gl.num_programs(0), gl.program_id(0)
    whole = num_items // width
    last = whole * width + gl.where(whole % 2 == 0, program, width - 1 - program)
    return whole + (last < num_items).to(gl.int32)


@gluon.jit
def item_of(round, rounds, batch, NUM_KV_HEADS: gl.constexpr):
    """What a program takes in a round: back and forth, so that all programs get long tiles and short ones.

    Some heads after others, whose keys and values the L2 cache then holds for all tiles; from the shortest
    tile to the longest and back, and at last to the shortest, so that programs end together.  Behind the last
    round, that of the last one.  Returns (KV head, row, first query of the tile).
    """
    tiles_ptr, _, _, num_items, heads = batch
    width, program = gl.num_programs(0), gl.program_id(0)
    round = gl.minimum(round, rounds - 1)
    item = round * width + gl.where(round % 2 == 0, program, width - 1 - program)
    num_tiles = num_items // NUM_KV_HEADS
    section, item = item // (num_tiles * heads), item % (num_tiles * heads)
    descends = (NUM_KV_HEADS // heads - section) % 2 == 1
    tile = gl.where(descends, item // heads, num_tiles - 1 - item // heads)
    return section * heads + item % heads, gl.load(tiles_ptr + tile * 2), gl.load(tiles_ptr + tile * 2 + 1)


@gluon.jit
def row_of(row, first_query, batch, TILE_QUERIES: gl.constexpr):
    """(first token of the row, one behind the tile's last query, keys before the row's queries, tokens)."""
    _, seq_lens_ptr, cu_seqlens_q_ptr, _, _ = batch
    first_token = gl.load(cu_seqlens_q_ptr + row)
    num_query = gl.load(cu_seqlens_q_ptr + row + 1) - first_token
    seq_len = gl.load(seq_lens_ptr + row)
    return first_token, gl.minimum(first_query + TILE_QUERIES, num_query), seq_len - num_query, seq_len


@gluon.jit
def lines_of(
    tile, row, kv_head, num_keys, block_table_ptr, block_table_stride,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Where both parts of a tile of keys begin among the lines of the cache.

    Behind the last key there may be no page: its place takes another, which is hidden.
    """
    pages = block_table_ptr + row.to(gl.int64) * block_table_stride
    key = gl.maximum(tile, 0) * KEYS
    other = gl.minimum(key + PART, (num_keys - 1) // PART * PART)
    page, other_page = gl.load(pages + key // BLOCK_SIZE), gl.load(pages + other // BLOCK_SIZE)
    line = (page * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
    return line, (other_page * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + other % BLOCK_SIZE


@gluon.jit
def copy_tile(lines, line, other, parts, bars, step, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    """Copy a tile of keys or values, once there is room."""
    SPLITS: gl.constexpr = HEAD_DIM // PART
    stage, phase = step % STAGES, step // STAGES & 1
    mbarrier.wait(bars.index(STAGES + stage), phase ^ 1)
    full = bars.index(stage)
    mbarrier.expect(full, KEYS * HEAD_DIM * 2)
    for split in gl.static_range(SPLITS):
        at = (stage * SPLITS + split) * 2
        copy_box(lines, [line, split * PART], full, parts.index(at))
        copy_box(lines, [other, split * PART], full, parts.index(at + 1))


@gluon.jit
def copy_tiles(
    parts, bars, batch, queries, lines, block_table_ptr, block_table_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The copying warp: all tiles of this program, in the order in which they are used."""
    SPLITS: gl.constexpr = HEAD_DIM // PART
    QUERIES: gl.constexpr = ROWS // GROUP_SIZE
    VALUES: gl.constexpr = NUM_KV_HEADS * BLOCK_SIZE  # lines from a page's keys to its values
    q_parts, k_parts, v_parts = parts
    q_bars, k_bars, v_bars = bars
    rounds = num_rounds(batch)
    step = 0
    # Loads run ahead, since nothing else hides them: the next item's row, and the item after that.
    kv_head, row, first_query = item_of(0, rounds, batch, NUM_KV_HEADS)
    next_head, next_row, next_query = item_of(1, rounds, batch, NUM_KV_HEADS)
    first_token, end_query, prefix, _ = row_of(row, first_query, batch, QUERIES * GROUPS)
    num_tiles = (prefix + end_query + KEYS - 1) // KEYS
    line, other = lines_of(
        num_tiles - 1, row, kv_head, prefix + end_query, block_table_ptr, block_table_stride,
        NUM_KV_HEADS, BLOCK_SIZE,
    )  # fmt: skip
    for round in range(rounds):
        next_token, next_end, next_prefix, _ = row_of(next_row, next_query, batch, QUERIES * GROUPS)
        later_head, later_row, later_query = item_of(round + 2, rounds, batch, NUM_KV_HEADS)
        buffer = round % 2
        mbarrier.wait(q_bars.index(2 + buffer), (round // 2 & 1) ^ 1)
        mbarrier.expect(q_bars.index(buffer), GROUPS * ROWS * HEAD_DIM * 2)
        for group in gl.static_range(GROUPS):
            for split in gl.static_range(SPLITS):
                copy_box(
                    queries,
                    [first_token + first_query + group * QUERIES, kv_head * GROUP_SIZE, split * PART],
                    q_bars.index(buffer),
                    q_parts.index((buffer * GROUPS + group) * SPLITS + split),
                )
        for tile in range(num_tiles - 1, -1, -1):
            next_line, next_other = lines_of(
                tile - 1, row, kv_head, prefix + end_query, block_table_ptr, block_table_stride,
                NUM_KV_HEADS, BLOCK_SIZE,
            )  # fmt: skip
            copy_tile(lines, line, other, k_parts, k_bars, step, HEAD_DIM, K_STAGES)
            copy_tile(lines, line + VALUES, other + VALUES, v_parts, v_bars, step, HEAD_DIM, V_STAGES)
            line, other = next_line, next_other
            step += 1
        kv_head, row, first_token, first_query = next_head, next_row, next_token, next_query
        end_query, prefix = next_end, next_prefix
        next_head, next_row, next_query = later_head, later_row, later_query
        num_tiles = (prefix + end_query + KEYS - 1) // KEYS
        line, other = lines_of(
            num_tiles - 1, row, kv_head, prefix + end_query, block_table_ptr, block_table_stride,
            NUM_KV_HEADS, BLOCK_SIZE,
        )  # fmt: skip


@gluon.jit
def multiply_keys(q, keys, SCORES: gl.constexpr):
    """Start q times keys.  Returns what will be the scores [ROWS, KEYS]."""
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    return warpgroup_mma(q, keys.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def fold(s, maximum, total, scale, start, position, MASKED: gl.constexpr, SCORES: gl.constexpr):
    """Scores into weights.  Returns (weights, maximum, total, by what to shrink what was summed before)."""
    if MASKED:
        key = start + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        s = gl.where(key[None, :] <= position[:, None], s, float("-inf"))
    higher = gl.maximum(maximum, gl.max(s, 1))
    shrink = gl.exp2((maximum - higher) * scale)
    weights = gl.exp2(s * scale - (higher * scale)[:, None])
    return weights, higher, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def begin(s, scale, start, position, SCORES: gl.constexpr):
    """Weights of a row's newest keys, their maximum and sum."""
    # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
    maximum = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    weights, maximum, total, _ = fold(s, maximum, total, scale, start, position, True, SCORES)
    return weights, maximum, total


@gluon.jit
def attend(
    q, tiles, bars, weights, accumulator, maximum, total, scale, start, step, position,
    MASKED: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Multiply this tile's keys, then the values of the tile before, and take the softmax meanwhile."""
    _, k_tiles, v_tiles = tiles
    _, k_bars, v_bars = bars
    stage, before = step % K_STAGES, (step - 1) % V_STAGES
    mbarrier.wait(k_bars.index(stage), step // K_STAGES & 1)
    s = multiply_keys(q, k_tiles.index(stage), SCORES)
    sum = warpgroup_mma(weights, v_tiles.index(before), accumulator, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_bars.index(K_STAGES + stage))
    fresh, maximum, total, shrink = fold(s, maximum, total, scale, start, position, MASKED, SCORES)
    fresh = gl.convert_layout(fresh.to(v_tiles.dtype), OPERAND)
    # For the next step; here, since the compiler moves no softmax across it, behind the wait for the sum.
    mbarrier.wait(v_bars.index(step % V_STAGES), step // V_STAGES & 1)
    accumulator, weights = warpgroup_mma_wait(0, deps=[sum, weights])
    mbarrier.arrive(v_bars.index(V_STAGES + before))
    accumulator = accumulator * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    return fresh, accumulator, maximum, total


@gluon.jit
def attend_tiles(
    tiles, bars, batch, v_parts, out_ptr, out_token_stride, scale, v_scale,
    GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps: its half of the queries of all tiles of this program.

    The softmax of an item's first keys runs while the last values of the item before are multiplied.
    """
    QUERIES: gl.constexpr = ROWS // GROUP_SIZE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    q_tiles, k_tiles, v_tiles = tiles
    q_bars, k_bars, v_bars = bars
    query = GROUP * QUERIES + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // GROUP_SIZE
    rounds = num_rounds(batch)
    kv_head, row, first_query = item_of(0, rounds, batch, NUM_KV_HEADS)
    next_head, next_row, next_query = item_of(1, rounds, batch, NUM_KV_HEADS)
    first_token, end_query, prefix, seq_len = row_of(row, first_query, batch, QUERIES * GROUPS)
    num_tiles = (prefix + end_query + KEYS - 1) // KEYS
    mbarrier.wait(q_bars.index(0), 0)
    mbarrier.wait(k_bars.index(0), 0)
    s = multiply_keys(q_tiles.index(GROUP), k_tiles.index(0), SCORES)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_bars.index(K_STAGES))
    start = (num_tiles - 1) * KEYS
    weights, maximum, total = begin(s, scale, start, prefix + first_query + query, SCORES)
    weights = gl.convert_layout(weights.to(v_tiles.dtype), OPERAND)
    mbarrier.wait(v_bars.index(0), 0)
    clear(v_parts, 0, seq_len - start, HEAD_DIM)
    step = 1
    for round in range(rounds):
        next_token, next_end, next_prefix, next_len = row_of(next_row, next_query, batch, QUERIES * GROUPS)
        later_head, next_row, later_query = item_of(round + 2, rounds, batch, NUM_KV_HEADS)
        q = q_tiles.index(round % 2 * GROUPS + GROUP)
        position = prefix + first_query + query
        num_whole = gl.minimum((prefix + first_query + GROUP * QUERIES + 1) // KEYS, num_tiles - 1)
        start = (num_tiles - 1) * KEYS
        accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, RESULT)
        for _ in range(num_tiles - 1 - num_whole):
            start -= KEYS
            weights, accumulator, maximum, total = attend(
                q, tiles, bars, weights, accumulator, maximum, total, scale, start, step, position,
                True, SCORES, RESULT, OPERAND,
            )  # fmt: skip
            step += 1
        for _ in range(num_whole):
            start -= KEYS
            weights, accumulator, maximum, total = attend(
                q, tiles, bars, weights, accumulator, maximum, total, scale, start, step, position,
                False, SCORES, RESULT, OPERAND,
            )  # fmt: skip
            step += 1

        # Where there is no next item, what is done for it works on what happens to be there, for nobody.
        more = round + 1 < rounds
        buffer, stage, before = (round + 1) % 2, step % K_STAGES, (step - 1) % V_STAGES
        mbarrier.wait(q_bars.index(buffer), (round + 1) // 2 & 1, pred=more)
        mbarrier.wait(k_bars.index(stage), step // K_STAGES & 1, pred=more)
        s = multiply_keys(q_tiles.index(buffer * GROUPS + GROUP), k_tiles.index(stage), SCORES)
        sum = warpgroup_mma(weights, v_tiles.index(before), accumulator, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_bars.index(K_STAGES + stage), pred=more)
        num_tiles = (next_prefix + next_end + KEYS - 1) // KEYS
        start = (num_tiles - 1) * KEYS
        factor = gl.convert_layout(v_scale / total, gl.SliceLayout(1, RESULT))
        fresh, maximum, total = begin(s, scale, start, next_prefix + next_query + query, SCORES)
        fresh = gl.convert_layout(fresh.to(v_tiles.dtype), OPERAND)
        mbarrier.wait(v_bars.index(step % V_STAGES), step // V_STAGES & 1, pred=more)
        accumulator, weights = warpgroup_mma_wait(0, deps=[sum, weights])
        mbarrier.arrive(v_bars.index(V_STAGES + before))
        if more:
            clear(v_parts, step % V_STAGES, next_len - start, HEAD_DIM)
        weights = fresh
        step += 1

        # By way of where the queries were, so that threads write whole lines.
        q.store((accumulator * factor[:, None]).to(q.dtype))
        result = q.load(LINES)
        fence_async_shared()
        mbarrier.arrive(q_bars.index(2 + round % 2))
        packed = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
        dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
        written, head = first_query + GROUP * QUERIES + packed // GROUP_SIZE, packed % GROUP_SIZE
        at = (first_token + written).to(gl.int64) * out_token_stride
        at = at + (kv_head * GROUP_SIZE + head) * HEAD_DIM
        gl.store(out_ptr + at[:, None] + dim[None, :], result, mask=(written < end_query)[:, None])
        kv_head, first_token, first_query, end_query = next_head, next_token, next_query, next_end
        prefix, next_head, next_query = next_prefix, later_head, later_query


@gluon.jit
def clear(v_parts, stage, num_keys, HEAD_DIM: gl.constexpr):
    """Zero values behind the sequence's end, which may be anything, NaN too: a weight of zero silences none.

    Both groups do so, and write the same.
    """
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SPLITS: gl.constexpr = HEAD_DIM // PART
    if num_keys < KEYS:
        for half in gl.static_range(2):
            key = half * PART + gl.arange(0, PART, gl.SliceLayout(1, BLOCKED))
            if num_keys < (half + 1) * PART:
                for split in gl.static_range(SPLITS):
                    part = v_parts.index((stage * SPLITS + split) * 2 + half)
                    v = part.load(BLOCKED)
                    part.store(gl.where((key < num_keys)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        barrier()


# Views of a step's tensors, whose alignment changes with the rows before them: not a variant each.
STEADY = ["block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"]


@gluon.jit(
    do_not_specialize=["num_items", "heads_at_once", "block_table_stride"],
    do_not_specialize_on_alignment=STEADY,
)
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
    heads_at_once,  # a divisor of NUM_KV_HEADS
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
    k_parts = gl.allocate_shared_memory(dtype, [K_STAGES * SPLITS * 2, PART, PART], lines.layout)
    v_parts = gl.allocate_shared_memory(dtype, [V_STAGES * SPLITS * 2, PART, PART], lines.layout)
    q_tiles = seen_as(q_parts, 2 * GROUPS, ROWS, HEAD_DIM)
    k_tiles = seen_as(k_parts, K_STAGES, KEYS, HEAD_DIM)
    v_tiles = seen_as(v_parts, V_STAGES, KEYS, HEAD_DIM)
    # First those that say "full", then those that say "empty".
    q_bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_bars = gl.allocate_shared_memory(gl.int64, [2 * K_STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [2 * V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_bars.index(i), count=1)
        mbarrier.init(q_bars.index(2 + i), count=GROUPS)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_bars.index(i), count=1)
        mbarrier.init(k_bars.index(K_STAGES + i), count=GROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_bars.index(i), count=1)
        mbarrier.init(v_bars.index(V_STAGES + i), count=GROUPS)
    fence_async_shared()
    wait(DEPENDENT)
    parts, tiles, bars = (q_parts, k_parts, v_parts), (q_tiles, k_tiles, v_tiles), (q_bars, k_bars, v_bars)
    batch = (tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_items, heads_at_once)
    gl.warp_specialize(
        [
            (attend_tiles, (
                tiles, bars, batch, v_parts, out_ptr, out_token_stride, scale, v_scale,
                gl.constexpr(0), NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM,
            )),
            (attend_tiles, (
                tiles, bars, batch, v_parts, out_ptr, out_token_stride, scale, v_scale,
                gl.constexpr(1), NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM,
            )),
            (copy_tiles, (
                parts, bars, batch, queries, lines, block_table_ptr, block_table_stride,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def hopper_takes(q: Tensor, kv_cache: Tensor, rows: PagedRows) -> bool:
    """Whether this kernel can attend with q [T, N, H] over this cache, without a window."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    return (
        is_hopper(q.device)
        and rows.tree is None
        and q.dtype == kv_cache.dtype
        and q.itemsize == 2
        and head_dim in (64, 128)
        and block_size % PART.value == 0
        and ROWS.value % (q.shape[1] // num_kv_heads) == 0
        and q.stride(0) % 8 == q.stride(1) % 8 == q.data_ptr() % 16 == 0
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
        heads_at_once(num_items, num_kv_heads, width),
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        num_warps=4,
        **dependent(),
    )
    return out


def heads_at_once(num_items: int, num_kv_heads: int, width: int) -> int:
    """KV heads whose items programs take together: few, but enough to give each program some of them."""
    heads = num_kv_heads
    while heads % 2 == 0 and num_items * heads >= 2 * MIN_ROUNDS * width * num_kv_heads:
        heads //= 2
    return heads


def boxes_of(x: Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor for copies by the TMA unit, in lines of 128 bytes, as the tensor cores want them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.itemsize, rank=len(box))
    return TensorDescriptor.from_tensor(x, box, layout)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
