"""Noise as a pure function of (seed, position, token): what makes a request's tokens its own.

No generator, no state: whoever asks for the noise of a place gets the same numbers, on every rank, in every
batch, with or without speculation.  Knows nothing of logits.  Legend: S logits, V vocab.

The integer hash is degski's 64-bit mixer (xor-shift 32, multiply, twice; listed in Wellons' hash-prospector)
over Weyl steps of the golden ratio, as in SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

_PRIME = 0xD6E8FEB86659FD93 - 2**64  # odd, written as int64
_STEP = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, as int64
_LOW_32 = 0xFFFFFFFF


class Purpose(enum.IntEnum):
    """What a number is drawn for; different purposes are independent."""

    DRAW = 0  # a token of the target (and of a drafter that wants to agree with it)
    ACCEPT = 1  # whether a draft is accepted, where chance decides: standard and synthetic verification
    RESIDUAL = 2  # the token drawn instead of a rejected draft, under the standard rejection test
    DRAFT = 3  # a draft whose distribution is known, under the same test


def token_codes(vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """[V] int64: each token id, hashed once and for all.  A slice of it gives the noise of those tokens."""
    return _mix((torch.arange(vocab_size, dtype=torch.int64, device=device) + 1) * _STEP)


def keys(seeds: Tensor, positions: Tensor, purpose: Purpose | Tensor = Purpose.DRAW) -> Tensor:
    """[S] int64: one key for each (seed, position, purpose).  seeds, positions, purpose: [S] int64."""
    return _mix(_mix(seeds * _STEP + purpose) + positions * _STEP)


def gumbel(
    seeds: Tensor, positions: Tensor, codes: Tensor, purpose: Purpose | Tensor = Purpose.DRAW
) -> Tensor:
    """Standard Gumbel noise [S, V] float32 of every token at every (seed, position).

    seeds, positions, and purpose if it is not one for all: [S] int64.  codes: [V] of `token_codes`.
    argmax(logits / T + noise) is then a draw from softmax(logits / T) (Gumbel 1954).  Values lie in
    [-2.9, 44.4]; the upper tail, which decides the draw, is exact to 2**-63 in probability, the lower one to
    2**-24.
    """
    x = codes ^ keys(seeds, positions, purpose)[:, None]
    x.mul_(_PRIME)
    # An arithmetic shift: it folds the sign in as well, which costs one bit of the 64 and saves a pass.
    x.bitwise_xor_(x >> 32)
    x.mul_(_PRIME)
    # |x| / 2**63 is uniform with full relative precision near 0, where the largest noise comes from.
    negative_uniform = x.to(torch.float32).abs_().mul_(-(2.0**-63)).clamp_(-(1 - 2.0**-24), -(2.0**-64))
    exponential = negative_uniform.log1p_().neg_()
    return exponential.log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """[S] float32, uniform on [0, 1): one number for each (seed, position, purpose)."""
    x = keys(seeds, positions, purpose) * _PRIME
    return x.to(torch.float32).abs_().mul_(2.0**-63).clamp_(max=1 - 2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64 bits under which related inputs come out unrelated.  [...] int64 -> [...] int64."""
    x = _fold(x) * _PRIME
    x = _fold(x) * _PRIME
    return _fold(x)


def _fold(x: Tensor) -> Tensor:
    # The mask makes the shift logical; with the sign kept, x and ~x (seeds 0 and -1) would meet.
    return x ^ ((x >> 32) & _LOW_32)
