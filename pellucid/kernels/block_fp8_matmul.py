# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""The product of two FP8 matrices whose scales change along the summed axis.

Such scales cannot wait until the end: each block of inputs is summed, scaled, and added in float32
(DeepSeek-V3, arXiv:2412.19437, section 3.3).

Legend: T tokens, N outputs, K inputs, G blocks of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.language import tl, triton


def block_fp8_matmul(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, *, block: int, dtype: torch.dtype
) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N] of `dtype`; both are FP8.

    x_scale: float32 [T, G].  weight_scale: float32 [N, G].  block: inputs that share a scale, a power of two.
    """
    num_tokens, num_inputs = x.shape
    num_outputs, num_blocks = weight_scale.shape
    assert weight.shape == (num_outputs, num_inputs) and num_blocks == triton.cdiv(num_inputs, block)
    assert x_scale.shape == (num_tokens, num_blocks), x_scale.shape
    assert all(tensor.is_contiguous() for tensor in (x, x_scale, weight, weight_scale))
    out = torch.empty(num_tokens, num_outputs, dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    rows, columns, warps = tile_for(num_tokens)
    grid = (triton.cdiv(num_outputs, columns), triton.cdiv(num_tokens, rows))
    block_fp8_matmul_kernel[grid](
        x,
        x_scale,
        weight,
        weight_scale,
        out,
        num_tokens,
        N=num_outputs,
        K=num_inputs,
        BLOCK=block,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
        num_stages=4,
    )
    return out


def tile_for(num_tokens: int) -> tuple[int, int, int]:
    """(tokens, outputs, warps) of a program: with few tokens, many programs keep the memory busy."""
    if num_tokens <= 16:
        return 16, 32, 4
    return (64, 64, 4) if num_tokens <= 256 else (128, 128, 8)


def block_fp8_matmul_ref(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, *, block: int, dtype: torch.dtype
) -> Tensor:
    """The same with the scales multiplied in first, for blocks of any size."""
    wide, wide_weight = (
        tensor.float() * (scale if scale.shape[1] == 1 else spread(scale, block)[:, : tensor.shape[1]])
        for tensor, scale in ((x, x_scale), (weight, weight_scale))
    )
    return (wide @ wide_weight.t()).to(dtype)


def spread(scale: Tensor, block: int) -> Tensor:
    """[rows, blocks] -> [rows, blocks * block]."""
    return scale.repeat_interleave(block, dim=1)


@triton.jit
def block_fp8_matmul_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    out_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a tile of ROWS x COLUMNS results; neighbours share their tokens."""
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in range(blocks):
        left = K - index * BLOCK
        x_at = x_ptr + row[:, None] * K + index * BLOCK + lane[None, :]
        x = tl.load(x_at, mask=(row[:, None] < num_tokens) & (lane[None, :] < left), other=0.0)
        weight_at = weight_ptr + column[None, :] * K + index * BLOCK + lane[:, None]
        weight = tl.load(weight_at, mask=(column[None, :] < N) & (lane[:, None] < left), other=0.0)
        x_scale = tl.load(x_scale_ptr + row * blocks + index, mask=row < num_tokens, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + column * blocks + index, mask=column < N, other=0.0)
        total += tl.dot(x, weight) * (x_scale[:, None] * weight_scale[None, :])
    inside = (row[:, None] < num_tokens) & (column[None, :] < N)
    tl.store(out_ptr + row[:, None] * N + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)
