# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""Low-rank additions to a product, of another adapter for each token.

LoRA (Hu et al. 2021), batched as in Punica (Chen et al. 2023): y[t] += B[a] A[a] x[t] with a = adapters[t],
and nothing if that is -1.  Two launches.  A program of `shrink` multiplies a tile of tokens by A of one
adapter, for all merged matrices, and a part of the inputs; tokens of others are zeros in it and are not
written.  A program of `expand` sums the parts, and multiplies by B of several adapters at once, [x_0 | x_1
..] by [B_0; B_1; ..], where of a token's x_i all are zeros but its own adapter's.  A token's result depends
on no other one, for what banks hold is finite, and what is launched not on who asks.  The layer's own product
is launched between them, so its weights are on their way while `shrink` runs, and B while that does.

Legend: T tokens, K input features, N output features, P matrices merged in the layer, L adapters, R the rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.language import tl, triton
from pellucid.kernels.silu_mul import gate, silu_mul_ref

LEAST_RANK = 16  # that the banks have room for: tensor cores multiply no less
MOST_DECODES = 512  # tokens: of more, a program of `shrink` has all inputs
MOST_SPLITS = 16  # parts of the inputs
LEAST_SPLIT = 256  # inputs
STAGE_BYTES = 48 << 10  # of x and A that a program of `shrink` asks for at once; it has two such stages
LANES = 128  # columns of [B_0; B_1; ..] at once
WIDE = 8192  # outputs, from which on a program has more of them


class Cut(NamedTuple):
    """How much a program has."""

    tile: int  # tokens
    split: int  # inputs, of `shrink`


def cut_for(num_tokens: int, num_in: int) -> Cut:
    if num_tokens > MOST_DECODES:
        return Cut(64, num_in)
    split = triton.cdiv(triton.cdiv(num_in, MOST_SPLITS), LEAST_SPLIT) * LEAST_SPLIT
    return Cut(16 if num_tokens <= 16 else 32, split)


def shrink_ref(x: Tensor, adapters: Tensor, a: Tensor) -> Tensor:
    """A[adapter] x of every token, [1, T, P, R] float32; zeros for those that have none.

    x: [T, K].  adapters: [T] int32.  a: [L, P, R, K].
    """
    num_adapters, num_parts, rank, _ = a.shape
    out = torch.zeros((1, len(x), num_parts, rank), dtype=torch.float32, device=x.device)
    for adapter in range(num_adapters):
        rows = (adapters == adapter).nonzero()[:, 0]
        if len(rows):
            shrunk = F.linear(x[rows], a[adapter].flatten(0, 1))
            out[0, rows] = shrunk.float().view(-1, num_parts, rank)
    return out


def expand_ref(y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...]) -> None:
    """Add B[adapter] to y [T, N] of what `shrink` made of each token, [splits, T, P, R], which is summed up.

    b: [N, L, R], its rows those of the merged matrices, of which each has as many as `parts` says.
    """
    total = shrunk.sum(0)
    for adapter in range(b.shape[1]):
        rows = (adapters == adapter).nonzero()[:, 0]
        if len(rows):
            ups, inputs = b[:, adapter].split(parts), total[rows].to(b.dtype)
            y[rows] += torch.cat([F.linear(inputs[:, i], up) for i, up in enumerate(ups)], dim=-1)


def shrink(x: Tensor, adapters: Tensor, a: Tensor) -> Tensor:
    """`shrink_ref` in one launch, of inputs in several parts, [splits, T, P, R] float32.

    What it holds of tokens without an adapter is whatever was there.
    """
    (num_tokens, num_in), (num_adapters, num_parts, rank, _) = x.shape, a.shape
    assert x.stride(1) == 1, x.stride()
    width, columns = num_parts * rank, triton.next_power_of_2(num_parts * rank)
    tile, split = cut_for(num_tokens, num_in)
    splits = triton.cdiv(num_in, split)
    shrunk = torch.empty((splits, num_tokens, num_parts, rank), dtype=torch.float32, device=x.device)
    if num_tokens:
        block = block_for(columns, tile, a.itemsize)
        shrink_kernel[(triton.cdiv(num_tokens, tile), num_adapters, splits)](
            x, adapters, a, shrunk, num_tokens, x.stride(0),
            K=num_in, WIDTH=width, COLUMNS=columns, TILE=tile, BLOCK=block, SPLIT=min(split, num_in),
            PRECISION=precision(x), num_warps=4, num_stages=2, **dependent(),
        )  # fmt: skip
    return shrunk


def expand(y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...]) -> None:
    """`expand_ref` in one launch; three merged matrices at most."""
    splits, num_tokens, num_parts, rank = shrunk.shape
    assert y.stride(1) == 1 and len(parts) == num_parts <= 3, (y.stride(), parts)
    if not num_tokens:
        return
    tile, block = cut_for(num_tokens, 1).tile, 128 if max(parts) > WIDE else 64
    starts = [sum(parts[:part]) for part in range(num_parts)] + [sum(parts)] * (3 - num_parts)
    grid = triton.cdiv(num_tokens, tile), num_parts, triton.cdiv(max(parts), block)
    expand_kernel[grid](
        y, shrunk, adapters, b, num_tokens, y.stride(0),
        END0=starts[1], END1=starts[2], N=sum(parts), L=b.shape[1], R=rank, P=num_parts, SPLITS=splits,
        TILE=tile, BLOCK=block, AT_ONCE=at_once(b), PRECISION=precision(y),
        num_warps=4, num_stages=1, **dependent(),
    )  # fmt: skip


def expand_gated_ref(
    y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...], act: str
) -> Tensor:
    """act(gate) * up of y = [gate | up], once `expand_ref` has added to it; y may change, or not."""
    expand_ref(y, shrunk, adapters, b, parts)
    return silu_mul_ref(y, act)


def expand_gated(
    y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...], act: str
) -> Tensor:
    """`expand_gated_ref` in one launch."""
    splits, num_tokens, num_parts, rank = shrunk.shape
    assert y.stride(1) == 1 and num_parts == 2 and parts[0] == parts[1], (y.stride(), parts)
    out, hidden = y.new_empty(num_tokens, parts[0]), parts[0]
    if num_tokens:
        tile, block = cut_for(num_tokens, 1).tile, 64
        expand_gated_kernel[(triton.cdiv(num_tokens, tile), triton.cdiv(hidden, block))](
            y, out, shrunk, adapters, b, num_tokens, y.stride(0),
            HIDDEN=hidden, L=b.shape[1], R=rank, SPLITS=splits, ACT=act,
            TILE=tile, BLOCK=block, AT_ONCE=at_once(b), PRECISION=precision(y),
            num_warps=4, num_stages=1, **dependent(),
        )  # fmt: skip
    return out


def block_for(columns: int, tile: int, itemsize: int) -> int:
    """Inputs that a program of `shrink` has at once, a power of two."""
    fits = STAGE_BYTES // (2 if columns > 128 else 1) // ((columns + tile) * itemsize)
    return max(16, min(LEAST_SPLIT, 1 << (fits.bit_length() - 1)))


def at_once(b: Tensor) -> int:
    """Adapters that a program has at once, a power of two."""
    _, num_adapters, rank = b.shape
    return min(max(1, LANES // rank), triton.next_power_of_2(num_adapters))


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_ptr,
    adapters_ptr,
    a_ptr,
    out_ptr,  # [splits, T, P, R] float32
    num_tokens,
    x_stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # P * R
    COLUMNS: tl.constexpr,  # a power of two
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of tokens and adapter, with all its merged matrices, and SPLIT inputs."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    adapter, split = tl.program_id(1), tl.program_id(2)
    column, at = tl.arange(0, COLUMNS), split * SPLIT + tl.arange(0, BLOCK)
    end = tl.minimum(split * SPLIT + SPLIT, K)
    a_ptr += adapter.to(tl.int64) * WIDTH * K + column[None, :] * K
    inside = (column < WIDTH)[None, :]
    down = tl.load(a_ptr + at[:, None], mask=(at < end)[:, None] & inside, other=0.0)
    wait(DEPENDENT)
    is_its = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1) == adapter
    if tl.max(is_its.to(tl.int32), 0) == 0:
        return
    x_ptr += token[:, None].to(tl.int64) * x_stride
    inputs = tl.load(x_ptr + at[None, :], mask=is_its[:, None] & (at < end)[None, :], other=0.0)
    sums = tl.dot(inputs, down, input_precision=PRECISION)
    for start in range(split * SPLIT + BLOCK, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inputs = tl.load(x_ptr + at[None, :], mask=is_its[:, None] & (at < end)[None, :], other=0.0)
        down = tl.load(a_ptr + at[:, None], mask=(at < end)[:, None] & inside, other=0.0)
        sums = tl.dot(inputs, down, sums, input_precision=PRECISION)
    out_ptr += split.to(tl.int64) * num_tokens * WIDTH
    at = token[:, None] * WIDTH + column[None, :]
    tl.store(out_ptr + at, sums, mask=is_its[:, None] & inside)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    y_ptr,
    shrunk_ptr,
    adapters_ptr,
    b_ptr,  # [N, L, R]
    num_tokens,
    y_stride,
    END0: tl.constexpr,  # outputs of the first matrix, of the first two; N if there are no more
    END1: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of tokens, merged matrix, and BLOCK of its outputs."""
    let_next_start(DEPENDENT)
    token, part = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    first = tl.where(part == 0, 0, tl.where(part == 1, END0, END1)) + tl.program_id(2) * BLOCK
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, N))
    at = first + tl.arange(0, BLOCK)
    ups = ups_at(b_ptr, at, at < end, 0, L, R, AT_ONCE)
    wait(DEPENDENT)
    adapter = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1)
    if (tl.max(adapter, 0) < 0) | (first >= end):
        return
    y_ptr += token[:, None].to(tl.int64) * y_stride + at[None, :]
    inside = (adapter >= 0)[:, None] & (at < end)[None, :]
    y = tl.load(y_ptr, mask=inside, other=0.0)
    low = summed(shrunk_ptr, token, adapter >= 0, part, num_tokens, R, P, SPLITS, TILE).to(ups.dtype)
    sums = tl.dot(spread(low, adapter, 0, R, TILE, AT_ONCE), ups, input_precision=PRECISION)
    for group in range(AT_ONCE, L, AT_ONCE):
        ups = ups_at(b_ptr, at, at < end, group, L, R, AT_ONCE)
        sums = tl.dot(spread(low, adapter, group, R, TILE, AT_ONCE), ups, sums, input_precision=PRECISION)
    tl.store(y_ptr, (y.to(tl.float32) + sums).to(y.dtype), mask=inside)


@triton.jit
def ups_at(b_ptr, at, inside, group, L: tl.constexpr, R: tl.constexpr, AT_ONCE: tl.constexpr):
    """[AT_ONCE * R, BLOCK]: B of the adapters from `group` on, below each other, for these outputs."""
    column = group * R + tl.arange(0, AT_ONCE * R)
    from_ptr = b_ptr + at[None, :].to(tl.int64) * (L * R) + column[:, None]
    return tl.load(from_ptr, mask=inside[None, :] & (column < L * R)[:, None], other=0.0)


@triton.jit
def spread(low, adapter, group, R: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr):
    """[TILE, AT_ONCE * R]: of each token what is `low`, in the columns of its adapter; zeros elsewhere."""
    is_its = adapter[:, None] == group + tl.arange(0, AT_ONCE)[None, :]
    placed = tl.where(is_its[:, :, None], low[:, None, :], tl.zeros((TILE, AT_ONCE, R), low.dtype))
    return tl.reshape(placed, (TILE, AT_ONCE * R))


@triton.jit
def summed(
    shrunk_ptr,
    token,
    is_its,
    part,
    num_tokens,
    R: tl.constexpr,
    P: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """[TILE, R] float32: what `shrink` made of tokens for one part, of all splits; zeros of others."""
    shrunk_ptr += (token[:, None] * P + part) * R + tl.arange(0, R)[None, :]
    shrunk = tl.zeros((TILE, R), tl.float32)
    for split in tl.static_range(SPLITS):
        from_ptr = shrunk_ptr + tl.cast(split * P, tl.int64) * num_tokens * R
        shrunk += tl.load(from_ptr, mask=is_its[:, None], other=0.0)
    return shrunk


@triton.jit(do_not_specialize=["num_tokens"])
def expand_gated_kernel(
    y_ptr,  # [T, 2 * HIDDEN]
    out_ptr,  # [T, HIDDEN]
    shrunk_ptr,
    adapters_ptr,
    b_ptr,  # [2 * HIDDEN, L, R]
    num_tokens,
    y_stride,
    HIDDEN: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    ACT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of tokens and BLOCK outputs."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gates = ups_at(b_ptr, at, at < HIDDEN, 0, L, R, AT_ONCE)
    ups = ups_at(b_ptr, HIDDEN + at, at < HIDDEN, 0, L, R, AT_ONCE)
    wait(DEPENDENT)
    adapter = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1)
    inside = (token < num_tokens)[:, None] & (at < HIDDEN)[None, :]
    y_ptr += token[:, None].to(tl.int64) * y_stride + at[None, :]
    opening = tl.load(y_ptr, mask=inside, other=0.0)
    opened = tl.load(y_ptr + HIDDEN, mask=inside, other=0.0)
    if tl.max(adapter, 0) >= 0:
        low = summed(shrunk_ptr, token, adapter >= 0, 0, num_tokens, R, 2, SPLITS, TILE).to(gates.dtype)
        high = summed(shrunk_ptr, token, adapter >= 0, 1, num_tokens, R, 2, SPLITS, TILE).to(gates.dtype)
        of_gate = tl.dot(spread(low, adapter, 0, R, TILE, AT_ONCE), gates, input_precision=PRECISION)
        of_up = tl.dot(spread(high, adapter, 0, R, TILE, AT_ONCE), ups, input_precision=PRECISION)
        for group in range(AT_ONCE, L, AT_ONCE):
            gates = ups_at(b_ptr, at, at < HIDDEN, group, L, R, AT_ONCE)
            ups = ups_at(b_ptr, HIDDEN + at, at < HIDDEN, group, L, R, AT_ONCE)
            of_gate = tl.dot(
                spread(low, adapter, group, R, TILE, AT_ONCE), gates, of_gate, input_precision=PRECISION
            )
            of_up = tl.dot(
                spread(high, adapter, group, R, TILE, AT_ONCE), ups, of_up, input_precision=PRECISION
            )
        opening = (opening.to(tl.float32) + of_gate).to(opening.dtype)
        opened = (opened.to(tl.float32) + of_up).to(opened.dtype)
    out_ptr += token[:, None].to(tl.int64) * HIDDEN + at[None, :]
    tl.store(out_ptr, gate(opening, opened, ACT), mask=inside)
