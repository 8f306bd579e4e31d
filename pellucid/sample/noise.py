"""Noise as a pure function of (seed, position, token): what makes a request's tokens its own.

No generator, no state: whoever asks for the noise of a place gets the same numbers, on every rank, in every
batch, with or without speculation.  Knows nothing of logits.  Legend: S logits, V vocab.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from pellucid.kernels.sampling import noise
from pellucid.kernels.sampling.noise import PRIME, codes_ref
from pellucid.platform import has_triton


class Purpose(enum.IntEnum):
    """What a number is drawn for; different purposes are independent."""

    DRAW = 0  # a token of the target, in its block (and of a drafter that wants to agree with it)
    ACCEPT = 1  # whether a draft is accepted, where chance decides: standard and synthetic verification
    RESIDUAL = 2  # the token drawn instead of a rejected draft, under the standard rejection test
    DRAFT = 3  # a draft whose distribution is known, under the same test
    BLOCK = 4  # the block of the vocabulary from which a token of the target is drawn


def token_codes(vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """[V] int64: each token id, hashed once and for all.  A slice of it gives the noise of those tokens."""
    return codes_ref(torch.arange(vocab_size, dtype=torch.int64, device=device))


def keys(seeds: Tensor, positions: Tensor, purpose: Purpose = Purpose.DRAW) -> Tensor:
    """[S] int64: one key for each (seed, position, purpose).  seeds, positions: [S] int64."""
    return (noise.keys if _on_gpu(seeds) else noise.keys_ref)(seeds, positions, purpose)


def gumbel(seeds: Tensor, positions: Tensor, codes: Tensor, purpose: Purpose = Purpose.DRAW) -> Tensor:
    """Standard Gumbel noise [S, V] float32 of every token at every (seed, position).

    seeds, positions: [S] int64.  codes: [V] of `token_codes`.
    argmax(logits / T + noise) is then a draw from softmax(logits / T) (Gumbel 1954).  Values lie in
    [-2.9, 44.4]; the upper tail, which decides the draw, is exact to 2**-63 in probability, the lower one to
    2**-24.
    """
    return gumbel_of(keys(seeds, positions, purpose), codes)


def gumbel_of(keys: Tensor, codes: Tensor) -> Tensor:
    """The same for `keys` [S]; codes: [V], or [S, V], of each row's own tokens."""
    x = codes ^ keys[:, None]
    x.mul_(PRIME.value)
    # An arithmetic shift: it folds the sign in as well, which costs one bit of the 64 and saves a pass.
    x.bitwise_xor_(x >> 32)
    x.mul_(PRIME.value)
    # |x| / 2**63 is uniform with full relative precision near 0, where the largest noise comes from.
    negative_uniform = x.to(torch.float32).abs_().mul_(-(2.0**-63)).clamp_(-(1 - 2.0**-24), -(2.0**-64))
    exponential = negative_uniform.log1p_().neg_()
    return exponential.log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """[S] float32, uniform on [0, 1): one number for each (seed, position, purpose)."""
    return (noise.uniforms if _on_gpu(seeds) else noise.uniforms_ref)(seeds, positions, purpose)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and has_triton()
