# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""y = x W^T for few rows, where time is what it takes to stream W once: a GEMV and a split-K product.

Sums are float32.  How a row is summed up depends on the tile alone, neither on the other rows' values nor on
their number, so rows computed with one tile have the same bits in any company.  W may be FP8 (e4m3), with a
scale for each output; x may then be FP8, too, with a scale for each row: products of FP8 numbers are exact.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.tiles import MAX_GEMV_ROWS, MAX_ROWS, Gemv, SplitK


@dataclass(frozen=True, slots=True)
class Scales:
    """What an FP8 product is multiplied with, float32."""

    weight: Tensor  # [N]
    x: Tensor | None = None  # [M]; None: x is not quantized


def small_matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Gemv | SplitK,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Write x [M, K] W[N, K]^T, times scales, plus bias [N], to out [M, N], its result.

    Up to 4 rows with a Gemv, up to 256 with a SplitK.  arrivals: at least ceil(N / block_n) int32 zeros,
    needed where the inputs are split, and zeros again afterwards; two products on them must not overlap.
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    most = MAX_GEMV_ROWS if isinstance(tile, Gemv) else MAX_ROWS
    assert 1 <= num_rows <= most, f"{num_rows} rows, {tile} takes 1 to {most}"
    assert weight.shape == (num_out, num_in) and out.shape == (num_rows, num_out), (weight.shape, out.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    grid_n = triton.cdiv(num_out, tile.block_n)
    x_scale, weight_scale = (scales.x, scales.weight) if scales else (None, None)
    operands = (x, weight, bias, x_scale, weight_scale, out)
    sizes = (num_rows, num_out, num_in, x.stride(0))
    if isinstance(tile, Gemv):
        gemv_kernel[(grid_n,)](
            *operands,
            *sizes,
            ROWS=triton.next_power_of_2(num_rows),
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            num_warps=tile.num_warps,
        )
        return out
    padded = max(16, triton.next_power_of_2(num_rows))
    partial = None
    if tile.splits > 1:
        assert arrivals is not None and len(arrivals) >= grid_n, "arrivals: one for each block of outputs"
        partial = torch.empty(
            (grid_n, tile.splits, padded, tile.block_n), dtype=torch.float32, device=x.device
        )
    split_k_kernel[(grid_n, tile.splits)](
        *operands,
        partial,
        arrivals,
        *sizes,
        ROWS=padded,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def small_matmul_ref(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, scales: Scales | None = None
) -> Tensor:
    """The same in float64, as float32."""
    y = x.double() @ weight.double().T
    if scales is not None:
        y = y * scales.weight if scales.x is None else y * scales.x[:, None] * scales.weight
    return (y if bias is None else y + bias).float()


@triton.jit
def store_result(y, m, n, num_rows, num_out, bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr):
    """Scale, add the bias, store.  m and n broadcast to the shape of y."""
    if weight_scale_ptr is not None:
        y *= tl.load(weight_scale_ptr + n, mask=n < num_out, other=0.0)
    if x_scale_ptr is not None:
        y *= tl.load(x_scale_ptr + m, mask=m < num_rows, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)
    inside = (m < num_rows) & (n < num_out)
    tl.store(out_ptr + m * num_out + n, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a block of outputs: a tile of W at a time, multiplied with all rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = weight_ptr + n.to(tl.int64)[:, None] * num_in + k[None, :]
    sums = (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),) * ROWS
    for start in range(0, num_in, BLOCK_K):
        inside = start + k < num_in
        w = tl.load(w_at + start, mask=(n < num_out)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        added = ()
        for m in tl.static_range(ROWS):
            row = tl.minimum(m, num_rows - 1)  # past the last one it is the last one, not to be stored
            x = tl.load(x_ptr + row * x_stride + start + k, mask=inside, other=0.0)
            x = tl.broadcast_to(x.to(tl.float32)[None, :], (BLOCK_N, BLOCK_K))
            added = added + (tl.fma(x, w, sums[m]),)
        sums = added
    for m in tl.static_range(ROWS):
        y, row = tl.sum(sums[m], 1), tl.full((BLOCK_N,), m, tl.int32)
        store_result(y, row, n, num_rows, num_out, bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr)


@triton.jit(do_not_specialize=["num_rows"])
def split_k_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    out_ptr,
    partial_ptr,  # [blocks of N, splits, ROWS, BLOCK_N]
    arrivals_ptr,  # [blocks of N]
    num_rows,
    num_out,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a block of outputs and a range of inputs; the last one of a block adds the ranges up."""
    block, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    n = block * BLOCK_N + column
    k = tl.arange(0, BLOCK_K)
    length = tl.cdiv(tl.cdiv(num_in, BLOCK_K), num_splits) * BLOCK_K
    begin = split * length
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    w_at = weight_ptr + n.to(tl.int64)[:, None] * num_in + k[None, :]
    y = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(begin, tl.minimum(begin + length, num_in), BLOCK_K):
        inside = (start + k < num_in)[None, :]
        x = tl.load(x_at + start, mask=(row < num_rows)[:, None] & inside, other=0.0)
        w = tl.load(w_at + start, mask=(n < num_out)[:, None] & inside, other=0.0)
        if x.dtype.primitive_bitwidth == 8:
            x = x.to(tl.float16)
        y = tl.dot(x, w.to(x.dtype).T, y, input_precision="ieee")

    if partial_ptr is not None:
        at = row[:, None] * BLOCK_N + column[None, :]
        partials = partial_ptr + block * num_splits * ROWS * BLOCK_N + at
        tl.store(partials + split * ROWS * BLOCK_N, y)
        # All of this program's threads have stored before one of them reports.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") < num_splits - 1:
            return
        tl.store(arrivals_ptr + block, 0)
        y = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for i in range(num_splits):
            y += tl.load(partials + i * ROWS * BLOCK_N, cache_modifier=".cg")
    store_result(
        y,
        row[:, None],
        n[None, :],
        num_rows,
        num_out,
        bias_ptr,
        x_scale_ptr,
        weight_scale_ptr,
        out_ptr,
    )
