# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""y = x W^T for few rows, where time is what it takes to stream W once: a GEMV and a split-K product.

Sums are float32.  How a row is summed up depends on the tile alone, neither on the other rows' values nor on
their number, so rows computed with one tile have the same bits in any company.  Split-K multiplies FP8 (e4m3)
with FP8, too, a scale for each row and each output; fp8_gemv.py has the GEMV.  Of sums of FP8 products tensor
cores keep about 14 bits, so those of a tile are then added up in float32.
A gated product computes act(gate) * up of a W = [gate; up], in whose stead no gate has to be launched.

Launched while the kernel before them still runs (dependent.py), programs first ask for their part of W.
On an H200 the four projections of a Qwen3-0.6B layer take 13.6 us for one row and 17.6 for sixteen, the
library's 31.0 and 24.6 (benchmarks/tune_matmul.py).

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.silu_mul import gate, silu_mul_ref
from pellucid.kernels.tiles import MAX_GEMV_ROWS, MAX_SPLIT_K_ROWS, Gemv, SplitK


@dataclass(frozen=True, slots=True)
class Scales:
    """What an FP8 product is multiplied with, float32."""

    weight: Tensor  # [N]
    x: Tensor  # [M]


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

    Up to 4 rows with a Gemv, up to 256 with a SplitK.  scales: where x and W are FP8, then with a SplitK.
    act: an activation of silu_mul.py; of the sum [gate | up], rounded to out's dtype, act(gate) * up goes to
    out [M, N / 2].  arrivals: at least ceil(N / block_n) int32 zeros, needed where the inputs are split, and
    zeros again afterwards; two products on them must not overlap.
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    most = MAX_GEMV_ROWS if isinstance(tile, Gemv) else MAX_SPLIT_K_ROWS
    assert 1 <= num_rows <= most, f"{num_rows} rows, {tile} takes 1 to {most}"
    width = num_out // 2 if act else num_out
    assert weight.shape == (num_out, num_in) and out.shape == (num_rows, width), (weight.shape, out.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    assert scales is None or (x.itemsize == weight.itemsize == 1 and isinstance(tile, SplitK)), tile
    assert act is None or (num_out % 2 == 0 and tile.block_n % 2 == 0), (num_out, tile)
    grid_n = triton.cdiv(num_out, tile.block_n)
    operands = (x, weight, bias, out)
    sizes = (num_rows, num_out, num_in, x.stride(0))
    if isinstance(tile, Gemv):
        gemv_kernel[(grid_n,)](
            *operands,
            *sizes,
            ROWS=triton.next_power_of_2(num_rows),
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            ACT=act,
            num_warps=tile.num_warps,
            **dependent(),
        )
        return out
    padded = max(16, triton.next_power_of_2(num_rows))
    partial = None
    if tile.splits > 1:
        assert arrivals is not None and len(arrivals) >= grid_n, "arrivals: one for each block of outputs"
        partial = torch.empty(
            (grid_n, tile.splits, tile.block_n, padded), dtype=torch.float32, device=x.device
        )
    split_k_kernel[(grid_n, tile.splits)](
        *operands,
        scales and scales.x,
        scales and scales.weight,
        partial,
        arrivals,
        *sizes,
        ROWS=padded,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        ACT=act,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent(),
    )
    return out


def small_matmul_ref(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
    act: str | None = None,
) -> Tensor:
    """The same in float64, as float32; a gate's operands are rounded to x's dtype."""
    y = x.double() @ weight.double().T
    if scales is not None:
        y = y * scales.x[:, None] * scales.weight
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


@triton.jit(do_not_specialize=["num_rows"])
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of outputs: a tile of W at a time, multiplied with all rows."""
    let_next_start(DEPENDENT)
    first_column = tl.program_id(0) * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    known = (column < num_out)[:, None]
    k = tl.arange(0, BLOCK_K)
    w_at = weight_ptr + output_of(column, num_out, ACT).to(tl.int64)[:, None] * num_in + k[None, :]
    w = tl.load(w_at, mask=known & (k < num_in)[None, :], other=0.0)
    wait(DEPENDENT)
    sums = (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),) * ROWS
    for start in range(0, num_in, BLOCK_K):
        ahead = start + BLOCK_K
        next_w = tl.load(w_at + ahead, mask=known & (ahead + k < num_in)[None, :], other=0.0)
        added = ()
        for m in tl.static_range(ROWS):
            row = tl.minimum(m, num_rows - 1)  # past the last one it is the last one, not to be stored
            x = tl.load(x_ptr + row * x_stride + start + k, mask=start + k < num_in, other=0.0)
            x = tl.broadcast_to(x.to(tl.float32)[None, :], (BLOCK_N, BLOCK_K))
            added = added + (tl.fma(x, w.to(tl.float32), sums[m]),)
        sums = added
        w = next_w
    for m in tl.static_range(ROWS):
        y, row = tl.sum(sums[m], 1)[None, :], tl.full((1, 1), m, tl.int32)
        store_result(y, row, first_column, num_rows, num_out, bias_ptr, None, None, out_ptr, ACT)


@triton.jit
def prefetch(at):
    """Ask for the lines of memory at these addresses, to have them in the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


LINE_BYTES = tl.constexpr(128)
AHEAD = tl.constexpr(2)  # tiles of W to ask for before the kernel before this one has ended


@triton.jit(do_not_specialize=["num_rows"])
def split_k_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    partial_ptr,  # [blocks of N, splits, BLOCK_N, ROWS]
    arrivals_ptr,  # [blocks of N]
    num_rows,
    num_out,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
        line = begin + tl.arange(0, AHEAD * BLOCK_K // elements)[None, :] * elements
        prefetch(tl.where(known & (line < num_in), w_rows + line, weight_ptr))
    wait(DEPENDENT)
    # W stands on the left: its rows are many enough for the tensor cores' tile, those of x are not.
    x_at = x_ptr + row[None, :] * x_stride + k[:, None]
    w_at = w_rows + k[None, :]
    y = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(begin, tl.minimum(begin + length, num_in), BLOCK_K):
        inside = start + k < num_in
        w = tl.load(w_at + start, mask=known & inside[None, :], other=0.0)
        x = tl.load(x_at + start, mask=(row < num_rows)[None, :] & inside[:, None], other=0.0)
        if x.dtype.primitive_bitwidth == 8:
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
        y = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for i in range(num_splits):
            y += tl.load(partials + i * BLOCK_N * ROWS, cache_modifier=".cg")
    store_result(
        y.T,
        row[:, None],
        block * BLOCK_N,
        num_rows,
        num_out,
        bias_ptr,
        x_scale_ptr,
        weight_scale_ptr,
        out_ptr,
        ACT,
    )
