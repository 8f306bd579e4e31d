# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
"""The product with a matrix of FP8 or INT8 weights and their scales, for any number of rows.

Scales of whole rows are multiplied in last.  Those that change along the summed axis cannot wait until then:
each block of inputs is summed, scaled, and added in float32 (DeepSeek-V3, arXiv:2412.19437, section 3.3).
Activations are FP8 or INT8 with scales of their own, or plain.  For plain ones weights are widened to their
type tile by tile in registers, exactly, so that memory is read a byte a weight; FP8 weights are widened by
moving bits, since GPUs before compute capability 8.9 have no instruction for it.

Legend: T tokens, N outputs, K inputs, G blocks of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.language import tl, triton


def scaled_matmul(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N] of `dtype`.

    x: FP8 or INT8 with scales x_scale, float32 [T, G], or plain numbers and None.  weight: FP8 or INT8, the
    same as x if that is rounded, with float32 weight_scale [N, G].  block: inputs that share a scale; G is 1
    if that is all of them, as it must be where INT8 is multiplied with INT8.
    """
    num_tokens, num_inputs = x.shape
    num_outputs, num_blocks = weight_scale.shape
    assert weight.shape == (num_outputs, num_inputs) and num_blocks == triton.cdiv(num_inputs, block)
    assert x_scale is None or x_scale.shape == (num_tokens, num_blocks), x_scale.shape
    assert (x.dtype == weight.dtype) == (x_scale is not None), (x.dtype, weight.dtype)
    assert x.dtype != torch.int8 or num_blocks == 1, "sums of integers are exact and have one scale"
    x, weight = x.contiguous(), weight.contiguous()
    x_scale = None if x_scale is None else x_scale.t().contiguous()  # as `Rounded` has it
    out = torch.empty(num_tokens, num_outputs, dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    rows, columns, warps = tile_for(num_tokens)
    step = step_for(x.itemsize, block)
    grid = (triton.cdiv(num_outputs, columns), triton.cdiv(num_tokens, rows))
    scaled_matmul_kernel[grid](
        x,
        x_scale,
        weight if x_scale is not None or weight.dtype == torch.int8 else weight.view(torch.uint8),
        weight_scale,
        out,
        num_tokens,
        N=num_outputs,
        K=num_inputs,
        BLOCK=block,
        STEP=step,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
        num_stages=stages_for(x.itemsize),
    )
    return out


def tile_for(num_tokens: int) -> tuple[int, int, int]:
    """(tokens, outputs, warps) of a program: with few tokens, many programs keep the memory busy."""
    if num_tokens <= 16:
        return 16, 32, 4
    return (64, 64, 4) if num_tokens <= 256 else (128, 128, 8)


def step_for(itemsize: int, block: int) -> int:
    """Inputs multiplied at once: a power of two, at least what tensor cores take of FP8."""
    return min(128 // itemsize, max(32, triton.next_power_of_2(block)))


def stages_for(itemsize: int) -> int:
    """Steps of the loop under way: as fit the shared memory of small GPUs, 99 KiB."""
    return 4 if itemsize == 1 else 3


def scaled_matmul_ref(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    *,
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    """The same in float32, or float64 if that is what is wanted, with the scales multiplied in first."""
    type = torch.promote_types(dtype, torch.float32)
    wide, wide_weight = (
        tensor.to(type) * (1.0 if scale is None else spread(scale, block)[:, : tensor.shape[1]])
        for tensor, scale in ((x, x_scale), (weight, weight_scale))
    )
    return (wide @ wide_weight.t()).to(dtype)


def spread(scale: Tensor, block: int) -> Tensor:
    """[rows, blocks] -> [rows, blocks * block], or what broadcasts to it."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(block, dim=1)


@triton.jit
def widened(weight, TYPE: tl.constexpr):
    """Weights of a byte as TYPE: integers, or E4M3 in unsigned bytes, but those as a 256th of what they are.

    The bits of E4M3 are those of a float16 whose exponent is smaller by 8.  NaN, the one number that is none,
    is taken for 480.
    """
    if weight.dtype == tl.int8:
        return weight.to(TYPE)
    bits = weight.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(TYPE)


@triton.jit
def scaled_matmul_kernel(
    x_ptr,
    x_scale_ptr,  # [G, T], or None: x is plain
    weight_ptr,
    weight_scale_ptr,
    out_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a tile of ROWS x COLUMNS results; neighbours share their tokens."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    STEPS: tl.constexpr = (BLOCK + STEP - 1) // STEP  # of a block, the last one perhaps not full
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, STEP)
    SUMS: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((ROWS, COLUMNS), SUMS)
    for index in range(BLOCKS * STEPS):
        block, begin = index // STEPS, index % STEPS * STEP
        start = block * BLOCK + begin
        left = K - start
        if BLOCK % STEP != 0:
            left = tl.minimum(left, BLOCK - begin)
        x_at = x_ptr + row[:, None] * K + start + lane[None, :]
        x = tl.load(x_at, mask=(row[:, None] < num_tokens) & (lane[None, :] < left), other=0.0)
        weight_at = weight_ptr + column[None, :] * K + start + lane[:, None]
        weight = tl.load(weight_at, mask=(column[None, :] < N) & (lane[:, None] < left), other=0.0)
        if x_scale_ptr is None:
            product = tl.dot(x, widened(weight, x.dtype), input_precision="ieee")
        else:
            product = tl.dot(x, weight, out_dtype=SUMS)
        if BLOCKS > 1:
            scale = tl.load(weight_scale_ptr + column * BLOCKS + block, mask=column < N, other=0.0)[None, :]
            if x_scale_ptr is not None:
                x_scale = tl.load(x_scale_ptr + block * num_tokens + row, mask=row < num_tokens, other=0.0)
                scale = x_scale[:, None] * scale
            product = product * scale
        total += product
    total = total.to(tl.float32)
    if BLOCKS == 1:
        total *= tl.load(weight_scale_ptr + column, mask=column < N, other=0.0)[None, :]
        if x_scale_ptr is not None:
            total *= tl.load(x_scale_ptr + row, mask=row < num_tokens, other=0.0)[:, None]
    if weight_ptr.dtype.element_ty == tl.uint8:
        total *= 256.0
    inside = (row[:, None] < num_tokens) & (column[None, :] < N)
    tl.store(out_ptr + row[:, None] * N + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)
