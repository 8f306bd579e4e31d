# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""y = x W^T for few rows, where time is what it takes to stream W once: a GEMV and a split-K product.

Sums are float32.  How a row is summed up depends on the tile alone, neither on the other rows' values nor on
their number, so rows computed with one tile have the same bits in any company.  Split-K multiplies FP8 (e4m3)
with FP8, too, with scales of rows and outputs, or of each of their groups, and INT8 with INT8, whose sums are
exact; bytes_gemv.py has the GEMV.  Of sums of FP8 products tensor cores keep about 14 bits, so those of a
tile are then scaled, where there are groups, and added up in float32.
A gated product computes act(gate) * up of a W = [gate; up], in whose stead no gate has to be launched.

Launched while the kernel before them still runs (dependent.py), programs first ask for their part of W.
The GEMV's have room for 32 KiB of it, 20 MB on all multiprocessors, and find it there when they may go on.
On an H200 the kernels of a Qwen3-8B layer, attention and norms included, take 103 us for one row with such a
ring in place of 116 with tiles that wait in registers.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from pellucid.kernels.lang.dependent import ask_for, dependent, let_next_start, wait
from pellucid.kernels.pointwise.silu_mul import gate, silu_mul_ref
from pellucid.kernels.products.scaled_matmul import scaled_matmul_ref
from pellucid.kernels.products.tiles import MAX_GEMV_ROWS, MAX_SPLIT_K_ROWS, Gemv, SplitK

OUTPUTS = gl.constexpr(2)  # of a tile of the GEMV: may be a gate and what it opens
LANE_BYTES = 16  # of W that a thread copies at once
RING_BYTES = 32 << 10  # of W that a GEMV's program has under way

# Triton 3.6 has this under another name than later versions.
copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@dataclass(frozen=True, slots=True)
class Scales:
    """What a product of bytes is multiplied with, float32.

    group: inputs that share a scale, a power of two from 32 on; None: all of them.
    """

    weight: Tensor  # [N, G]
    x: Tensor  # [M, G], in memory as `Rounded` has it
    group: int | None = None


def small_matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Gemv | SplitK,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
    act: str | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Write x [M, K] W[N, K]^T, times scales, plus bias [N], to out [M, N], its result.

    Up to 4 rows with a Gemv, for weights whose rows are whole 16 bytes; up to 256 with a SplitK.  scales:
    where x and W are bytes, then with a SplitK.  act: an activation of silu_mul.py; of the sum [gate | up],
    rounded to out's dtype, act(gate) * up goes to out [M, N / 2].  arrivals: at least ceil(N / block_n) int32
    zeros, needed where the inputs are split, and zeros again afterwards; two products on them must not
    overlap.
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    most = MAX_GEMV_ROWS if isinstance(tile, Gemv) else MAX_SPLIT_K_ROWS
    assert 1 <= num_rows <= most, f"{num_rows} rows, {tile} takes 1 to {most}"
    width = num_out // 2 if act else num_out
    assert weight.shape == (num_out, num_in) and out.shape == (num_rows, width), (weight.shape, out.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    assert scales is None or (x.itemsize == weight.itemsize == 1 and isinstance(tile, SplitK)), tile
    assert act is None or (num_out % 2 == 0 and tile.block_n % 2 == 0), (num_out, tile)
    assert x.dtype != torch.int8 or (scales is not None and scales.group is None), "scales are of rows"
    grid_n = triton.cdiv(num_out, tile.block_n)
    operands = (x, weight, bias, out)
    sizes = (num_rows, num_out, num_in, x.stride(0))
    if isinstance(tile, Gemv):
        lane = LANE_BYTES // weight.itemsize
        assert num_in % lane == 0 and tile.block_n % OUTPUTS.value == 0, (num_in, tile)
        tile_bytes = OUTPUTS.value * tile.block_k * weight.itemsize
        num_tiles = tile.block_n // OUTPUTS.value * triton.cdiv(num_in, tile.block_k)
        gemv_kernel[(grid_n,)](
            *operands,
            num_rows,
            num_out,
            x.stride(0),
            K=num_in,
            ROWS=triton.next_power_of_2(num_rows),
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            LANE=lane,
            STAGES=max(1, min(num_tiles, RING_BYTES // tile_bytes)),
            WARPS=tile.num_warps,
            ACT=act,
            num_warps=tile.num_warps,
            **dependent(),
        )
        return out
    padded = max(16, triton.next_power_of_2(num_rows))
    group = scales.group if scales else None
    partial = None
    if tile.splits > 1:
        assert arrivals is not None and len(arrivals) >= grid_n, "arrivals: one for each block of outputs"
        partial = torch.empty(
            (grid_n, tile.splits, tile.block_n, padded), dtype=type_of_sums(x), device=x.device
        )
    split_k_kernel[(grid_n, tile.splits)](
        *operands,
        scales and scales.x.t().contiguous(),
        scales and scales.weight,
        partial,
        arrivals,
        *sizes,
        GROUP=group,
        ROWS=padded,
        BLOCK_N=tile.block_n,
        BLOCK_K=min(tile.block_k, group or tile.block_k),
        ACT=act,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent(),
    )
    return out


def type_of_sums(x: Tensor) -> torch.dtype:
    """Of products with rows x."""
    return torch.int32 if x.dtype == torch.int8 else torch.float32


def small_matmul_ref(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
    act: str | None = None,
) -> Tensor:
    """The same in float64, as float32; a gate's operands are rounded to x's dtype."""
    x_scale, weight_scale, group = (scales.x, scales.weight, scales.group) if scales else (None, None, None)
    y = scaled_matmul_ref(x, x_scale, weight, weight_scale, block=group or x.shape[1], dtype=torch.float64)
    y = (y if bias is None else y + bias).float()
    return y if act is None else silu_mul_ref(y.to(x.dtype), act).float()


@triton.jit
def output_of(column, num_out, ACT: tl.constexpr):
    """The row of W that a column is the product with; a gate and what it opens are neighbours."""
    if ACT is None:
        return column
    return column // 2 + column % 2 * (num_out // 2)


@triton.jit
def store_result(
    y,  # [rows, columns]
    m,  # [rows, 1]
    first_column,
    num_rows,
    num_out,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    out_ptr,
    ACT: tl.constexpr,
):
    """Scale, add the bias, gate if there is an ACT, store."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = first_column + tl.arange(0, y.shape[1])[None, :]
    n = output_of(column, num_out, ACT)
    if weight_scale_ptr is not None:
        y *= tl.load(weight_scale_ptr + n, mask=column < num_out, other=0.0)
    if x_scale_ptr is not None:
        y *= tl.load(x_scale_ptr + m, mask=m < num_rows, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=column < num_out, other=0.0).to(tl.float32)
    if ACT is not None:
        opening, x = tl.split(tl.reshape(y.to(dtype), (y.shape[0], y.shape[1] // 2, 2)))
        y = gate(opening, x, ACT)
        num_out = num_out // 2
        column = first_column // 2 + tl.arange(0, y.shape[1])[None, :]
    tl.store(out_ptr + m * num_out + column, y.to(dtype), mask=(m < num_rows) & (column < num_out))


@gluon.jit
def copy_weights(
    tile, ring, weight_ptr, num_out,
    K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start to copy a tile of this program's part of W to its place in the ring; zeros past the last one."""
    BLOCK_K: gl.constexpr = ring.shape[2]
    PARTS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    inside = tile // PARTS * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, LAYOUT))
    column = gl.program_id(0) * BLOCK_N + inside
    k = tile % PARTS * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    at = weight_ptr + output_of(column, num_out, ACT).to(gl.int64)[:, None] * K + k[None, :]
    known = (inside < BLOCK_N) & (column < num_out)
    copy_ahead(ring.index(tile % STAGES), at, mask=known[:, None] & (k < K)[None, :])


@gluon.jit(do_not_specialize=["num_rows"])
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    x_stride,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    LANE: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    ACT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One program a block of outputs, two at a time.

    Tiles of W [OUTPUTS, BLOCK_K] come by way of a ring in shared memory, whose places are filled again as
    soon as they have been read.  All of x stays in registers: each thread has what it multiplies.
    """
    let_next_start(DEPENDENT)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    PARTS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, LANE], [1, 32], [1, WARPS], [1, 0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    ring = gl.allocate_shared_memory(
        weight_ptr.dtype.element_ty, [STAGES, OUTPUTS, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for tile in gl.static_range(STAGES):
        copy_weights(tile, ring, weight_ptr, num_out, K, BLOCK_N, STAGES, ACT, LAYOUT)
        async_copy.commit_group()
    wait(DEPENDENT)
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    xs = ()
    for m in gl.static_range(ROWS):
        x_at = x_ptr + gl.minimum(m, num_rows - 1) * x_stride + k  # past the last row: it, not to be stored
        for part in gl.static_range(PARTS):
            xs = xs + (gl.load(x_at + part * BLOCK_K, mask=part * BLOCK_K + k < K, other=0.0),)
    for pair in range(BLOCK_N // OUTPUTS):
        sums = (gl.zeros([OUTPUTS, BLOCK_K], gl.float32, LAYOUT),) * ROWS
        for part in gl.static_range(PARTS):
            number = pair * PARTS + part
            async_copy.wait_group(STAGES - 1)
            w = ring.index(number % STAGES).load(LAYOUT).to(gl.float32)
            if STAGES < BLOCK_N // OUTPUTS * PARTS:
                copy_weights(number + STAGES, ring, weight_ptr, num_out, K, BLOCK_N, STAGES, ACT, LAYOUT)
            async_copy.commit_group()
            added = ()
            for m in gl.static_range(ROWS):
                x, _ = gl.broadcast(xs[m * PARTS + part].to(gl.float32)[None, :], w)
                added = added + (gl.fma(x, w, sums[m]),)
            sums = added
        first = gl.program_id(0) * BLOCK_N + pair * OUTPUTS
        column = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, LAYOUT))
        for m in gl.static_range(ROWS):
            y = gl.sum(sums[m], 1)
            if bias_ptr is not None:
                n = output_of(column, num_out, ACT)
                y += gl.load(bias_ptr + n, mask=column < num_out, other=0.0).to(gl.float32)
            if ACT is None:
                at = out_ptr + m * num_out + column
                gl.store(at, y.to(dtype), mask=(column < num_out) & (m < num_rows))
            else:
                opening, opened = gl.split(gl.convert_layout(y.to(dtype).reshape([1, 2]), PAIR))
                gated = first // 2 + gl.arange(0, 1, gl.SliceLayout(1, PAIR))
                at = out_ptr + m * (num_out // 2) + gated
                gl.store(at, gate(opening, opened, ACT).to(dtype), mask=(first < num_out) & (m < num_rows))
    # The zeros arrive when they like: what sums are exchanged through must not lie where they do.
    ring._keep_alive()


LINE_BYTES = tl.constexpr(128)
AHEAD = tl.constexpr(2)  # tiles of W to ask for before the kernel before this one has ended


@triton.jit(do_not_specialize=["num_rows"])
def split_k_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_scale_ptr,  # [G, M]
    weight_scale_ptr,  # [N, G]
    partial_ptr,  # [blocks of N, splits, BLOCK_N, ROWS]
    arrivals_ptr,  # [blocks of N]
    num_rows,
    num_out,
    num_in,
    x_stride,
    GROUP: tl.constexpr,  # None: one scale a row
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides a group
    ACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of outputs and a range of inputs; the last one of a block adds the ranges up."""
    let_next_start(DEPENDENT)
    block, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column = tl.arange(0, ROWS), block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    length = tl.cdiv(tl.cdiv(num_in, BLOCK_K), num_splits) * BLOCK_K
    begin = split * length
    known = (column < num_out)[:, None]
    w_rows = weight_ptr + output_of(column, num_out, ACT).to(tl.int64)[:, None] * num_in
    if DEPENDENT:
        elements: tl.constexpr = LINE_BYTES // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines: tl.constexpr = (AHEAD * BLOCK_K + elements - 1) // elements
        line = begin + tl.arange(0, lines)[None, :] * elements
        ask_for(tl.where(known & (line < num_in), w_rows + line, weight_ptr))
    wait(DEPENDENT)
    # W stands on the left: its rows are many enough for the tensor cores' tile, those of x are not.
    x_at = x_ptr + row[None, :] * x_stride + k[:, None]
    w_at = w_rows + k[None, :]
    SUMS: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    y = tl.zeros((BLOCK_N, ROWS), SUMS)
    if GROUP is not None:
        num_groups = tl.cdiv(num_in, GROUP)
        w_scale_at = weight_scale_ptr + output_of(column, num_out, ACT) * num_groups
        group = tl.minimum(begin // GROUP, num_groups - 1)
        x_scale = tl.load(x_scale_ptr + group * num_rows + row, mask=row < num_rows, other=0.0)
        w_scale = tl.load(w_scale_at + group, mask=column < num_out, other=0.0)
    for start in range(begin, tl.minimum(begin + length, num_in), BLOCK_K):
        inside = start + k < num_in
        w = tl.load(w_at + start, mask=known & inside[None, :], other=0.0)
        x = tl.load(x_at + start, mask=(row < num_rows)[None, :] & inside[:, None], other=0.0)
        if GROUP is not None:
            # Those of the next step are asked for a step ahead.
            group = tl.minimum((start + BLOCK_K) // GROUP, num_groups - 1)
            next_x_scale = tl.load(x_scale_ptr + group * num_rows + row, mask=row < num_rows, other=0.0)
            next_w_scale = tl.load(w_scale_at + group, mask=column < num_out, other=0.0)
            y += tl.dot(w, x) * x_scale[None, :] * w_scale[:, None]
            x_scale, w_scale = next_x_scale, next_w_scale
        elif x.dtype == tl.int8:
            y = tl.dot(w, x, y, out_dtype=tl.int32)
        elif x.dtype.primitive_bitwidth == 8:
            y = tl.dot(w, x, y, max_num_imprecise_acc=BLOCK_K)
        else:
            y = tl.dot(w, x, y, input_precision="ieee")

    if partial_ptr is not None:
        at = tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :]
        partials = partial_ptr + block * num_splits * BLOCK_N * ROWS + at
        tl.store(partials + split * BLOCK_N * ROWS, y)
        # All of this program's threads have stored before one of them reports.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") < num_splits - 1:
            return
        tl.store(arrivals_ptr + block, 0)
        y = tl.zeros((BLOCK_N, ROWS), SUMS)
        for i in range(num_splits):
            y += tl.load(partials + i * BLOCK_N * ROWS, cache_modifier=".cg")
    store_result(
        y.to(tl.float32).T,
        row[:, None],
        block * BLOCK_N,
        num_rows,
        num_out,
        bias_ptr,
        x_scale_ptr if GROUP is None else None,
        weight_scale_ptr if GROUP is None else None,
        out_ptr,
        ACT,
    )
