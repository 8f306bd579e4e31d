# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""Low-rank additions to a product, of another adapter for each token.

LoRA (Hu et al. 2021), batched as in Punica (Chen et al. 2023): y[t] += B[a] A[a] x[t] with a = adapters[t],
and nothing if that is -1.  Two launches, of which what each token gets depends on no other one, and there are
two ways.

Grouped: `shrink` multiplies by A, its inputs cut into parts that run side by side, and `expand` sums the
parts and multiplies by B.  A program has a tile of tokens and one adapter, and ends at once if none of them
has that; tokens of others are zeros in it and are not written.

Wide, of few tokens where all adapters together have few ranks: the A of all adapters and of all merged
matrices are one matrix, and one product multiplies all tokens by all of it: the layer's own, where they lie
behind its rows.  `expand_wide` picks each token's own slice and multiplies by the B of all adapters, what is
not the token's own being zeros; `gate_wide` also gates what is then there.  Steps of few tokens last as long
as what they read and launch, and of adapters there is little to read.  Zeros times B are zeros as long as all
numbers in B are finite.

Legend: T tokens, K input features, N output features, P matrices merged in the layer, L adapters, R the rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.pointwise.silu_mul import gate, silu_mul_ref

BLOCK_K = 128  # inputs at a time
BLOCK_N = 128  # outputs of a program
LEAST_RANK = 16  # that the banks have room for: tensor cores multiply no less


class Cut(NamedTuple):
    """How much a program has."""

    tile: int  # tokens
    split: int  # inputs, of `shrink`


FEW, SOME, MANY = Cut(tile=16, split=512), Cut(tile=32, split=512), Cut(tile=64, split=1 << 30)
MOST_SOME = 512  # tokens
MOST_WIDE = 256  # tokens, and ranks of all adapters, that are multiplied the wide way
WIDE_BLOCK = 64  # outputs of a program


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


def expand_ref(y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...]) -> None:
    """Add to y [T, N] what B makes of the sum of shrunk [splits, P, T, R]."""
    shrunk = shrunk.sum(0).to(b.dtype)
    for adapter in adapters.unique().tolist():
        if adapter < 0:
            continue
        rows = (adapters == adapter).nonzero()[:, 0]
        ups = b[adapter].split(parts)
        y[rows] += torch.cat([F.linear(down[rows], up) for down, up in zip(shrunk, ups, strict=True)], dim=-1)


class WideShrink:
    """x [T, K] times the A of all adapters: [T, L P R].  Holds `a` [L, P, R, K] as one matrix."""

    def __init__(self, a: Tensor) -> None:
        self._rows = a.flatten(0, 2)
        self._own = None
        if a.is_cuda and a.itemsize == 2:
            from pellucid.kernels.products.own_products import (  # where Triton is installed
                OwnProducts,
                choices_for,
            )

            self._own = OwnProducts(self._rows, choices_for(self._rows))

    @staticmethod
    def serves(num_adapters: int, rank: int) -> bool:
        """Whether so many adapters of such a rank are few."""
        return num_adapters * rank <= MOST_WIDE

    def __call__(self, x: Tensor) -> Tensor:
        y = None if self._own is None else self._own(x, self._rows)
        return F.linear(x, self._rows) if y is None else y


def expand_wide_ref(
    y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...], out: Tensor | None = None
) -> None:
    """Add to y [T, N] what B makes of each token's own slice of `shrunk` [T, L P R]; the rest as above.

    out: where the sums go, [T, N]; None: to y.
    """
    own = shrunk.unflatten(1, (len(b), len(parts), b.shape[2]))
    out = y if out is None else out.copy_(y)
    for adapter in adapters.unique().tolist():
        if adapter < 0:
            continue
        rows = (adapters == adapter).nonzero()[:, 0]
        downs, ups = own[rows, adapter].unbind(1), b[adapter].split(parts)
        out[rows] += torch.cat([F.linear(down, up) for down, up in zip(downs, ups, strict=True)], dim=-1)


def expand_wide(
    y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...], out: Tensor | None = None
) -> None:
    """`expand_wide_ref` in one launch; three merged matrices at most, and all numbers of b finite.

    out: where the sums go, [T, N]; None: to y.
    """
    out = y if out is None else out
    num_tokens, (num_adapters, num_out, rank) = len(y), b.shape
    assert shrunk.shape == (num_tokens, num_adapters * len(parts) * rank), (shrunk.shape, b.shape, parts)
    assert shrunk.stride(1) == y.stride(1) == 1 and len(parts) <= 3, (shrunk.stride(), y.stride(), parts)
    if not num_tokens:
        return
    tile = wide_tile(num_tokens, num_adapters * rank)
    ends = [sum(parts[: part + 1]) for part in range(len(parts))] + [num_out] * (3 - len(parts))
    num_blocks = [triton.cdiv(size, WIDE_BLOCK) for size in parts] + [0] * (3 - len(parts))
    expand_wide_kernel[(sum(num_blocks), triton.cdiv(num_tokens, tile))](
        y, shrunk, adapters, b, out, num_tokens, y.stride(0), shrunk.stride(0), out.stride(0),
        END0=ends[0], END1=ends[1], N=num_out, BLOCKS0=num_blocks[0], BLOCKS1=num_blocks[1],
        R=rank, P=len(parts), L=num_adapters, PADDED=triton.next_power_of_2(num_adapters) * rank,
        TILE=tile, BLOCK=WIDE_BLOCK, PRECISION=precision_of(y),
        num_warps=4, **dependent(),
    )  # fmt: skip


def gate_wide_ref(y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, act: str) -> Tensor:
    """act(gate) * up of y [T, 2 H] = [gate | up] with what `expand_wide` adds: [T, H].  y may change."""
    expand_wide_ref(y, shrunk, adapters, b, (y.shape[1] // 2,) * 2)
    return silu_mul_ref(y, act)


def gate_wide(y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, act: str) -> Tensor:
    """`gate_wide_ref` in one launch.  All numbers of b must be finite."""
    (num_tokens, num_out), (num_adapters, _, rank) = y.shape, b.shape
    assert shrunk.shape == (num_tokens, num_adapters * 2 * rank), (shrunk.shape, b.shape)
    assert shrunk.stride(1) == y.stride(1) == 1 and num_out % 2 == 0, (shrunk.stride(), y.stride(), num_out)
    hidden = num_out // 2
    out = y.new_empty(num_tokens, hidden)
    if num_tokens:
        tile = wide_tile(num_tokens, num_adapters * rank)
        gate_wide_kernel[(triton.cdiv(hidden, WIDE_BLOCK), triton.cdiv(num_tokens, tile))](
            y, shrunk, adapters, b, out, num_tokens, y.stride(0), shrunk.stride(0),
            H=hidden, R=rank, L=num_adapters, PADDED=triton.next_power_of_2(num_adapters) * rank,
            TILE=tile, BLOCK=WIDE_BLOCK, ACT=act, PRECISION=precision_of(y), num_warps=4, **dependent(),
        )  # fmt: skip
    return out


def wide_tile(num_tokens: int, num_ranks: int) -> int:
    """Tokens of a program, as the shared memory of any GPU has room for beside two matrices."""
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 or num_ranks > 128 else 64


def add_lora(y: Tensor, x: Tensor, adapters: Tensor, a: Tensor, b: Tensor, parts: tuple[int, ...]) -> None:
    """`add_lora_ref` in two launches; three merged matrices at most."""
    (num_tokens, num_in), (num_adapters, num_parts, rank, _) = x.shape, a.shape
    assert x.stride(1) == y.stride(1) == 1 and len(parts) == num_parts <= 3, (x.stride(), parts)
    if not num_tokens:
        return
    tile, split = cut_for(num_tokens)
    tiles, splits = triton.cdiv(num_tokens, tile), triton.cdiv(num_in, split)
    shrunk = torch.empty((splits, num_parts, num_tokens, rank), dtype=torch.float32, device=x.device)
    shrink_kernel[(tiles, num_parts * num_adapters, splits)](
        x, adapters, a, shrunk, num_tokens, x.stride(0),
        K=num_in, R=rank, P=num_parts, TILE=tile, BLOCK=BLOCK_K, SPLIT=min(split, num_in),
        PRECISION=precision_of(x), num_warps=4, **dependent(),
    )  # fmt: skip
    expand(y, shrunk, adapters, b, parts)


def expand(y: Tensor, shrunk: Tensor, adapters: Tensor, b: Tensor, parts: tuple[int, ...]) -> None:
    """Add to y [T, N] what B makes of the sum of shrunk [splits, P, T, R]; see `add_lora_ref`."""
    (splits, num_parts, num_tokens, rank), num_adapters = shrunk.shape, len(b)
    assert shrunk.is_contiguous() and y.stride(1) == 1 and len(parts) == num_parts <= 3, (shrunk.shape, parts)
    tile = cut_for(num_tokens).tile
    ends = [sum(parts[: part + 1]) for part in range(num_parts)] + [sum(parts)] * (3 - num_parts)
    blocks = triton.cdiv(max(parts), BLOCK_N)
    expand_kernel[(triton.cdiv(num_tokens, tile), num_parts * num_adapters, blocks)](
        y, shrunk, adapters, b, num_tokens, y.stride(0),
        END0=ends[0], END1=ends[1], N=sum(parts), R=rank, P=num_parts, SPLITS=splits,
        TILE=tile, BLOCK=BLOCK_N, PRECISION=precision_of(y), num_warps=4, **dependent(),
    )  # fmt: skip


def cut_for(num_tokens: int) -> Cut:
    return FEW if num_tokens <= FEW.tile else SOME if num_tokens <= MOST_SOME else MANY


def precision_of(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_ptr,
    adapters_ptr,
    a_ptr,
    out_ptr,  # [splits, P, T, R] float32
    num_tokens,
    x_stride,
    K: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of tokens, adapter and merged matrix, and SPLIT inputs."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part, adapter, split = tl.program_id(1) % P, tl.program_id(1) // P, tl.program_id(2)
    wait(DEPENDENT)
    is_its = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1) == adapter
    if tl.max(is_its.to(tl.int32), 0) == 0:
        return
    rank, sums = tl.arange(0, R), tl.zeros((TILE, R), tl.float32)
    x_ptr += token[:, None].to(tl.int64) * x_stride
    a_ptr += tl.program_id(1).to(tl.int64) * R * K + rank[None, :] * K
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, K), BLOCK):
        at = start + tl.arange(0, BLOCK)
        inputs = tl.load(x_ptr + at[None, :], mask=is_its[:, None] & (at < K)[None, :], other=0.0)
        down = tl.load(a_ptr + at[:, None], mask=(at < K)[:, None], other=0.0)
        sums = tl.dot(inputs, down, sums, input_precision=PRECISION)
    out_ptr += (split * P + part).to(tl.int64) * num_tokens * R
    tl.store(out_ptr + token[:, None] * R + rank[None, :], sums, mask=is_its[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    y_ptr,
    shrunk_ptr,
    adapters_ptr,
    b_ptr,
    num_tokens,
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
    DEPENDENT: tl.constexpr,
):
    """One program a tile of tokens, adapter and merged matrix, and BLOCK of its outputs."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part, adapter = tl.program_id(1) % P, tl.program_id(1) // P
    first = tl.where(part == 0, 0, tl.where(part == 1, END0, END1)) + tl.program_id(2) * BLOCK
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, N))
    wait(DEPENDENT)
    is_its = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1) == adapter
    if (tl.max(is_its.to(tl.int32), 0) == 0) | (first >= end):
        return
    at, rank = first + tl.arange(0, BLOCK), tl.arange(0, R)
    shrunk_ptr += part.to(tl.int64) * num_tokens * R + token[:, None] * R + rank[None, :]
    shrunk = tl.zeros((TILE, R), tl.float32)
    for split in tl.static_range(SPLITS):
        from_ptr = shrunk_ptr + tl.cast(split * P, tl.int64) * num_tokens * R
        shrunk += tl.load(from_ptr, mask=is_its[:, None], other=0.0)
    b_ptr += adapter.to(tl.int64) * N * R
    up = tl.load(b_ptr + at[None, :] * R + rank[:, None], mask=(at < end)[None, :], other=0.0)
    sums = tl.dot(shrunk.to(up.dtype), up, input_precision=PRECISION)
    y_ptr += token[:, None].to(tl.int64) * y_stride + at[None, :]
    inside = is_its[:, None] & (at < end)[None, :]
    y = tl.load(y_ptr, mask=inside, other=0.0)
    tl.store(y_ptr, (y.to(tl.float32) + sums).to(y.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_wide_kernel(
    y_ptr,
    shrunk_ptr,
    adapters_ptr,
    b_ptr,
    out_ptr,  # may be y's
    num_tokens,
    y_stride,
    shrunk_stride,
    out_stride,
    END0: tl.constexpr,  # outputs of the first matrix, of the first two; N if there are no more
    END1: tl.constexpr,
    N: tl.constexpr,
    BLOCKS0: tl.constexpr,  # blocks of outputs that the first matrix has, the second one
    BLOCKS1: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    PADDED: tl.constexpr,  # L R, or the next power of two
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of outputs and a tile of tokens; B is on its way before the wait."""
    let_next_start(DEPENDENT)
    block = tl.program_id(0)
    part = (block >= BLOCKS0).to(tl.int32) + (block >= BLOCKS0 + BLOCKS1).to(tl.int32)
    first = tl.where(part == 0, block * BLOCK, END0 + (block - BLOCKS0) * BLOCK)
    first = tl.where(part == 2, END1 + (block - BLOCKS0 - BLOCKS1) * BLOCK, first)
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, N))
    at, column = first + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    of, rank = column // R, column % R
    b_at = b_ptr + (of * N * R + rank)[:, None] + at[None, :] * R
    up = tl.load(b_at, mask=(of < L)[:, None] & (at < end)[None, :], other=0.0)
    wait(DEPENDENT)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    adapter = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1)
    y_ptr += token[:, None].to(tl.int64) * y_stride + at[None, :]
    inside = (token < num_tokens)[:, None] & (at < end)[None, :]
    y = tl.load(y_ptr, mask=inside, other=0.0)
    shrunk_at = shrunk_ptr + token[:, None] * shrunk_stride + ((of * P + part) * R + rank)[None, :]
    shrunk = tl.load(shrunk_at, mask=adapter[:, None] == of[None, :], other=0.0)
    sums = tl.dot(shrunk, up, input_precision=PRECISION)
    out_ptr += token[:, None].to(tl.int64) * out_stride + at[None, :]
    tl.store(out_ptr, (y.to(tl.float32) + sums).to(y.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_wide_kernel(
    y_ptr,  # [T, 2 H]
    shrunk_ptr,
    adapters_ptr,
    b_ptr,
    out_ptr,  # [T, H]
    num_tokens,
    y_stride,
    shrunk_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    PADDED: tl.constexpr,  # L R, or the next power of two
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of gates with what they open, and a tile of tokens."""
    let_next_start(DEPENDENT)
    at, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    of, rank = column // R, column % R
    b_at = b_ptr + (of * 2 * H * R + rank)[:, None] + at[None, :] * R
    known = (of < L)[:, None] & (at < H)[None, :]
    gate_up, opened_up = tl.load(b_at, mask=known, other=0.0), tl.load(b_at + H * R, mask=known, other=0.0)
    wait(DEPENDENT)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    adapter = tl.load(adapters_ptr + token, mask=token < num_tokens, other=-1)
    inside = (token < num_tokens)[:, None] & (at < H)[None, :]
    y_ptr += token[:, None].to(tl.int64) * y_stride + at[None, :]
    opening, opened = tl.load(y_ptr, mask=inside, other=0.0), tl.load(y_ptr + H, mask=inside, other=0.0)
    is_its = adapter[:, None] == of[None, :]
    shrunk_at = shrunk_ptr + token[:, None] * shrunk_stride + (of * 2 * R + rank)[None, :]
    sums = tl.dot(tl.load(shrunk_at, mask=is_its, other=0.0), gate_up, input_precision=PRECISION)
    opening = (opening.to(tl.float32) + sums).to(opening.dtype)
    sums = tl.dot(tl.load(shrunk_at + R, mask=is_its, other=0.0), opened_up, input_precision=PRECISION)
    opened = (opened.to(tl.float32) + sums).to(opened.dtype)
    out_ptr += token[:, None].to(tl.int64) * H + at[None, :]
    tl.store(out_ptr, gate(opening, opened, ACT).to(opening.dtype), mask=inside)
