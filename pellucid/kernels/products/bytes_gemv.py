# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917, SIM300
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""y = x W^T in FP8 (E4M3) or INT8 for a row or a few, with scales of rows and outputs, or of FP8's groups.

A program holds the whole weights of its outputs in registers, and asks for them before it waits for the
kernel ahead.  Rows that are not rounded yet and are to have one scale it rounds itself, as round_rows does,
for every program anew: that is less than what another launch takes.  Products of FP8 numbers are exact, and
sums are float32: of each thread's neighbouring inputs, which scales of groups are multiplied with before all
are added up.  How a row is summed up depends on the tile alone.  Integers are multiplied four at a time,
and their sums are exact.  Of FP8 with 6,144 x 4,096 weights an H200 takes 8.6 us for a row, rounding
included, and 26 us with 24,576 x 4,096 (3.8 TB/s).

Legend: M rows, N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.products.round_rows import (
    BY_ROWS,
    Rounded,
    Rounding,
    inverse_of,
    scale_of,
    size_of,
    to_byte,
)
from pellucid.kernels.products.scaled_matmul import scaled_matmul_ref
from pellucid.kernels.products.tiles import MAX_GEMV_ROWS, Gemv

LANES = 16  # neighbouring inputs that one thread multiplies: a load of 16 bytes
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter knows no assembly


def bytes_gemv(
    x: Rounded | Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile: Gemv,
    rounding: Rounding = BY_ROWS,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """x [M, K], M up to 4, times W[N, K]^T and the scales of both, plus bias [N]: [M, N] in x's dtype.

    weight: FP8, or INT8 of multiples of 16 inputs.  weight_scale: float32 [N, G].  rounding: how x is
    rounded, or was; if by groups, it was, they are multiples of 16 inputs, and W is FP8.
    """
    rows, scales = (x.values, x.scales.t().contiguous()) if isinstance(x, Rounded) else (x, None)
    (num_rows, num_in), num_out = rows.shape, weight.shape[0]
    group = rounding.group or num_in
    assert 1 <= num_rows <= MAX_GEMV_ROWS, f"{num_rows} rows, 1 to {MAX_GEMV_ROWS} are served"
    assert weight.shape == (num_out, num_in), weight.shape
    assert weight_scale.shape == (num_out, triton.cdiv(num_in, group)), weight_scale.shape
    assert group == num_in or (scales is not None and group % LANES == 0), group
    assert rows.stride(1) == 1 and weight.is_contiguous() and weight.dtype == rounding.dtype
    if weight.dtype == torch.int8:
        assert group == num_in and num_in % LANES == 0, (group, num_in)
        weight = weight.view(torch.int32)
        rows = rows if scales is None else rows.view(torch.int32)
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=weight.device)
    bytes_gemv_kernel[(triton.cdiv(num_out, tile.block_n),)](
        rows,
        scales,
        rounding.static,
        weight,
        weight_scale,
        bias,
        out,
        num_rows,
        num_out,
        rows.stride(0),
        K=num_in,
        GROUP=group,
        ROWS=triton.next_power_of_2(num_rows),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        LANES=LANES,
        num_warps=tile.num_warps,
        **dependent(),
    )
    return out


def bytes_gemv_ref(
    x: Rounded,
    weight: Tensor,
    weight_scale: Tensor,
    rounding: Rounding = BY_ROWS,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """The same in float64, as float32."""
    group = rounding.group or weight.shape[1]
    operands = (x.values.double(), x.scales.double(), weight.double(), weight_scale.double())
    y = scaled_matmul_ref(*operands, block=group, dtype=torch.float64)
    return (y if bias is None else y + bias).float()


@triton.jit(do_not_specialize=["num_rows"])
def bytes_gemv_kernel(
    x_ptr,
    x_scale_ptr,  # [G, M], or None: x is not rounded yet
    static_ptr,  # see round_rows_kernel
    weight_ptr,  # of INT8 in words of four, and so is x if it is rounded
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of outputs."""
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    IN_WORDS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32
    TYPE: tl.constexpr = tl.int8 if IN_WORDS else weight_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 4 if IN_WORDS else 1
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    let_next_start(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = tl.minimum(n, num_out - 1)  # past the last output it is the last one, not to be stored
    lane = tl.arange(0, BLOCK_K // WIDTH)
    at = weight_ptr + here.to(tl.int64)[:, None] * (K // WIDTH)
    weights = load_parts(at, lane[None, :], K // WIDTH, BLOCK_K // WIDTH)
    if GROUP == K:
        scales = (tl.load(weight_scale_ptr + here),)
    else:
        scales = load_scales(weight_scale_ptr + here[:, None] * GROUPS, 1, K, GROUP, BLOCK_K, LANES)
    wait(DEPENDENT)
    for m in tl.static_range(ROWS):
        row = tl.minimum(m, num_rows - 1)
        if x_scale_ptr is None:
            parts = load_parts(x_ptr + row * x_stride, tl.arange(0, BLOCK_K), K, BLOCK_K)
            parts, x_scale = round_parts(parts, static_ptr, PARTS, TYPE)
            x_scales = (x_scale,)
        else:
            parts = load_parts(x_ptr + row * x_stride, lane, K // WIDTH, BLOCK_K // WIDTH)
            if GROUP == K:
                x_scales = (tl.load(x_scale_ptr + row),)
            else:
                x_scales = load_scales(x_scale_ptr + row, num_rows, K, GROUP, BLOCK_K, LANES)
        if IN_WORDS:
            y = summed_in_fours(parts, weights, PARTS)
        else:
            sums = tl.zeros((BLOCK_N, BLOCK_K // LANES), tl.float32)
            for i in tl.static_range(PARTS):
                products = parts[i].to(tl.float32)[None, :] * weights[i].to(tl.float32)
                product = tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // LANES, LANES)), 2)
                if GROUP == K:
                    sums += product
                else:
                    sums += product * (x_scales[i][None, :] * scales[i])
            y = tl.sum(sums, 1)
        if GROUP == K:
            y = y * scales[0] * x_scales[0]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + here).to(tl.float32)
        inside = (n < num_out) & (tl.full((BLOCK_N,), m, tl.int32) < num_rows)
        tl.store(out_ptr + m * num_out + n, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_parts(at, lane, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The K numbers at `at`, in parts of BLOCK_K; past the last one are zeros."""
    parts = ()
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = i * BLOCK_K + lane
        if K % BLOCK_K == 0:
            parts = parts + (tl.load(at + k),)
        else:
            parts = parts + (tl.load(at + k, mask=k < K, other=0.0),)
    return parts


@triton.jit
def load_scales(
    at, apart, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """For each part the scales of what its threads multiply; groups' scales lie so far apart."""
    scales = ()
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        group = (i * BLOCK_K + tl.arange(0, BLOCK_K // LANES) * LANES) // GROUP
        scales = scales + (tl.load(at + tl.minimum(group, (K - 1) // GROUP) * apart),)
    return scales


@triton.jit
def round_parts(parts, static_ptr, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """The parts of a row in TYPE, integers in words of four, and its scale."""
    if static_ptr is None:
        largest = tl.zeros(parts[0].shape, tl.float32)
        for i in tl.static_range(PARTS):
            largest = tl.maximum(largest, size_of(parts[i].to(tl.float32), TYPE))
        scale = scale_of(tl.max(largest, 0), TYPE)
    else:
        scale = tl.load(static_ptr)
    inverse = inverse_of(scale)
    rounded = ()
    for i in tl.static_range(PARTS):
        part = to_byte(parts[i].to(tl.float32), inverse, TYPE)
        if TYPE == tl.int8:
            part = in_words(part)
        rounded = rounded + (part,)
    return rounded, scale


@triton.jit
def in_words(x):
    """INT8 [n] as int32 [n / 4], the first of each four in the lowest byte."""
    shift = tl.arange(0, x.shape[0]) % 4 * 8
    return tl.sum(tl.reshape((x.to(tl.int32) & 0xFF) << shift, (x.shape[0] // 4, 4)), 1)


@triton.jit
def summed_in_fours(x, weights, PARTS: tl.constexpr):
    """The exact sums of x times weights [outputs, words], part by part, as float32."""
    sums = tl.zeros(weights[0].shape, tl.int32)
    for i in tl.static_range(PARTS):
        sums = multiplied_in_fours(x[i][None, :], weights[i], sums)
    return tl.sum(sums, 1).to(tl.float32)


@triton.jit
def multiplied_in_fours(a, b, total):
    """total and the products of the four integers of each word of a and b, in one instruction."""
    if INTERPRETED:
        for shift in tl.static_range(0, 32, 8):
            total += (a << (24 - shift) >> 24) * (b << (24 - shift) >> 24)
        return total
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
    )
