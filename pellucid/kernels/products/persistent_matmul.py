# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917, SIM102
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""act(gate) * up on Hopper GPUs for the many rows of prompts, y = x W^T with W = [gate; up], in one product.

A program a multiprocessor goes from tile to tile, of 128 or 192 rows and 256 outputs: a group of four warps
multiplies 64 rows with all outputs, while steps of x and W are copied by the TMA unit as far ahead as there
is room, across tiles.  Tiles of a band of rows are computed side by side, block of outputs by block: its rows
and the weights of the moment stay in the L2 cache.  How a row is summed up depends on nothing but its inputs,
so it has the same bits in any company and with any tile.  The reference is `silu_mul_ref` of a product.

Energy is what counts: in a long prompt the GPU runs at its power limit, and what a product saves of traffic
it gains in clocks.  Tiles are therefore as large as the registers allow, and only products of gates leave the
chip.  Gates and what they open lie eight by eight in a tile: a thread holds both, and gates without asking.

On an H200 with 24,576 outputs and 4,096 inputs, in brackets the library's product and the kernel that gates:
16,384 rows take 4.85 ms (5.15), 680 TFLOP/s, when there are seconds of them, and 4.02 (4.29) in a burst;
2,048 take 530 us (566), 1,024 283 (302).  With 6,144 outputs and 1,024 inputs, 16,384 rows take 291 us (350)
and 2,048 45 (53).

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

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

from pellucid.kernels.attention.hopper_prefill import barrier, boxes_of, copy_box, num_multiprocessors
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.pointwise.silu_mul import gate
from pellucid.kernels.products.hopper_matmul import EIGHT, LINE_BYTES, pairs_of, rounded, seen_as
from pellucid.kernels.products.tiles import Persistent

ROWS = gl.constexpr(64)  # that a group of warps multiplies
OUTS = gl.constexpr(256)  # of a tile
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
LOG2E = gl.constexpr(1.4426950408889634)


def persistent_matmul(x: Tensor, weight: Tensor, out: Tensor, tile: Persistent, *, act: str) -> Tensor:
    """x [M, K] W^T into out [M, N], or [M, N / 2] with an act, for what `hopper_multiplies`."""
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    assert weight.shape == (num_out, num_in) and out.shape == (num_rows, num_out // 2), weight.shape
    assert out.is_contiguous() and weight.is_contiguous()
    step = LINE_BYTES.value // x.itemsize
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, OUTS.value)
    persistent_matmul_kernel[(min(num_tiles, num_multiprocessors(x.device)),)](
        boxes_of(x, [ROWS.value, step]),
        pairs_of(weight, OUTS.value, step),
        boxes_of(out, [ROWS.value, OUTS.value // 4]),
        num_rows,
        num_out,
        num_in,
        tile.band,
        GROUPS=tile.rows // ROWS.value,
        STAGES=4 if tile.rows == 128 else 3,
        STEP=step,
        ACT=act,
        num_warps=4,
        **dependent(),
    )
    return out


@gluon.jit
def num_tiles(sizes, GROUPS: gl.constexpr):
    """Of all programs."""
    num_rows, num_out, _, _ = sizes
    return gl.cdiv(num_rows, GROUPS * ROWS) * gl.cdiv(num_out, OUTS)


@gluon.jit
def place_of(tile, sizes, GROUPS: gl.constexpr):
    """(first row, block of outputs) of a tile: band by band, each block by block.  Behind the last, any."""
    num_rows, num_out, _, band = sizes
    height, width = gl.cdiv(num_rows, GROUPS * ROWS), gl.cdiv(num_out, OUTS)
    first = tile // (band * width) * band
    place = tile - first * width
    band = gl.maximum(gl.minimum(band, height - first), 1)
    return (first + place % band) * (GROUPS * ROWS), place // band


@gluon.jit
def first_step(sizes, GROUPS: gl.constexpr):
    """What is to be copied first: (tile, its first row, its block of outputs, input)."""
    tile = gl.program_id(0)
    row, block = place_of(tile, sizes, GROUPS)
    return tile, row, block, 0


@gluon.jit
def copy_step(number, what, operands, sizes, GROUPS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr):
    """Copy a step of this program, once there is room, if there is such a step.  Returns what is the next."""
    x, weight, x_parts, w_parts, bars = operands
    _, _, num_in, _ = sizes
    tile, row, block, k = what
    stage, is_step = number % STAGES, tile < num_tiles(sizes, GROUPS)
    full, w_part = bars.index(stage), w_parts.index(stage)
    mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1, pred=is_step)
    mbarrier.expect(full, (GROUPS * ROWS + OUTS) * LINE_BYTES, pred=is_step)
    for group in gl.static_range(GROUPS):
        copy_box(x, [row + group * ROWS, k], full, x_parts.index(group * STAGES + stage), pred=is_step)
    copy_box(weight, [block * (OUTS // 2 // EIGHT), 0, 0, k], full, w_part, pred=is_step)
    k += STEP
    if k >= num_in:
        k = 0
        tile += gl.num_programs(0)
        row, block = place_of(tile, sizes, GROUPS)
    return tile, row, block, k


@gluon.jit
def copy_tiles(operands, sizes, GROUPS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr):
    """The copying warp, where there is one."""
    _, _, num_in, _ = sizes
    what, number = first_step(sizes, GROUPS), 0
    for _tile in range(gl.program_id(0), num_tiles(sizes, GROUPS), gl.num_programs(0)):
        for _k in range(0, num_in, STEP):
            what = copy_step(number, what, operands, sizes, GROUPS, STAGES, STEP)
            number += 1


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, operands, out, rooms, sizes,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps: its rows of all tiles of this program."""
    _, _, x_parts, w_parts, bars = operands
    _, _, num_in, _ = sizes
    # A warp that copies would leave three groups too few registers.
    COPIES: gl.constexpr = GROUPS == 3 and GROUP == 0
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTS, STEP // 4])
    w_tiles = seen_as(w_parts, w_parts.dtype, STAGES, OUTS, STEP)
    if COPIES:
        what = first_step(sizes, GROUPS)
        for i in range(STAGES):
            what = copy_step(i, what, operands, sizes, GROUPS, STAGES, STEP)
    number = 0  # of a step, among all of this program
    for tile in range(gl.program_id(0), num_tiles(sizes, GROUPS), gl.num_programs(0)):
        row, block = place_of(tile, sizes, GROUPS)
        y = gl.zeros([ROWS, OUTS], gl.float32, PRODUCT)
        for k in range(0, num_in, STEP):
            stage = number % STAGES
            mbarrier.wait(bars.index(stage), number // STAGES & 1)
            x_part, w_tile = x_parts.index(GROUP * STAGES + stage), w_tiles.index(stage)
            y = warpgroup_mma(x_part, w_tile.permute((1, 0)), y, is_async=True)
            y = warpgroup_mma_wait(1, deps=[y])
            mbarrier.arrive(bars.index(STAGES + (number + STAGES - 1) % STAGES), pred=k > 0)
            if COPIES:
                if k > 0:
                    what = copy_step(number + STAGES - 1, what, operands, sizes, GROUPS, STAGES, STEP)
            number += 1
        y = warpgroup_mma_wait(0, deps=[y])
        mbarrier.arrive(bars.index(STAGES + (number + STAGES - 1) % STAGES))
        if COPIES:
            what = copy_step(number + STAGES - 1, what, operands, sizes, GROUPS, STAGES, STEP)
        store_result(y, row + GROUP * ROWS, block, out, rooms, GROUP, ACT)
    tma.store_wait(0)


@gluon.jit
def store_result(y, row, block, out, rooms, GROUP: gl.constexpr, ACT: gl.constexpr):
    """Round y [ROWS, OUTS], gate, store; one half after the other, for want of registers."""
    y = rounded(y, out.dtype).reshape([ROWS, 2, OUTS // 2]).permute((0, 2, 1)).split()
    # The TMA unit may still read what it stores of the tile before.
    tma.store_wait(0)
    barrier()
    for i in gl.static_range(2):
        opening, up = y[i].reshape([ROWS, OUTS // 32, 2, EIGHT]).permute((0, 1, 3, 2)).split()
        room = rooms.index(2 * GROUP + i)
        room.store(gate_fast(opening, up, ACT).reshape([ROWS, OUTS // 4]))
        fence_async_shared()
        barrier()
        store_box(out, [row, (2 * block + i) * (OUTS // 4)], room)


@gluon.jit
def gate_fast(opening, up, ACT: gl.constexpr):
    """gate, by the reciprocal, which errs in the last bit: a division would take as long as all else."""
    if ACT == "silu":
        x = opening.to(gl.float32)
        power = gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * -LOG2E], dtype=gl.float32, is_pure=True, pack=1
        )
        logistic = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + power], dtype=gl.float32, is_pure=True, pack=1
        )
        return rounded(x * logistic, opening.dtype) * up
    else:
        return gate(opening, up, ACT)


@gluon.jit(do_not_specialize=["num_rows", "band"])
def persistent_matmul_kernel(
    x,  # descriptor of [M, K], in boxes [ROWS, STEP]
    weight,  # descriptor of [N, K], see `pairs_of`
    out,  # descriptor of [M, N / 2], in boxes [ROWS, OUTS / 4]
    num_rows,
    num_out,
    num_in,
    band,  # tiles of rows
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    STEP: gl.constexpr,
    ACT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One program a multiprocessor."""
    let_next_start(DEPENDENT)
    x_parts = gl.allocate_shared_memory(x.dtype, [GROUPS * STAGES, ROWS, STEP], x.layout)
    w_parts = gl.allocate_shared_memory(x.dtype, [STAGES, OUTS // 2 // EIGHT, 2, EIGHT, STEP], weight.layout)
    rooms = gl.allocate_shared_memory(out.dtype, [2 * GROUPS, ROWS, OUTS // 4], out.layout)
    # First those that say "full", then those that say "empty".
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=GROUPS)
    fence_async_shared()
    wait(DEPENDENT)
    operands, sizes = (x, weight, x_parts, w_parts, bars), (num_rows, num_out, num_in, band)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_tiles, (gl.constexpr(0), operands, out, rooms, sizes, GROUPS, STAGES, STEP, ACT)),
                (multiply_tiles, (gl.constexpr(1), operands, out, rooms, sizes, GROUPS, STAGES, STEP, ACT)),
                (copy_tiles, (operands, sizes, GROUPS, STAGES, STEP)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (gl.constexpr(0), operands, out, rooms, sizes, GROUPS, STAGES, STEP, ACT)),
                (multiply_tiles, (gl.constexpr(1), operands, out, rooms, sizes, GROUPS, STAGES, STEP, ACT)),
                (multiply_tiles, (gl.constexpr(2), operands, out, rooms, sizes, GROUPS, STAGES, STEP, ACT)),
            ],
            [4, 4],
            [168, 168],
        )
