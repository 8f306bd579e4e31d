# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""y = x W^T on Hopper GPUs for the many rows of prompts, gated on the way out.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
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
from pellucid.kernels.hopper_matmul import EIGHT, LINE_BYTES, rounded, seen_as
from pellucid.kernels.hopper_prefill import barrier, boxes_of, copy_box, num_multiprocessors
from pellucid.kernels.silu_mul import gate

LINES = gl.constexpr(64)  # rows that a group of warps multiplies
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def prompt_matmul(
    x: Tensor, weight: Tensor, out: Tensor, *, act: str | None = None, groups=2, stages=4, outs=256, band=16, lag=0, direct=False, copier=0
) -> Tensor:
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    width = num_out // 2 if act else num_out
    assert weight.shape == (num_out, num_in) and out.shape == (num_rows, width), (weight.shape, out.shape)
    assert out.is_contiguous() and weight.is_contiguous()
    step = LINE_BYTES.value // x.itemsize
    tiles = triton.cdiv(num_rows, groups * LINES.value) * triton.cdiv(num_out, outs)
    grid = (min(tiles, num_multiprocessors(x.device)),)
    prompt_matmul_kernel[grid](
        boxes_of(x, [LINES.value, step]),
        pairs_of(weight, outs, step) if act else boxes_of(weight, [outs, step]),
        boxes_of(out, [LINES.value, outs // 2]),
        out,
        num_rows,
        num_out,
        num_in,
        band,
        GROUPS=groups,
        OUTS=outs,
        STAGES=stages,
        STEP=step,
        LAG=lag,
        ACT=act,
        DIRECT=direct,
        COPIER=copier,
        num_warps=4,
        **dependent(),
    )
    return out


def pairs_of(weight: Tensor, outs: int, step: int) -> TensorDescriptor:
    """W = [gate; up] in boxes of `outs` lines, eight of gates and eight of what they open by turns."""
    hidden, num_in = len(weight) // 2, weight.shape[1]
    eight = EIGHT.value
    layout = gl.NVMMASharedLayout(128, 8 * weight.itemsize, 4)
    shape, strides = [hidden // eight, 2, eight, num_in], [eight * num_in, hidden * num_in, num_in, 1]
    return TensorDescriptor(weight, shape, strides, [outs // 2 // eight, 2, eight, step], layout)


@gluon.jit
def num_tiles(sizes, GROUPS: gl.constexpr, OUTS: gl.constexpr):
    num_rows, num_out, _, _ = sizes
    return (num_rows + GROUPS * LINES - 1) // (GROUPS * LINES) * ((num_out + OUTS - 1) // OUTS)


@gluon.jit
def place_of(tile, sizes, GROUPS: gl.constexpr, OUTS: gl.constexpr):
    """(first row, block of outputs) of a tile: bands of rows one after another, in each all outputs."""
    num_rows, num_out, _, band = sizes
    height, width = (num_rows + GROUPS * LINES - 1) // (GROUPS * LINES), (num_out + OUTS - 1) // OUTS
    first = tile // (band * width) * band
    in_band = gl.minimum(height - first, band)
    place = tile % (band * width)
    return (first + place % in_band) * (GROUPS * LINES), place // in_band


@gluon.jit
def copy_step(
    step, row, block, k, operands, is_step,
    GROUPS: gl.constexpr, OUTS: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Copy a step of a tile once there is room."""
    x, weight, x_parts, w_parts, bars = operands
    stage = step % STAGES
    full, w_part = bars.index(stage), w_parts.index(stage)
    mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1, pred=is_step)
    mbarrier.expect(full, (GROUPS * LINES + OUTS) * LINE_BYTES, pred=is_step)
    for group in gl.static_range(GROUPS):
        copy_box(x, [row + group * LINES, k], full, x_parts.index(group * STAGES + stage), pred=is_step)
    if ACT is None:
        copy_box(weight, [block * OUTS, k], full, w_part, pred=is_step)
    else:
        copy_box(weight, [block * (OUTS // 2 // EIGHT), 0, 0, k], full, w_part, pred=is_step)


@gluon.jit
def copy_tiles(
    operands, sizes,
    GROUPS: gl.constexpr, OUTS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    _, _, num_in, _ = sizes
    step = 0
    for tile in range(gl.program_id(0), num_tiles(sizes, GROUPS, OUTS), gl.num_programs(0)):
        row, block = place_of(tile, sizes, GROUPS, OUTS)
        for k in range(0, num_in, STEP):
            copy_step(step, row, block, k, operands, True, GROUPS, OUTS, STAGES, ACT)
            step += 1


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, operands, out, out_ptr, rooms, sizes,
    GROUPS: gl.constexpr, OUTS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr,
    LAG: gl.constexpr, ACT: gl.constexpr, DIRECT: gl.constexpr, COPIER: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps."""
    x, weight, x_parts, w_parts, bars = operands
    num_rows, num_out, num_in, _ = sizes
    w_tiles = seen_as(w_parts, w_parts.dtype, STAGES, OUTS, STEP)
    if not DIRECT:
        room = rooms.index(GROUP)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTS, 16])
    HALF: gl.constexpr = OUTS // 2
    num_steps = (num_in + STEP - 1) // STEP
    step = 0
    # A warp that copies would leave three groups too few registers.
    COPIES: gl.constexpr = GROUPS == 3 and GROUP == COPIER
    if COPIES:
        next_tile = gl.program_id(0)
        next_row, next_block = place_of(next_tile, sizes, GROUPS, OUTS)
        for i in gl.static_range(STAGES):
            copy_step(i, next_row, next_block, i * STEP, operands, True, GROUPS, OUTS, STAGES, ACT)
        next_k = STAGES * STEP
    if LAG > 0 and GROUP > 0:
        mbarrier.wait(bars.index(2 * STAGES + GROUP), 0)
    for tile in range(gl.program_id(0), num_tiles(sizes, GROUPS, OUTS), gl.num_programs(0)):
        row, block = place_of(tile, sizes, GROUPS, OUTS)
        y = gl.zeros([LINES, OUTS], gl.float32, PRODUCT)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(bars.index(stage), step // STAGES & 1)
            y = warpgroup_mma(
                x_parts.index(GROUP * STAGES + stage), w_tiles.index(stage).permute((1, 0)), y, is_async=True
            )
            y = warpgroup_mma_wait(1, deps=[y])
            mbarrier.arrive(bars.index(STAGES + (step + STAGES - 1) % STAGES), pred=k > 0)
            if LAG > 0 and GROUP + 1 < GROUPS:
                mbarrier.arrive(bars.index(2 * STAGES + GROUP + 1), pred=step == LAG)
            if COPIES:
                if k > 0:
                    more = next_tile < num_tiles(sizes, GROUPS, OUTS)
                    copy_step(step + STAGES - 1, next_row, next_block, next_k, operands, more, GROUPS, OUTS, STAGES, ACT)
                    next_k += STEP
                    if next_k >= num_in:
                        next_k = 0
                        next_tile += gl.num_programs(0)
                        next_row, next_block = place_of(next_tile, sizes, GROUPS, OUTS)
            step += 1
        y = warpgroup_mma_wait(0, deps=[y])
        mbarrier.arrive(bars.index(STAGES + (step + STAGES - 1) % STAGES))
        if COPIES:
            more = next_tile < num_tiles(sizes, GROUPS, OUTS)
            copy_step(step + STAGES - 1, next_row, next_block, next_k, operands, more, GROUPS, OUTS, STAGES, ACT)
            next_k += STEP
            if next_k >= num_in:
                next_k = 0
                next_tile += gl.num_programs(0)
                next_row, next_block = place_of(next_tile, sizes, GROUPS, OUTS)
        y = rounded(y, out.dtype)
        if ACT is None:
            left, right = y.reshape([LINES, 2, HALF]).permute((0, 2, 1)).split()
            if DIRECT:
                store_direct(left, out_ptr, row + GROUP * LINES, block * OUTS, num_rows, num_out)
                store_direct(right, out_ptr, row + GROUP * LINES, block * OUTS + HALF, num_rows, num_out)
            else:
                store_half(left, room, out, row + GROUP * LINES, block * OUTS)
                store_half(right, room, out, row + GROUP * LINES, block * OUTS + HALF)
        else:
            if DIRECT:
                left, right = y.reshape([LINES, 2, HALF]).permute((0, 2, 1)).split()
                left, left2 = left.reshape([LINES, 2, HALF // 2]).permute((0, 2, 1)).split()
                store_direct(gate_pairs(left, ACT), out_ptr, row + GROUP * LINES, block * HALF, num_rows, num_out // 2)
                store_direct(gate_pairs(left2, ACT), out_ptr, row + GROUP * LINES, block * HALF + HALF // 4, num_rows, num_out // 2)
                right, right2 = right.reshape([LINES, 2, HALF // 2]).permute((0, 2, 1)).split()
                store_direct(gate_pairs(right, ACT), out_ptr, row + GROUP * LINES, block * HALF + HALF // 2, num_rows, num_out // 2)
                store_direct(gate_pairs(right2, ACT), out_ptr, row + GROUP * LINES, block * HALF + HALF // 4 * 3, num_rows, num_out // 2)
            else:
                opening, up = y.reshape([LINES, OUTS // 16, 2, EIGHT]).permute((0, 1, 3, 2)).split()
                store_half(gate(opening, up, ACT).reshape([LINES, HALF]), room, out, row + GROUP * LINES, block * HALF)
    if not DIRECT:
        tma.store_wait(0)


@gluon.jit
def gate_pairs(y, ACT: gl.constexpr):
    opening, up = y.reshape([LINES, y.shape[1] // 16, 2, EIGHT]).permute((0, 1, 3, 2)).split()
    return gate_fast(opening, up, ACT).reshape([LINES, y.shape[1] // 2])


@gluon.jit
def gate_fast(opening, up, ACT: gl.constexpr):
    if ACT == "silu":
        z = opening.to(gl.float32)
        e = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [z * -1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1)
        r = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], dtype=gl.float32, is_pure=True, pack=1)
        return rounded(z * r, opening.dtype) * up
    else:
        return gate(opening, up, ACT)


@gluon.jit
def store_direct(y, out_ptr, row, n, num_rows, width):
    m = row + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))[:, None]
    n += gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))[None, :]
    gl.store(out_ptr + m.to(gl.int64) * width + n, y, mask=(m < num_rows) & (n < width))


@gluon.jit
def store_half(y, room, out, row, n):
    """Store by the TMA unit, which leaves out what lies beyond."""
    tma.store_wait(0)
    barrier()
    room.store(y)
    fence_async_shared()
    barrier()
    store_box(out, [row, n], room)


@gluon.jit(do_not_specialize=["num_rows", "band"])
def prompt_matmul_kernel(
    x,  # descriptor of [M, K], in boxes [LINES, STEP]
    weight,  # descriptor of [N, K], in boxes [OUTS, STEP], or see `pairs_of`
    out,  # descriptor
    out_ptr,
    num_rows,
    num_out,
    num_in,
    band,
    GROUPS: gl.constexpr,
    OUTS: gl.constexpr,
    STAGES: gl.constexpr,
    STEP: gl.constexpr,
    LAG: gl.constexpr,
    ACT: gl.constexpr,
    DIRECT: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One program a multiprocessor."""
    let_next_start(DEPENDENT)
    x_parts = gl.allocate_shared_memory(x.dtype, [GROUPS * STAGES, LINES, STEP], x.layout)
    if ACT is None:
        w_parts = gl.allocate_shared_memory(x.dtype, [STAGES, OUTS, STEP], weight.layout)
    else:
        w_parts = gl.allocate_shared_memory(x.dtype, [STAGES, OUTS // 16, 2, EIGHT, STEP], weight.layout)
    if not DIRECT:
        rooms = gl.allocate_shared_memory(out.dtype, [GROUPS, LINES, OUTS // 2], out.layout)
    else:
        rooms = x_parts
    # First those that say "full", then those that say "empty".
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(bars.index(2 * STAGES + i), count=1)
    fence_async_shared()
    wait(DEPENDENT)
    operands, sizes = (x, weight, x_parts, w_parts, bars), (num_rows, num_out, num_in, band)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_tiles, (
                    gl.constexpr(0), operands, out, out_ptr, rooms, sizes, GROUPS, OUTS, STAGES, STEP, LAG, ACT, DIRECT, COPIER,
                )),
                (multiply_tiles, (
                    gl.constexpr(1), operands, out, out_ptr, rooms, sizes, GROUPS, OUTS, STAGES, STEP, LAG, ACT, DIRECT, COPIER,
                )),
                (copy_tiles, (operands, sizes, GROUPS, OUTS, STAGES, STEP, ACT)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (
                    gl.constexpr(0), operands, out, out_ptr, rooms, sizes, GROUPS, OUTS, STAGES, STEP, LAG, ACT, DIRECT, COPIER,
                )),
                (multiply_tiles, (
                    gl.constexpr(1), operands, out, out_ptr, rooms, sizes, GROUPS, OUTS, STAGES, STEP, LAG, ACT, DIRECT, COPIER,
                )),
                (multiply_tiles, (
                    gl.constexpr(2), operands, out, out_ptr, rooms, sizes, GROUPS, OUTS, STAGES, STEP, LAG, ACT, DIRECT, COPIER,
                )),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
