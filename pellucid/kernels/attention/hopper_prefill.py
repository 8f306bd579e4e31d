# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0915, PLR0917, SIM102
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOptionalCall=false
"""Causal attention of prompt chunks on Hopper GPUs: copies, products and softmax each at their own pace.

Nine warps a program, one program a multiprocessor.  One warp copies queries and pages of keys and values by
the TMA unit, as far ahead as there is room.  Two groups of four warps multiply, each with queries of its own
and both with the same keys.  A group's products and its softmax overlap: it makes one tile's weights while
the next tile's keys are multiplied, and finds that tile's maximum while the values of the one are; what
remains of the tensor cores the other group has.  Programs go from item to item, a tile of queries and a KV
head each, as prefill_plan.py has planned, so that what an item needs is copied while the one before it ends.
Where items are few, programs share some: each gives what it has made of its keys to the program with the
newest ones, by way of memory.  A group of heads that is no power of two is attended with as if it were: the
heads beyond it cost time and are not written.

Keys are taken from the newest to the oldest: what the diagonal hides lies in the first tile or two, what a
window hides in the last; tiles that no query's window shows are in no plan.  A sink's weight is added to
those of keys when an item ends.  The reference is `paged_attention_ref`.

Reaches on an H200, bfloat16, head dim 128, 32 heads on 8: 549 TFLOP/s for a prompt of 8,192 tokens, 512 for
four of 2,048 and 348 for sixteen of 512; 543 for 2,048 tokens behind 6,144 (benchmarks/kernels.py); with 16
heads on 8 546, 494, 313 and 499.

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

from pellucid.kernels.attention.paged_attention import LOG2_E as LOG2_E_NUMBER
from pellucid.kernels.attention.paged_attention import PagedRows, hopper_refusal, padded_heads
from pellucid.kernels.attention.prefill_plan import (
    BEGIN_AT,
    END_AT,
    FLAGS_AT,
    HEAD_AT,
    KEYS,
    LENGTH_AT,
    PARTS_AT,
    POSITION_AT,
    PROGRAM_FIELDS,
    QUERIES_AT,
    SEGMENT_FIELDS,
    TOKEN_AT,
    PromptTiles,
    room_for_parts,
)
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.platform import platform_of

ROWS = gl.constexpr(64)  # packed rows of a group of warps: queries times heads
PART = gl.constexpr(64)  # keys of a copy, and numbers of a head: what swizzled lines of 128 bytes hold
K_STAGES = gl.constexpr(2)  # tiles of keys on their way or in use
V_STAGES = gl.constexpr(3)  # tiles of values: each is in use for longer
GROUPS = gl.constexpr(2)
LOG2_E = gl.constexpr(LOG2_E_NUMBER)

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
def work_of(plan_ptr):
    """This program's (first segment, a pointer; number of segments)."""
    at = plan_ptr + gl.program_id(0) * PROGRAM_FIELDS
    return plan_ptr + gl.load(at), gl.load(at + 1)


@gluon.jit
def lines_of(
    tile, row, kv_head, num_keys, oldest, block_table_ptr, block_table_stride,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Where both parts of a tile of keys begin among the lines of the cache.

    Behind the last key there may be no page, nor before the oldest one that a window shows: its place takes
    another, which is hidden.
    """
    pages = block_table_ptr + row.to(gl.int64) * block_table_stride
    key = gl.maximum(tile, 0) * KEYS
    other = gl.minimum(gl.maximum(key + PART, oldest), (num_keys - 1) // PART * PART)
    key = gl.maximum(key, oldest)
    page, other_page = gl.load(pages + key // BLOCK_SIZE), gl.load(pages + other // BLOCK_SIZE)
    line = (page * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
    return line, (other_page * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + other % BLOCK_SIZE


@gluon.jit
def copy_tile(lines, line, other, parts, bars, step, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    """Copy a tile of keys or values, once there is room."""
    SPLITS: gl.constexpr = HEAD_DIM // PART
    stage, phase = step % STAGES, step // STAGES & 1
    full, empty = bars
    full = full.index(stage)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full, KEYS * HEAD_DIM * 2)
    for split in gl.static_range(SPLITS):
        at = (stage * SPLITS + split) * 2
        copy_box(lines, [line, split * PART], full, parts.index(at))
        copy_box(lines, [other, split * PART], full, parts.index(at + 1))


@gluon.jit
def copy_tiles(
    parts, bars, plan_ptr, queries, lines, block_table_ptr, block_table_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The copying warp: all tiles of this program, in the order in which they are used."""
    SPLITS: gl.constexpr = HEAD_DIM // PART
    QUERIES: gl.constexpr = ROWS // HEADS
    VALUES: gl.constexpr = NUM_KV_HEADS * BLOCK_SIZE  # lines from a page's keys to its values
    q_parts, k_parts, v_parts = parts
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    segment, rounds = work_of(plan_ptr)
    step = 0
    # Loads run ahead, since nothing else hides them.
    row, kv_head, first_token, num_keys, oldest, begin, end = what_to_copy(segment, WINDOW)
    line, other = lines_of(
        end - 1, row, kv_head, num_keys, oldest, block_table_ptr, block_table_stride,
        NUM_KV_HEADS, BLOCK_SIZE,
    )  # fmt: skip
    for round in range(rounds):
        segment += gl.where(round + 1 < rounds, SEGMENT_FIELDS, 0)
        next_row, next_head, next_token, next_keys, next_oldest, next_begin, next_end = what_to_copy(
            segment, WINDOW
        )
        buffer = round % 2
        mbarrier.wait(q_empty.index(buffer), (round // 2 & 1) ^ 1)
        mbarrier.expect(q_full.index(buffer), GROUPS * ROWS * HEAD_DIM * 2)
        for group in gl.static_range(GROUPS):
            for split in gl.static_range(SPLITS):
                copy_box(
                    queries,
                    [first_token + group * QUERIES, kv_head * GROUP_SIZE, split * PART],
                    q_full.index(buffer),
                    q_parts.index((buffer * GROUPS + group) * SPLITS + split),
                )
        for tile in range(end - 1, begin - 1, -1):
            next_line, next_other = lines_of(
                tile - 1, row, kv_head, num_keys, oldest, block_table_ptr, block_table_stride,
                NUM_KV_HEADS, BLOCK_SIZE,
            )  # fmt: skip
            copy_tile(lines, line, other, k_parts, (k_full, k_empty), step, HEAD_DIM, K_STAGES)
            copy_tile(
                lines, line + VALUES, other + VALUES, v_parts, (v_full, v_empty), step, HEAD_DIM, V_STAGES
            )
            line, other = next_line, next_other
            step += 1
        row, kv_head, first_token, num_keys = next_row, next_head, next_token, next_keys
        oldest, begin, end = next_oldest, next_begin, next_end
        line, other = lines_of(
            end - 1, row, kv_head, num_keys, oldest, block_table_ptr, block_table_stride,
            NUM_KV_HEADS, BLOCK_SIZE,
        )  # fmt: skip


@gluon.jit
def what_to_copy(segment, WINDOW: gl.constexpr):
    """Of a segment: row, KV head, first token, what its last query sees, the oldest part, its range of tiles.

    The oldest part of keys is the one with the oldest key that its first query sees.
    """
    position = gl.load(segment + POSITION_AT)
    num_keys = gl.load(segment + QUERIES_AT) + position
    oldest = position * 0
    if WINDOW is not None:
        oldest = gl.maximum(position - WINDOW + 1, 0) // PART * PART
    row, kv_head, first_token = gl.load(segment), gl.load(segment + HEAD_AT), gl.load(segment + TOKEN_AT)
    begin, end = gl.load(segment + BEGIN_AT), gl.load(segment + END_AT)
    return row, kv_head, first_token, num_keys, oldest, begin, end


@gluon.jit
def what_to_attend(segment, is_there):
    """Of a segment: position of the first query, tokens of the row, number of its tiles, end of the newest.

    Behind the last segment there is a tile for nobody.
    """
    position = gl.load(segment + POSITION_AT, mask=is_there, other=0)
    seq_len = gl.load(segment + LENGTH_AT, mask=is_there, other=0)
    begin, end = (
        gl.load(segment + BEGIN_AT, mask=is_there, other=0),
        gl.load(segment + END_AT, mask=is_there, other=1),
    )
    return position, seq_len, end - begin, end * KEYS


@gluon.jit
def attend_tiles(
    tiles, bars, plan_ptr, room_ptr, v_parts, sinks_ptr, out_ptr, out_token_stride, scale, v_scale,
    GROUP: gl.constexpr, GROUP_SIZE: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps: its half of the queries of all tiles of this program.

    In each step weights are made of one tile's scores while the next tile's keys are multiplied, and the next
    tile's maximum is found while the values of the one are.  So a segment ends in the first step of the next
    one, and behind the last one comes a step for nobody.
    """
    QUERIES: gl.constexpr = ROWS // HEADS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    query = GROUP * QUERIES + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // HEADS
    segment, rounds = work_of(plan_ptr)
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    exponents = none
    accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, RESULT)
    maximum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    total, shrink = maximum, maximum
    step = 0
    previous = 0  # tile of the segment
    for round in range(rounds + 1):
        more = round < rounds
        first_position, seq_len, num_tiles, end = what_to_attend(segment, more)
        buffer = round % 2
        q = q_tiles.index(buffer * GROUPS + GROUP)
        position = first_position + query
        seen_by_all = first_position + GROUP * QUERIES + 1
        mbarrier.wait(q_full.index(buffer), round // 2 & 1, pred=more)
        for tile in range(num_tiles):
            start = end - (tile + 1) * KEYS
            is_first = tile == 0
            stage, before = step % K_STAGES, (step + V_STAGES - 1) % V_STAGES
            mbarrier.wait(k_full.index(stage), step // K_STAGES & 1, pred=more)
            mbarrier.wait(v_full.index(before), (step - 1) // V_STAGES & 1, pred=step > 0)
            keys, values = k_tiles.index(stage).permute((1, 0)), v_tiles.index(before)
            scores = warpgroup_mma(q, keys, none, use_acc=False, is_async=True)
            weights = gl.exp2(exponents)
            total = total * shrink + gl.sum(weights, 1)
            weights = gl.convert_layout(weights.to(values.dtype), OPERAND)
            sum = warpgroup_mma(weights, values, accumulator, use_acc=previous > 0, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), pred=more)
            if start + KEYS > seen_by_all:
                key = start + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
                scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            if WINDOW is not None:
                if start + WINDOW < first_position + (GROUP + 1) * QUERIES:
                    key = start + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
                    scores = gl.where(key[None, :] + WINDOW > position[:, None], scores, float("-inf"))
            ended_maximum = maximum
            # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
            maximum = gl.where(is_first, -1.0e30, maximum)
            higher = gl.maximum(maximum, gl.max(scores, 1))
            shrink = gl.exp2((maximum - higher) * scale)
            exponents = scores * scale - (higher * scale)[:, None]
            maximum = higher
            accumulator, weights = warpgroup_mma_wait(0, deps=[sum, weights])
            mbarrier.arrive(v_empty.index(before), pred=step > 0)
            if is_first:
                if round > 0:
                    ended, empty = segment - SEGMENT_FIELDS, q_empty.index(1 - buffer)
                    parts = gl.load(ended + PARTS_AT)
                    if parts < 0:
                        give(accumulator, ended_maximum, total, -1 - parts, plan_ptr, room_ptr, GROUP)
                        mbarrier.arrive(empty)
                    else:
                        if parts > 0:
                            accumulator, ended_maximum, total = take(
                                accumulator, ended_maximum, total, parts, plan_ptr, room_ptr, scale, GROUP
                            )  # fmt: skip
                            exponents = none  # who takes has ended: nobody needs them
                        if sinks_ptr is not None:
                            total += sink_weights(sinks_ptr, ended, ended_maximum * scale, GROUP_SIZE, HEADS)
                        write(
                            accumulator, v_scale / total, q_tiles.index((1 - buffer) * GROUPS + GROUP), empty,
                            ended, out_ptr, out_token_stride, GROUP, GROUP_SIZE, HEADS, HEAD_DIM,
                        )  # fmt: skip
                if more & (seq_len - start < KEYS):
                    mbarrier.wait(v_full.index(step % V_STAGES), step // V_STAGES & 1)
                    num_first = seq_len - start
                    if WINDOW is not None:
                        oldest = gl.maximum(first_position - WINDOW + 1, 0) // PART * PART
                        num_first -= gl.where(start < oldest, PART, 0)  # whose place has the next part
                    clear(v_parts, step % V_STAGES, num_first, seq_len - start, HEAD_DIM)
            total = gl.where(is_first, 0.0, total)
            accumulator = accumulator * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
            previous = tile
            step += 1
        segment += SEGMENT_FIELDS


@gluon.jit
def give(result, maximum, total, program, plan_ptr, room_ptr, GROUP: gl.constexpr):
    """Leave a program's part of an item, maxima and sums of weights [ROWS] to the one that takes it."""
    numbers, statistics = room_of(program, room_ptr, GROUP, result.shape[1])
    gl.store(numbers, in_fragments(result, result.shape[1]))
    gl.store(statistics, maximum)
    gl.store(statistics + ROWS, total)
    # All of this group's threads have stored before one of them reports.
    barrier()
    gl.atomic_add(plan_ptr + program * PROGRAM_FIELDS + FLAGS_AT + GROUP, 1, sem="release")


@gluon.jit
def take(result, maximum, total, num_parts, plan_ptr, room_ptr, scale, GROUP: gl.constexpr):
    """A part of an item with those that programs before this one give: (values, maxima, weights)."""
    RESULT: gl.constexpr = result.type.layout
    for i in range(num_parts):
        program = gl.program_id(0) - 1 - i
        numbers, statistics = room_of(program, room_ptr, GROUP, result.shape[1])
        flag = plan_ptr + program * PROGRAM_FIELDS + FLAGS_AT + GROUP
        while gl.atomic_add(flag, 0, sem="acquire") == 0:
            pass
        barrier()
        gl.store(flag, 0)
        others = gl.load(statistics, cache_modifier=".cg")
        weight = gl.load(statistics + ROWS, cache_modifier=".cg")
        part = out_of_fragments(gl.load(numbers, cache_modifier=".cg"), result.shape[1])
        part = gl.convert_layout(part, RESULT, assert_trivial=True)
        higher = gl.maximum(maximum, others)
        mine, theirs = gl.exp2((maximum - higher) * scale), gl.exp2((others - higher) * scale)
        total = total * mine + weight * theirs
        maximum = higher
        mine = gl.convert_layout(mine, gl.SliceLayout(1, RESULT))[:, None]
        theirs = gl.convert_layout(theirs, gl.SliceLayout(1, RESULT))[:, None]
        result = result * mine + part * theirs
    return result, maximum, total


@gluon.jit
def sink_weights(sinks_ptr, segment, maximum, GROUP_SIZE: gl.constexpr, HEADS: gl.constexpr):
    """What each packed row's sink weighs beside keys.  maximum: [ROWS], of scores, to base 2."""
    head = gl.arange(0, ROWS, maximum.type.layout) % HEADS
    kv_head = gl.load(segment + HEAD_AT)
    is_head = head < GROUP_SIZE
    sink = gl.load(sinks_ptr + kv_head * GROUP_SIZE + head, mask=is_head, other=0.0).to(gl.float32)
    return gl.exp2(sink * LOG2_E - maximum)


@gluon.jit
def room_of(program, room_ptr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Where a program leaves a part: (sum of values, in fragments; maxima, and ROWS on sums of weights)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    FRAGMENTS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    WARP: gl.constexpr = ROWS * HEAD_DIM // 4
    part = program * GROUPS + GROUP
    at = part * (4 * WARP) + gl.arange(0, 4, gl.SliceLayout(1, FRAGMENTS))[:, None] * WARP
    at += gl.arange(0, WARP, gl.SliceLayout(0, FRAGMENTS))[None, :]
    statistics = gl.num_programs(0) * (GROUPS * 4 * WARP) + part * (2 * ROWS)
    return room_ptr + at, room_ptr + statistics + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))


@gluon.jit
def in_fragments(y, WIDTH: gl.constexpr):
    """y [64, WIDTH] of the tensor cores as [warps, numbers], of which a thread holds four in a row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    parts = y.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([4, WIDTH * 16])
    return gl.convert_layout(parts, LAYOUT, assert_trivial=True)


@gluon.jit
def out_of_fragments(parts, WIDTH: gl.constexpr):
    """The opposite."""
    return parts.reshape([4, WIDTH // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([ROWS, WIDTH])


@gluon.jit
def write(
    result, factor, by_way_of, empty, segment, out_ptr, out_token_stride,
    GROUP: gl.constexpr, GROUP_SIZE: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Write result [ROWS, HEAD_DIM] times factor [ROWS], by way of where the queries were: thus in lines."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    kv_head, first_token = gl.load(segment + HEAD_AT), gl.load(segment + TOKEN_AT)
    num_queries = gl.load(segment + QUERIES_AT)
    result = result * gl.convert_layout(factor, gl.SliceLayout(1, result.type.layout))[:, None]
    by_way_of.store(result.to(by_way_of.dtype))
    result = by_way_of.load(LINES)
    fence_async_shared()
    mbarrier.arrive(empty)
    packed = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
    query = GROUP * (ROWS // HEADS) + packed // HEADS
    line = (first_token + query).to(gl.int64) * out_token_stride
    line = line + (kv_head * GROUP_SIZE + packed % HEADS) * HEAD_DIM
    is_own = query < num_queries
    if HEADS > GROUP_SIZE:
        is_own = is_own & (packed % HEADS < GROUP_SIZE)
    gl.store(out_ptr + line[:, None] + dim[None, :], result, mask=is_own[:, None])


@gluon.jit
def clear(v_parts, stage, num_first, num_keys, HEAD_DIM: gl.constexpr):
    """Zero values behind the sequence's end, which may be anything, NaN too: a weight of zero silences none.

    num_first: of keys in the first part.  Both groups do so, and write the same.
    """
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SPLITS: gl.constexpr = HEAD_DIM // PART
    for half in gl.static_range(2):
        key = half * PART + gl.arange(0, PART, gl.SliceLayout(1, BLOCKED))
        num = num_first if half == 0 else num_keys
        if num < (half + 1) * PART:
            for split in gl.static_range(SPLITS):
                part = v_parts.index((stage * SPLITS + split) * 2 + half)
                v = part.load(BLOCKED)
                part.store(gl.where((key < num)[:, None], v, gl.zeros_like(v)))
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["block_table_ptr"])
def hopper_prefill_kernel(
    queries,  # descriptor of [T, N, H], in boxes [queries, G, PART]
    lines,  # descriptor of the cache as lines of one token and head, in boxes [PART, PART]
    out_ptr,
    plan_ptr,  # as prefill_plan.py makes it
    room_ptr,  # for what is given: [programs, GROUPS, ROWS * H] and [programs, GROUPS, 2, ROWS]
    block_table_ptr,
    sinks_ptr,  # [N], or None
    scale,
    v_scale,
    out_token_stride,
    block_table_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEADS: gl.constexpr,  # of a tile, GROUP_SIZE or more: the rest are the next KV head's, for nobody
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,  # keys that a query sees at most; None: all before it
    DEPENDENT: gl.constexpr,
):
    """One program a multiprocessor."""
    let_next_start(DEPENDENT)
    SPLITS: gl.constexpr = HEAD_DIM // PART
    dtype: gl.constexpr = lines.dtype
    q_parts = gl.allocate_shared_memory(
        dtype, [2 * GROUPS * SPLITS, ROWS // HEADS, HEADS, PART], queries.layout
    )
    k_parts = gl.allocate_shared_memory(dtype, [K_STAGES * SPLITS * 2, PART, PART], lines.layout)
    v_parts = gl.allocate_shared_memory(dtype, [V_STAGES * SPLITS * 2, PART, PART], lines.layout)
    q_tiles = seen_as(q_parts, 2 * GROUPS, ROWS, HEAD_DIM)
    k_tiles = seen_as(k_parts, K_STAGES, KEYS, HEAD_DIM)
    v_tiles = seen_as(v_parts, V_STAGES, KEYS, HEAD_DIM)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=GROUPS)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    wait(DEPENDENT)
    parts, tiles = (q_parts, k_parts, v_parts), (q_tiles, k_tiles, v_tiles)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (attend_tiles, (
                tiles, bars, plan_ptr, room_ptr, v_parts, sinks_ptr, out_ptr, out_token_stride, scale,
                v_scale, gl.constexpr(0), GROUP_SIZE, HEADS, HEAD_DIM, WINDOW,
            )),
            (attend_tiles, (
                tiles, bars, plan_ptr, room_ptr, v_parts, sinks_ptr, out_ptr, out_token_stride, scale,
                v_scale, gl.constexpr(1), GROUP_SIZE, HEADS, HEAD_DIM, WINDOW,
            )),
            (copy_tiles, (
                parts, bars, plan_ptr, queries, lines, block_table_ptr, block_table_stride,
                NUM_KV_HEADS, GROUP_SIZE, HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def hopper_takes(q: Tensor, kv_cache: Tensor, rows: PagedRows) -> bool:
    """Whether this kernel can attend with q [T, N, H] over this cache."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    return (
        is_hopper(q.device)
        and rows.tree is None
        and hopper_refusal(q.shape[1] // num_kv_heads, head_dim, block_size, q.dtype, kv_cache.dtype) is None
        and q.stride(0) % 8 == q.stride(1) % 8 == q.data_ptr() % 16 == 0
    )


def hopper_prefill(
    q: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    tiles: PromptTiles,
    scale: float,
    v_scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """prefill_attention, for what `hopper_takes`.  scale: to base 2, with that of the keys."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    group_size = q.shape[1] // num_kv_heads
    heads = padded_heads(group_size)
    assert tiles.tile_queries == GROUPS.value * ROWS.value // heads, (tiles.tile_queries, heads)
    width = num_multiprocessors(q.device)
    hopper_prefill_kernel[(width,)](
        boxes_of(q, [ROWS.value // heads, heads, PART.value]),
        boxes_of(kv_cache.view(-1, head_dim), [PART.value, PART.value]),
        out,
        tiles.plan(num_kv_heads, width, window),
        room_for_parts(width * GROUPS.value * ROWS.value * (head_dim + 2), q.device),
        rows.block_table,
        sinks,
        scale,
        v_scale,
        out.stride(0),
        rows.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        num_warps=4,
        **dependent(),
    )
    return out


def boxes_of(x: Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor for copies by the TMA unit, in lines of 128 bytes, as the tensor cores want them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.itemsize, rank=len(box))
    return TensorDescriptor.from_tensor(x, box, layout)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    return platform_of(device).is_hopper
