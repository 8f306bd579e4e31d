# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Products of each head with a matrix of its own, for few tokens: what brings queries to a latent's width.

A library's batched product cannot ask for its matrices while the kernel before it still runs, which for a few
tokens is most of its time.  Each program holds a tile of one head's matrix in registers, and multiplies all
tokens with it.  For more tokens the library's is faster.

Legend: T tokens, N heads, I inputs and O outputs of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton

MOST_TOKENS = 4
TILE = 8192  # numbers of a matrix that a program holds


def heads_matmul(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [T, N, I] times weight [N, I, O], whatever its strides, into out [T, N, O]: summed up in float32."""
    num_tokens, num_heads, num_in = x.shape
    num_out = weight.shape[2]
    assert weight.shape[:2] == (num_heads, num_in) and out.shape == (num_tokens, num_heads, num_out)
    assert num_tokens <= MOST_TOKENS and x.stride(2) == out.stride(2) == 1, (x.shape, x.stride())
    padded = triton.next_power_of_2(num_in)
    outs = min(triton.next_power_of_2(num_out), max(1, TILE // padded))
    if num_tokens:
        heads_matmul_kernel[(num_heads, triton.cdiv(num_out, outs))](
            x,
            weight,
            out,
            num_tokens,
            *x.stride()[:2],
            *out.stride()[:2],
            NUM_IN=num_in,
            IN_PADDED=padded,
            NUM_OUT=num_out,
            OUTS=outs,
            HEAD_STRIDE=weight.stride(0),
            IN_STRIDE=weight.stride(1),
            OUT_STRIDE=weight.stride(2),
            num_warps=4,
            **dependent(),
        )
    return out


def heads_matmul_ref(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """The same in plain torch."""
    return out.copy_(torch.einsum("tni,nio->tno", x.float(), weight.float()))


@triton.jit(do_not_specialize=["num_tokens"])
def heads_matmul_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    x_token_stride,
    x_head_stride,
    out_token_stride,
    out_head_stride,
    NUM_IN: tl.constexpr,
    IN_PADDED: tl.constexpr,
    NUM_OUT: tl.constexpr,
    OUTS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    IN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a head and some of its outputs."""
    let_next_start(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    o, i = tl.program_id(1) * OUTS + tl.arange(0, OUTS), tl.arange(0, IN_PADDED)
    w_at = weight_ptr + head * HEAD_STRIDE + o[:, None] * OUT_STRIDE + i[None, :] * IN_STRIDE
    w = tl.load(w_at, mask=(o < NUM_OUT)[:, None] & (i < NUM_IN)[None, :], other=0.0).to(tl.float32)
    wait(DEPENDENT)
    for token in range(num_tokens):
        x_at = x_ptr + token * x_token_stride + head * x_head_stride + i
        x = tl.load(x_at, mask=i < NUM_IN, other=0.0).to(tl.float32)
        y = tl.sum(w * x[None, :], 1)
        out_at = out_ptr + token * out_token_stride + head * out_head_stride + o
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=o < NUM_OUT)
