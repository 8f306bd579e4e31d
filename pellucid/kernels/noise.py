"""The integers behind the noise of sample/noise.py, hashed from (seed, position, purpose), for kernels.

The same 64 bits, and for `uniform` the same float32.  Beside each its plain reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.language import tl, triton

PRIME = tl.constexpr(0xD6E8FEB86659FD93 - 2**64)
STEP = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
MOST = tl.constexpr(1 - 2.0**-24)  # the largest uniform number


def mix_ref(x: Tensor) -> Tensor:
    """A bijection of 64 bits under which related inputs come out unrelated: [...] int64."""
    for _ in range(2):
        x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * PRIME.value
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def key_ref(seeds: Tensor, positions: Tensor, purpose: int = 0) -> Tensor:
    """[S] int64: one key for each (seed, position, purpose).  seeds, positions: [S] int64."""
    return mix_ref(mix_ref(seeds * STEP.value + purpose) + positions * STEP.value)


def uniform_ref(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """[S] float32, uniform on [0, 1): one number for each (seed, position, purpose)."""
    x = key_ref(seeds, positions, purpose) * PRIME.value
    return (x.to(torch.float32).abs() * 2.0**-63).clamp(max=MOST.value)


@triton.jit
def mix(x):
    """As `mix_ref`."""
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * PRIME
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * PRIME
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@triton.jit
def key(seed, position, PURPOSE: tl.constexpr):
    """As `key_ref`."""
    return mix(mix(seed * STEP + PURPOSE) + position * STEP)


@triton.jit
def uniform(seed, position, PURPOSE: tl.constexpr):
    """As `uniform_ref`."""
    x = key(seed, position, PURPOSE) * PRIME
    return tl.minimum(tl.abs(x.to(tl.float32)) * 2.0**-63, MOST)
