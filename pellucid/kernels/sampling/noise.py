# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""The integers behind all noise, hashed from (seed, position, purpose): two dozen of torch's launches in one.

The same bits on every device, also of the uniform numbers that are made of them.  Other kernels hash as they
need it, by `code`, `key` and `uniform`.

The hash is degski's 64-bit mixer (xor-shift 32, multiply, twice; listed in Wellons' hash-prospector) over
Weyl steps of the golden ratio, as in SplitMix64 (Steele, Lea, Flood 2014).  Legend: S numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton

PRIME = tl.constexpr(0xD6E8FEB86659FD93 - 2**64)  # odd, written as int64
STEP = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)  # 2**64 / golden ratio, as int64
MOST = tl.constexpr(1 - 2.0**-24)  # the largest uniform number
BLOCK = 128  # numbers of a program


def mix_ref(x: Tensor) -> Tensor:
    """A bijection of 64 bits under which related inputs come out unrelated.  [...] int64 -> [...] int64."""
    # The mask makes the shift logical; with the sign kept, x and ~x (seeds 0 and -1) would meet.
    for _ in range(2):
        x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * PRIME.value
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def codes_ref(tokens: Tensor) -> Tensor:
    """int64 of tokens' ids, int64 of any shape: each hashed."""
    return mix_ref((tokens + 1) * STEP.value)


def keys_ref(seeds: Tensor, positions: Tensor, purpose: int | Tensor) -> Tensor:
    """[S] int64: one key for each (seed, position, purpose).

    seeds, positions: [S] int64.  A column of purposes, [N, 1], gives keys [N, S].
    """
    return mix_ref(mix_ref(seeds * STEP.value + purpose) + positions * STEP.value)


def uniforms_ref(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """[S] float32, uniform on [0, 1): one number for each (seed, position, purpose)."""
    x = keys_ref(seeds, positions, purpose) * PRIME.value
    return (x.to(torch.float32).abs() * 2.0**-63).clamp(max=MOST.value)


def keys(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """As `keys_ref`, in one launch."""
    return _launch(seeds, positions, purpose, torch.int64)


def uniforms(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """As `uniforms_ref`, in one launch."""
    return _launch(seeds, positions, purpose, torch.float32)


def _launch(seeds: Tensor, positions: Tensor, purpose: int, dtype: torch.dtype) -> Tensor:
    assert seeds.shape == positions.shape and seeds.ndim == 1, (seeds.shape, positions.shape)
    out = torch.empty(len(seeds), dtype=dtype, device=seeds.device)
    if len(out) == 0:
        return out
    noise_kernel[(triton.cdiv(len(out), BLOCK),)](
        seeds,
        positions,
        out,
        len(out),
        seeds.stride(0),
        positions.stride(0),
        PURPOSE=int(purpose),
        BLOCK=BLOCK,
        num_warps=4,
        **dependent(),
    )
    return out


@triton.jit(
    do_not_specialize=["num"],
    do_not_specialize_on_alignment=["seeds_ptr", "positions_ptr"],
)
def noise_kernel(
    seeds_ptr,
    positions_ptr,
    out_ptr,  # [S]: int64 for keys, float32 for uniform numbers
    num,  # S
    seed_stride,
    position_stride,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program BLOCK numbers."""
    let_next_start(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    seed = tl.load(seeds_ptr + at * seed_stride, mask=at < num, other=0)
    position = tl.load(positions_ptr + at * position_stride, mask=at < num, other=0)
    if out_ptr.dtype.element_ty == tl.float32:
        tl.store(out_ptr + at, uniform(seed, position, PURPOSE), mask=at < num)
    else:
        tl.store(out_ptr + at, key(seed, position, PURPOSE), mask=at < num)


@triton.jit
def mix(x):
    """As `mix_ref`."""
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * PRIME
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * PRIME
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@triton.jit
def code(token):
    """As `codes_ref`."""
    return mix((token.to(tl.int64) + 1) * STEP)


@triton.jit
def key(seed, position, purpose):
    """As `keys_ref`."""
    return mix(mix(seed * STEP + purpose) + position * STEP)


@triton.jit
def uniform(seed, position, purpose):
    """As `uniforms_ref`."""
    x = key(seed, position, purpose) * PRIME
    return tl.minimum(tl.abs(x.to(tl.float32)) * 2.0**-63, MOST)
