# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""y = x W^T in FP8 (E4M3) for a row or a few, each with a scale, as each output has one.

A program holds the whole weights of its outputs in registers, and asks for them before it waits for the
kernel ahead.  Rows that are not rounded yet it rounds itself, as quantize_fp8 does, for every program anew:
that is less than what another launch takes.  Products of FP8 numbers are exact, and sums are float32; how a
row is summed up depends on the tile alone.  With 6,144 x 4,096 weights an H200 takes 8.6 us for a row,
rounding included, and 26 us with 24,576 x 4,096 (3.8 TB/s).

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.language import tl, triton
from pellucid.kernels.quantize_fp8 import FP8, Rounded, fp8_scale, inverse_of, to_fp8
from pellucid.kernels.tiles import MAX_GEMV_ROWS, Gemv

LANES = 16  # neighbouring inputs that one thread multiplies: a load of 16 bytes


def fp8_gemv(
    x: Rounded | Tensor, weight: Tensor, weight_scale: Tensor, tile: Gemv, *, bias: Tensor | None = None
) -> Tensor:
    """x [M, K], M up to 4, times FP8 W[N, K]^T and the scales of both, plus bias [N]: [M, N] in x's dtype.

    weight_scale: float32 [N, 1].
    """
    rows, scales = (x.values, x.scales) if isinstance(x, Rounded) else (x, None)
    (num_rows, num_in), num_out = rows.shape, weight.shape[0]
    assert 1 <= num_rows <= MAX_GEMV_ROWS, f"{num_rows} rows, 1 to {MAX_GEMV_ROWS} are served"
    assert weight.shape == (num_out, num_in) and weight_scale.shape == (num_out, 1), weight_scale.shape
    assert rows.stride(1) == 1 and weight.is_contiguous() and weight.dtype == FP8
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=weight.device)
    fp8_gemv_kernel[(triton.cdiv(num_out, tile.block_n),)](
        rows,
        scales,
        weight,
        weight_scale,
        bias,
        out,
        num_rows,
        num_out,
        rows.stride(0),
        K=num_in,
        ROWS=triton.next_power_of_2(num_rows),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        LANES=LANES,
        num_warps=tile.num_warps,
        **dependent(),
    )
    return out


def fp8_gemv_ref(x: Rounded, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """The same in float64, as float32."""
    y = x.values.double() @ weight.double().T * x.scales * weight_scale.view(1, -1)
    return (y if bias is None else y + bias).float()


@triton.jit(do_not_specialize=["num_rows"])
def fp8_gemv_kernel(
    x_ptr,
    x_scale_ptr,  # None: x is not rounded yet
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of outputs."""
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_next_start(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    here = tl.minimum(n, num_out - 1)  # past the last output it is the last one, not to be stored
    w_at = weight_ptr + here.to(tl.int64)[:, None] * K + lane[None, :]
    weights = ()
    for i in tl.static_range(PARTS):
        weights = weights + (load_part(w_at, i * BLOCK_K, (i * BLOCK_K + lane)[None, :], K, BLOCK_K),)
    scale = tl.load(weight_scale_ptr + here)
    wait(DEPENDENT)
    for m in tl.static_range(ROWS):
        row = tl.minimum(m, num_rows - 1)
        x_at = x_ptr + row * x_stride + lane
        parts = ()
        for i in tl.static_range(PARTS):
            parts = parts + (load_part(x_at, i * BLOCK_K, i * BLOCK_K + lane, K, BLOCK_K),)
        if x_scale_ptr is None:
            largest = tl.zeros((BLOCK_K,), tl.float32)
            for i in tl.static_range(PARTS):
                largest = tl.maximum(largest, tl.abs(parts[i].to(tl.float32)))
            x_scale = fp8_scale(tl.max(largest, 0))
            inverse = inverse_of(x_scale)
            rounded = ()
            for i in tl.static_range(PARTS):
                rounded = rounded + (to_fp8(parts[i].to(tl.float32), inverse, weight_ptr.dtype.element_ty),)
            parts = rounded
        else:
            x_scale = tl.load(x_scale_ptr + row)
        sums = tl.zeros((BLOCK_N, BLOCK_K // LANES), tl.float32)
        for i in tl.static_range(PARTS):
            products = parts[i].to(tl.float32)[None, :] * weights[i].to(tl.float32)
            sums += tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // LANES, LANES)), 2)
        y = tl.sum(sums, 1) * x_scale * scale
        if bias_ptr is not None:
            y += tl.load(bias_ptr + here).to(tl.float32)
        inside = (n < num_out) & (tl.full((BLOCK_N,), m, tl.int32) < num_rows)
        tl.store(out_ptr + m * num_out + n, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_part(at, start, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """What is `start` elements behind `at`; inputs k past the last one are zeros."""
    if K % BLOCK_K == 0:
        part = tl.load(at + start)
    else:
        part = tl.load(at + start, mask=k < K, other=0.0)
    return part
