# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0915, PLR0917, SIM102, SIM300
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""y = x W^T on Hopper GPUs for rows of x that fit one tile of the tensor cores, or a few: about 2 to 512.

A program multiplies up to 192 outputs with up to 256 rows, so that W is read once.  W stands on the left, 64
of its rows for each group of four warps; one warp copies steps of W and x by the TMA unit, as far ahead as
there is room, and W's first steps before the kernel before this one has ended: of few rows, where W's bytes
are all that counts, up to 200 KB on each multiprocessor.  Where outputs are too few for all of them, programs
share a tile and its inputs; each adds up a share of its rows, in a fixed order.
How a row is summed up depends on the tile alone, so rows computed with one tile have the same bits in any
company.  FP8 (e4m3) is multiplied with FP8 as the library does it, in the tensor cores' own precision; where
groups of inputs have scales, each step is scaled and then added up in float32, for any number of rows.  Sums
of INT8 products are exact.
The reference is `small_matmul_ref`.

Gates and what they open lie eight by eight in a tile: then a thread holds both, and gates without asking.

On an H200, in us, beside the library's products and the kernel that gates: a layer of Qwen3-8B without its
attention, norms and all, takes 118 for 128 rows and 157 for 256, where the library takes 127 and 164; one of
Qwen3-0.6B takes 25 and 31, the library 32 and 35.  In FP8 down takes 20 for 128 rows of 8B, the library 34.
Beside split-K: 101 for 5 rows of 8B and 104 for 32, where that takes 108 and 110, a copy of the weights 90;
18 and 20 of 0.6B, where it takes 22.  With scales of 128 inputs down takes 22 for 8 rows, 52 for 256, and
1,228 for 8,192 (672 TFLOP/s).
The loop itself then does what the GPU's power allows, or as few outputs leave to do, what an L2 cache gives
to one multiprocessor: 64 bytes a clock.

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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pellucid.kernels.attention.hopper_prefill import (
    HAS_REINTERPRET,
    barrier,
    boxes_of,
    copy_box,
    in_fragments,
    is_hopper,
    num_multiprocessors,
    out_of_fragments,
)
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.pointwise.silu_mul import gate
from pellucid.kernels.products.small_matmul import Scales, type_of_sums
from pellucid.kernels.products.tiles import Persistent, Wgmma, takes_groups

LINES = gl.constexpr(64)  # of W, that a group of warps multiplies
LINE_BYTES = gl.constexpr(128)  # of a copy: what the tensor cores want swizzled
EIGHT = gl.constexpr(8)  # lines of a core matrix, and gates beside what they open


def hopper_matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Wgmma,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
    act: str | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """small_matmul, with a Wgmma.  arrivals: `num_arrivals` zeros, needed where the inputs are split."""
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    width = num_out // 2 if act else num_out
    assert weight.shape == (num_out, num_in) and out.shape == (num_rows, width), (weight.shape, out.shape)
    assert out.is_contiguous() and weight.is_contiguous()
    assert tile.splits in (1, 2, 4, 8) and 8 * tile.splits <= tile.rows, tile
    assert tile.stages * LINES.value % tile.rows == 0, tile  # a group's lines of W make room for its results
    group = scales.group if scales else None
    assert group is None or takes_groups(tile, group), (tile, group)
    assert x.dtype != torch.int8 or (scales is not None and group is None), "scales are of rows"
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.block_n), tile.splits)
    step = LINE_BYTES.value // x.itemsize
    # Without a step, groups of warps would write before the kernel before this one has ended.
    assert tile.splits <= triton.cdiv(num_in, step), (tile, num_in)
    partial = None
    if tile.splits > 1:
        # Programs wait for one another, so all must find room at once.
        assert num_programs(x, weight, tile) <= num_multiprocessors(x.device), grid
        assert arrivals is not None and len(arrivals) >= num_arrivals(num_out, num_rows, tile)
        size = grid[0] * grid[1] * tile.splits * tile.block_n * tile.rows
        partial = torch.empty(size, dtype=type_of_sums(x), device=x.device)
    hopper_matmul_kernel[grid](
        boxes_of(x, [tile.rows, step]),
        pairs_of(weight, LINES.value, step) if act else boxes_of(weight, [LINES.value, step]),
        bias,
        scales and scales.x.t().contiguous(),
        scales and scales.weight,
        out,
        partial,
        arrivals if tile.splits > 1 else None,
        num_rows,
        num_out,
        num_in,
        SHARED=group,
        ROWS=tile.rows,
        GROUPS=tile.block_n // LINES.value,
        STAGES=tile.stages,
        STEP=step,
        SPLITS=tile.splits,
        ACT=act,
        num_warps=4,
        maxnreg=registers_of(tile, group),
        **dependent(),
    )
    return out


def hopper_multiplies(x: Tensor, weight: Tensor, tile: Wgmma | Persistent, act: str | None) -> bool:
    """Whether this kernel, or persistent_matmul's, can multiply x [M, K] with this weight [N, K]."""
    num_out, num_in = weight.shape
    if not is_hopper(x.device) or x.dtype != weight.dtype or x.itemsize > 2 or x.stride(1) != 1:
        return False
    bytes_apart = (x.data_ptr(), x.stride(0) * x.itemsize, num_in * x.itemsize)
    aligned = not any(each % 16 for each in bytes_apart) and num_out % (16 if act else 8) == 0
    has_room = isinstance(tile, Persistent) or tile.splits == 1
    return aligned and (has_room or num_programs(x, weight, tile) <= num_multiprocessors(x.device))


def registers_of(tile: Wgmma, group: int | None = None) -> int | None:
    """Of a thread, such that a small tile leaves room for the programs of the kernels around."""
    groups = tile.block_n // LINES.value
    most_rows = {1: 128, 2: 32 if group else 128}.get(groups, 0)
    return {1: 128, 2: 96}[groups] if tile.rows <= most_rows else None


def num_programs(x: Tensor, weight: Tensor, tile: Wgmma) -> int:
    """Of a product."""
    return triton.cdiv(len(x), tile.rows) * triton.cdiv(len(weight), tile.block_n) * tile.splits


def num_arrivals(num_out: int, num_rows: int, tile: Wgmma) -> int:
    """Counters that a split tile needs: one for each group of warps."""
    tiles = triton.cdiv(num_out, tile.block_n) * triton.cdiv(num_rows, tile.rows)
    return tiles * tile.block_n // LINES.value if tile.splits > 1 else 0


def pairs_of(weight: Tensor, lines: int, step: int) -> TensorDescriptor:
    """W = [gate; up] in boxes of so many lines, eight of gates and eight of what they open by turns."""
    hidden, num_in = len(weight) // 2, weight.shape[1]
    eight = EIGHT.value
    layout = gl.NVMMASharedLayout(128, 8 * weight.itemsize, 4)
    shape, strides = [hidden // eight, 2, eight, num_in], [eight * num_in, hidden * num_in, num_in, 1]
    return TensorDescriptor(weight, shape, strides, [lines // 2 // eight, 2, eight, step], layout)


@gluon.jit
def seen_as(parts, dtype: gl.constexpr, num: gl.constexpr, lines: gl.constexpr, width: gl.constexpr):
    """The memory of parts as `num` tiles [lines, width], swizzled."""
    bits: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(width * bits // 8, bits, 2)
    if HAS_REINTERPRET:
        return parts.reinterpret(dtype, [num, lines, width], layout)
    else:
        return parts._reinterpret(dtype, [num, lines, width], layout)


@gluon.jit
def range_of(num_in, STEP: gl.constexpr, SPLITS: gl.constexpr):
    """(the first one, number) of the steps of this program."""
    total, split = (num_in + STEP - 1) // STEP, gl.program_id(2)
    first = total * split // SPLITS
    return first, total * (split + 1) // SPLITS - first


@gluon.jit
def copy_weight(
    weight, parts, full, stage, k, is_step, GROUPS: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr
):
    """Copy a step of this program's lines of W; of which group, then which stage is a part."""
    for group in gl.static_range(GROUPS):
        block, part = gl.program_id(1) * GROUPS + group, parts.index(group * STAGES + stage)
        if ACT is None:
            copy_box(weight, [block * LINES, k], full, part, pred=is_step)
        else:
            copy_box(weight, [block * (LINES // 2 // EIGHT), 0, 0, k], full, part, pred=is_step)


@gluon.jit
def copy_step(
    step, x, weight, x_parts, w_parts, bars, num_in,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """Copy W and x of a step, once there is room, if there is such a step."""
    first, num_steps = range_of(num_in, STEP, SPLITS)
    stage, k, is_step = step % STAGES, (first + step) * STEP, step < num_steps
    full = bars.index(stage)
    mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1, pred=is_step)
    mbarrier.expect(full, (ROWS + GROUPS * LINES) * LINE_BYTES, pred=is_step)
    copy_box(x, [gl.program_id(0) * ROWS, k], full, x_parts.index(stage), pred=is_step)
    copy_weight(weight, w_parts, full, stage, k, is_step, GROUPS, STAGES, ACT)


@gluon.jit
def copy_first(
    x, weight, x_parts, w_parts, bars, num_in,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Prepare the barriers and copy the first steps, as many as there is room for: W, wait, x."""
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=GROUPS)
    fence_async_shared()
    mbarrier.arrive(bars.index(2 * STAGES))
    first, num_steps = range_of(num_in, STEP, SPLITS)
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), (ROWS + GROUPS * LINES) * LINE_BYTES, pred=i < num_steps)
        copy_weight(weight, w_parts, bars.index(i), i, (first + i) * STEP, i < num_steps, GROUPS, STAGES, ACT)
    wait(DEPENDENT)
    for i in gl.static_range(STAGES):
        at = [gl.program_id(0) * ROWS, (first + i) * STEP]
        copy_box(x, at, bars.index(i), x_parts.index(i), pred=i < num_steps)


@gluon.jit
def copy_steps(
    operands, num_in,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    x, weight, x_parts, w_parts, bars = operands
    copy_first(
        x, weight, x_parts, w_parts, bars, num_in, ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
    )  # fmt: skip
    _, num_steps = range_of(num_in, STEP, SPLITS)
    for step in range(STAGES, num_steps):
        copy_step(step, x, weight, x_parts, w_parts, bars, num_in, ROWS, GROUPS, STAGES, STEP, SPLITS, ACT)


@gluon.jit
def rounded(y, dtype: gl.constexpr):
    """y, float32, in dtype; two numbers at a time, since one alone takes as long as its exponential."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [y], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [y], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def output_of(line, block, num_out, ACT: gl.constexpr):
    """The row of W that a line of a block is."""
    if ACT is None:
        return block * LINES + line
    else:
        return block * (LINES // 2) + line // 16 * EIGHT + line % EIGHT + line // EIGHT % 2 * (num_out // 2)


@gluon.jit
def store_result(
    y, room, first_row, block, num_rows, num_out, bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr,
    ACT: gl.constexpr,
):  # fmt: skip
    """Scale y [LINES, rows], add the bias, gate if there is an ACT, turn, store."""
    y = y.to(gl.float32)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    rows: gl.constexpr = y.shape[1]
    line = gl.arange(0, LINES, gl.SliceLayout(1, y.type.layout))
    n = output_of(line, block, num_out, ACT)
    if weight_scale_ptr is not None:
        y *= gl.load(weight_scale_ptr + n, mask=n < num_out, other=0.0)[:, None]
    if x_scale_ptr is not None:
        m = first_row + gl.arange(0, rows, gl.SliceLayout(0, y.type.layout))
        y *= gl.load(x_scale_ptr + m, mask=m < num_rows, other=0.0)[None, :]
    if bias_ptr is not None:
        y += gl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(gl.float32)[:, None]
    y = rounded(y, dtype)
    if ACT is not None:
        opening, up = y.reshape([4, 2, EIGHT, rows]).permute((0, 2, 3, 1)).split()
        y = gate(opening, up, ACT).reshape([LINES // 2, rows])
        num_out = num_out // 2
    width: gl.constexpr = y.shape[0]
    # By way of shared memory, so that threads write whole lines.
    room.permute((1, 0)).store(y)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    result = room.load(LAYOUT)
    row = first_row + gl.arange(0, rows, gl.SliceLayout(1, LAYOUT))[:, None]
    n = block * width + gl.arange(0, width, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out_ptr + row.to(gl.int64) * num_out + n, result, mask=(row < num_rows) & (n < num_out))


@gluon.jit
def scales_of(group, scales, known, num_rows):
    """A group's scales of x and W; whatever for what is not there."""
    x_scale_at, w_scale_at = scales
    is_row, is_line = known
    x_scale = gl.load(x_scale_at + group * num_rows, mask=is_row, other=0.0)
    return x_scale, gl.load(w_scale_at + group, mask=is_line, other=0.0)


@gluon.jit
def finish_tile(
    y, w_parts, GROUP: gl.constexpr, results, sizes, ROOM: gl.constexpr,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Store what a group of warps has summed up, y [LINES, ROWS], or its share of what all splits have.

    Nobody else uses this group's part of w_parts, ROOM bytes: there is room for results.
    """
    bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr, partial_ptr, arrivals_ptr = results
    num_rows, num_out, _ = sizes
    row, block = gl.program_id(0) * ROWS, gl.program_id(1) * GROUPS + GROUP
    WIDTH: gl.constexpr = LINES if ACT is None else LINES // 2
    SIZE: gl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth // 8
    if SPLITS == 1:
        rooms: gl.constexpr = ROOM // (ROWS * WIDTH * SIZE)
        room = seen_as(w_parts, out_ptr.dtype.element_ty, GROUPS * rooms, ROWS, WIDTH).index(GROUP * rooms)
        store_result(
            y, room, row, block, num_rows, num_out, bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr, ACT,
        )  # fmt: skip
    else:
        SHARE: gl.constexpr = ROWS // SPLITS  # rows that a program adds up
        rooms: gl.constexpr = ROOM // (SHARE * WIDTH * SIZE)
        room = seen_as(w_parts, out_ptr.dtype.element_ty, GROUPS * rooms, SHARE, WIDTH).index(GROUP * rooms)
        tile = (gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)) * GROUPS + GROUP
        partials = partial_ptr + tile.to(gl.int64) * (SPLITS * LINES * ROWS)
        arrivals = arrivals_ptr + tile
        split = gl.program_id(2)
        FRAGMENTS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        warp = gl.arange(0, 4, gl.SliceLayout(1, FRAGMENTS))[:, None] * (ROWS * 16)
        number = gl.arange(0, ROWS * 16, gl.SliceLayout(0, FRAGMENTS))[None, :]
        y = in_fragments(y, ROWS)
        share = number // (SHARE * 16)
        is_others = (share != split) & (row + share * SHARE < num_rows)
        gl.store(partials + split * (LINES * ROWS) + warp + number, y, mask=is_others)
        # All of this group's threads have stored before one of them reports.  What all add is zero, and what
        # some add, this program among them, is not: who finds zero knows that all have come.
        barrier()
        gl.atomic_add(arrivals, gl.where(split == 0, 1 - SPLITS, 1), sem="release")
        own = gl.where(share == split, y, gl.zeros_like(y)).reshape([4, SPLITS, SHARE * 16])
        own = gl.convert_layout(gl.sum(own, 1), FRAGMENTS, assert_trivial=True)
        while gl.atomic_add(arrivals, 0, sem="acquire") != 0:
            pass
        barrier()
        row += split * SHARE
        if row < num_rows:
            at = partials + split * (SHARE * 16) + warp
            at += gl.arange(0, SHARE * 16, gl.SliceLayout(0, FRAGMENTS))[None, :]
            sums = gl.zeros_like(own)
            for i in gl.static_range(SPLITS):
                others = gl.load(at + i * (LINES * ROWS), mask=split != i, cache_modifier=".cg")
                sums += gl.where(split == i, own, others)
            store_result(
                out_of_fragments(sums, SHARE), room, row, block, num_rows, num_out, bias_ptr, x_scale_ptr,
                weight_scale_ptr, out_ptr, ACT,
            )  # fmt: skip


@gluon.jit
def multiply_steps(
    GROUP: gl.constexpr, operands, results, sizes, SHARED: gl.constexpr,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps: its 64 lines of W with all rows of the tile."""
    x, weight, x_parts, w_parts, bars = operands
    bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr, partial_ptr, arrivals_ptr = results
    num_rows, num_out, num_in = sizes
    # A warp that copies would leave three groups too few registers.
    COPIES: gl.constexpr = GROUPS == 3 and GROUP == 0
    first, num_steps = range_of(num_in, STEP, SPLITS)
    w_tiles = seen_as(w_parts, w_parts.dtype, GROUPS * STAGES, LINES, STEP)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, STEP // 4])
    IS_INT8: gl.constexpr = w_parts.dtype == gl.int8
    PARTS: gl.constexpr = 2 if IS_INT8 and ROWS == 256 else 1  # Triton multiplies up to 224 rows of integers
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS // PARTS, STEP // 4])
    y = gl.zeros([LINES, ROWS // PARTS], gl.int32 if IS_INT8 else gl.float32, HALF)
    others = y
    row, block = gl.program_id(0) * ROWS, gl.program_id(1) * GROUPS + GROUP
    if COPIES:
        copy_first(
            x, weight, x_parts, w_parts, bars, num_in, ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
        )  # fmt: skip
    mbarrier.wait(bars.index(2 * STAGES), 0)
    if SHARED is not None:
        wait(DEPENDENT)
        m = row + gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCT))
        n = output_of(gl.arange(0, LINES, gl.SliceLayout(1, PRODUCT)), block, num_out, ACT)
        scales = x_scale_ptr + m, weight_scale_ptr + n * gl.cdiv(num_in, SHARED)
        known = m < num_rows, n < num_out
        x_scale, w_scale = scales_of(first * STEP // SHARED, scales, known, num_rows)
    for step in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(bars.index(stage), step // STAGES & 1)
        w, step_x = w_tiles.index(GROUP * STAGES + stage), x_parts.index(stage).permute((1, 0))
        if PARTS == 2:
            few = x_parts.index(stage).slice(0, ROWS // 2).permute((1, 0))
            more = x_parts.index(stage).slice(ROWS // 2, ROWS // 2).permute((1, 0))
            y = warpgroup_mma(w, few, y, is_async=True)
            others = warpgroup_mma(w, more, others, is_async=True)
            y, others = warpgroup_mma_wait(2, deps=[y, others])
        elif SHARED is None:
            y = warpgroup_mma(w, step_x, y, is_async=True)
            y = warpgroup_mma_wait(1, deps=[y])
        else:
            product = warpgroup_mma(w, step_x, gl.zeros([LINES, ROWS], gl.float32, PRODUCT), is_async=True)
            # Those of the next step are asked for a step ahead.
            group = gl.minimum(first + step + 1, gl.cdiv(num_in, STEP) - 1) * STEP // SHARED
            next_x_scale, next_w_scale = scales_of(group, scales, known, num_rows)
            product = warpgroup_mma_wait(0, deps=[product])
            y += product * x_scale[None, :] * w_scale[:, None]
            x_scale, w_scale = next_x_scale, next_w_scale
        mbarrier.arrive(bars.index(STAGES + (step + STAGES - 1) % STAGES), pred=step > 0)
        if COPIES:
            if step > 0:
                copy_step(
                    step - 1 + STAGES, x, weight, x_parts, w_parts, bars, num_in,
                    ROWS, GROUPS, STAGES, STEP, SPLITS, ACT,
                )  # fmt: skip
    if PARTS == 2:
        y, others = warpgroup_mma_wait(0, deps=[y, others])
        y = gl.join(y, others).permute((0, 2, 1)).reshape([LINES, ROWS])
        y = gl.convert_layout(y, PRODUCT, assert_trivial=True)
    elif SHARED is None:
        y = warpgroup_mma_wait(0, deps=[y])
    else:
        x_scale_ptr, weight_scale_ptr = None, None  # they are multiplied in
    barrier()

    finish_tile(
        y, w_parts, GROUP, (bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr, partial_ptr, arrivals_ptr),
        sizes, STAGES * LINES * LINE_BYTES, ROWS, GROUPS, SPLITS, ACT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def hopper_matmul_kernel(
    x,  # descriptor of [M, K], in boxes [ROWS, STEP]
    weight,  # descriptor of [N, K], in boxes [LINES, STEP], or see `pairs_of`
    bias_ptr,
    x_scale_ptr,  # [G, M]
    weight_scale_ptr,  # [N, G]
    out_ptr,
    partial_ptr,  # [tiles, GROUPS, SPLITS, LINES * ROWS]
    arrivals_ptr,  # [tiles, GROUPS]
    num_rows,
    num_out,
    num_in,
    SHARED: gl.constexpr,  # inputs that share a scale; None: all
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    STEP: gl.constexpr,
    SPLITS: gl.constexpr,
    ACT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One program a tile of rows, a block of outputs and a range of inputs."""
    dtype: gl.constexpr = x.dtype
    pairs: gl.constexpr = LINES // 2 // EIGHT
    x_parts = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], x.layout)
    if ACT is None:
        w_parts = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, LINES, STEP], weight.layout)
    else:
        w_parts = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, pairs, 2, EIGHT, STEP], weight.layout)
    # First those that say "full", then those that say "empty", and that all of these are prepared.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(2 * STAGES), count=1)
    fence_async_shared()
    operands, sizes = (x, weight, x_parts, w_parts, bars), (num_rows, num_out, num_in)
    results = (bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr, partial_ptr, arrivals_ptr)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_steps, (
                    gl.constexpr(0), operands, results, sizes, SHARED,
                    ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
                )),
                (copy_steps, (operands, num_in, ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT)),
            ],
            [1],
            [40],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_steps, (
                    gl.constexpr(0), operands, results, sizes, SHARED,
                    ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
                )),
                (multiply_steps, (
                    gl.constexpr(1), operands, results, sizes, SHARED,
                    ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
                )),
                (copy_steps, (operands, num_in, ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT)),
            ],
            [4, 1],
            [232 if ROWS > (128 if SHARED is None else 32) else 120, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_steps, (
                    gl.constexpr(0), operands, results, sizes, SHARED,
                    ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
                )),
                (multiply_steps, (
                    gl.constexpr(1), operands, results, sizes, SHARED,
                    ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
                )),
                (multiply_steps, (
                    gl.constexpr(2), operands, results, sizes, SHARED,
                    ROWS, GROUPS, STAGES, STEP, SPLITS, ACT, DEPENDENT,
                )),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
