# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Low-rank additions to a product, of another adapter for each token.

LoRA (Hu et al. 2021), batched as in Punica (Chen et al. 2023): y[t] += B[a] A[a] x[t] with a = adapters[t],
and nothing if that is -1.  Two launches: `shrink` multiplies by A, its inputs cut into parts that run side by
side, and `expand` sums the parts and multiplies by B.  A program has a tile of tokens and goes through the
adapters that occur in it, with all other tokens zeroed, so a token's result depends on no other one, and what
is launched not on who asks.  A tile without adapters ends at once.

Legend: T tokens, K input features, N output features, P matrices merged in the layer, L adapters, R the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.language import tl, triton

TILE = 16  # tokens, the least that tensor cores take
BLOCK_K = 128  # inputs at a time
BLOCK_N = 64  # outputs of a program
LEAST_RANK = 16  # that the banks have room for: tensor cores multiply no less
SPLIT = 512  # inputs of a program of `shrink`


def add_lora_ref(
    y: Tensor, x: Tensor, adapters: Tensor, a: Tensor, b: Tensor, parts: tuple[int, ...]
) -> None:
    """Add to y [T, N] what the adapters make of x [T, K].

    adapters: [T] int32.  a: [L, P, R, K].  b: [L, N, R], its rows those of the merged matrices, of which each
    has as many as `parts` says.
    """
    for adapter in adapters.unique().tolist():
        if adapter < 0:
            continue
        rows = (adapters == adapter).nonzero()[:, 0]
        inputs, ups = x[rows], b[adapter].split(parts)
        added = [F.linear(F.linear(inputs, down), up) for down, up in zip(a[adapter], ups, strict=True)]
        y[rows] += torch.cat(added, dim=-1)


def add_lora(y: Tensor, x: Tensor, adapters: Tensor, a: Tensor, b: Tensor, parts: tuple[int, ...]) -> None:
    """`add_lora_ref` in two launches; three merged matrices at most."""
    (num_tokens, num_in), (num_adapters, num_parts, rank, _) = x.shape, a.shape
    assert x.stride(1) == y.stride(1) == 1 and len(parts) == num_parts <= 3, (x.stride(), parts)
    if not num_tokens:
        return
    tiles, splits = triton.cdiv(num_tokens, TILE), triton.cdiv(num_in, SPLIT)
    shrunk = torch.empty((splits, num_parts, num_tokens, rank), dtype=torch.float32, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    shrink_kernel[(tiles, num_parts, splits)](
        x, adapters, a, shrunk, num_tokens, num_adapters, x.stride(0),
        K=num_in, R=rank, P=num_parts, TILE=TILE, BLOCK=BLOCK_K, SPLIT=SPLIT, PRECISION=precision,
        num_warps=4,
    )  # fmt: skip
    starts = [sum(parts[:part]) for part in range(num_parts)] + [sum(parts)] * (3 - num_parts)
    expand_kernel[(tiles, triton.cdiv(max(parts), BLOCK_N), num_parts)](
        y, shrunk, adapters, b, num_tokens, num_adapters, y.stride(0),
        END0=starts[1], END1=starts[2], N=sum(parts), R=rank, P=num_parts, SPLITS=splits,
        TILE=TILE, BLOCK=BLOCK_N, PRECISION=precision, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_ptr,
    adapters_ptr,
    a_ptr,
    out_ptr,  # [splits, P, T, R] float32
    num_tokens,
    num_adapters,
    x_stride,
    K: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a tile of tokens, merged matrix, and SPLIT inputs."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part, split = tl.program_id(1), tl.program_id(2)
    adapter = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1)
    if tl.max(adapter, 0) < 0:
        return
    rank, sums = tl.arange(0, R), tl.zeros((TILE, R), tl.float32)
    for which in range(num_adapters):
        is_its = adapter == which
        if tl.max(is_its.to(tl.int32), 0) > 0:
            down_ptr = a_ptr + (part + P * tl.cast(which, tl.int64)) * R * K
            for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, K), BLOCK):
                at = start + tl.arange(0, BLOCK)
                inputs = tl.load(
                    x_ptr + token[:, None].to(tl.int64) * x_stride + at[None, :],
                    mask=is_its[:, None] & (at < K)[None, :],
                    other=0.0,
                )
                down = tl.load(down_ptr + rank[None, :] * K + at[:, None], mask=(at < K)[:, None], other=0.0)
                sums = tl.dot(inputs, down, sums, input_precision=PRECISION)
    out_ptr += (split * P + part).to(tl.int64) * num_tokens * R
    tl.store(out_ptr + token[:, None] * R + rank[None, :], sums, mask=(token < num_tokens)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    y_ptr,
    shrunk_ptr,
    adapters_ptr,
    b_ptr,
    num_tokens,
    num_adapters,
    y_stride,
    END0: tl.constexpr,  # outputs of the first matrix, of the first two; N if there are no more
    END1: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a tile of tokens and BLOCK outputs of a merged matrix."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(2)
    first = tl.where(part == 0, 0, tl.where(part == 1, END0, END1))
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, N))
    at = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    adapter = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1)
    if (tl.max(adapter, 0) < 0) | (first + tl.program_id(1) * BLOCK >= end):
        return
    rank, is_token = tl.arange(0, R), token < num_tokens
    shrunk = tl.zeros((TILE, R), tl.float32)
    for split in range(SPLITS):
        from_ptr = shrunk_ptr + (split * P + part).to(tl.int64) * num_tokens * R
        shrunk += tl.load(from_ptr + token[:, None] * R + rank[None, :], mask=is_token[:, None], other=0.0)
    small = shrunk.to(b_ptr.dtype.element_ty)
    sums = tl.zeros((TILE, BLOCK), tl.float32)
    for which in range(num_adapters):
        is_its = adapter == which
        if tl.max(is_its.to(tl.int32), 0) > 0:
            up_ptr = b_ptr + tl.cast(which, tl.int64) * N * R
            up = tl.load(up_ptr + at[None, :] * R + rank[:, None], mask=(at < end)[None, :], other=0.0)
            inputs = tl.where(is_its[:, None], small, 0.0).to(small.dtype)
            sums = tl.dot(inputs, up, sums, input_precision=PRECISION)
    y_ptr += token[:, None].to(tl.int64) * y_stride + at[None, :]
    inside = (is_token & (adapter >= 0))[:, None] & (at < end)[None, :]
    y = tl.load(y_ptr, mask=inside, other=0.0)
    tl.store(y_ptr, (y.to(tl.float32) + sums).to(y.dtype), mask=inside)
