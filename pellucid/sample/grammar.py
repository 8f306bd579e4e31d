"""What a grammar lets come next, on its way from the host to a step's logits.

A mask holds for one place in the text, so a row with drafts has one for each of its logits.  It may come
late, while the forward already runs: all that is done before it is the same with and without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pellucid.kernels.mask_logits import mask_logits
from pellucid.sample.grammars.base import ANY_TOKEN
from pellucid.transfer import upload

# By row of the plan, for each of the row's logits: [n, ceil(V / 32)] int32, bit t % 32 of word t // 32 says
# whether token t may come (xgrammar's form).
Masks = Mapping[int, np.ndarray]


class Constrain(Protocol):
    """What a step's grammars make of its logits."""

    @property
    def reads_drafts(self) -> bool:
        """Does the host read the drafts that this step makes, before the next one verifies them?"""
        ...

    def __call__(self, logits: Tensor) -> None:
        """Change [S, this rank's share of V] in place."""
        ...


class Unconstrained:
    """No row has a grammar."""

    reads_drafts = False

    def __call__(self, logits: Tensor) -> None:
        pass


class Masked:
    """Bits [S, W] are applied.  first: the first token whose logits this rank has."""

    reads_drafts = True

    def __init__(self, bits: Tensor, first: int) -> None:
        self._bits, self._first = bits, first

    def __call__(self, logits: Tensor) -> None:
        mask_logits(logits, self._bits, self._first)


unconstrained = Unconstrained()


class TokenMasks:
    """Brings masks to the device.  first: the first token whose logits this rank has."""

    def __init__(self, vocab_size: int, device: torch.device, first: int = 0) -> None:
        self.num_words, self.device, self.first = -(-vocab_size // 32), device, first

    def room(self, num_logits: int) -> Tensor:
        """Bits for so many logits, [num_logits, W] int32: any token may come."""
        shape = (num_logits, self.num_words)
        return torch.full(shape, ANY_TOKEN, dtype=torch.int32, device=self.device)

    def ship(self, masks: Masks, num_sampled: np.ndarray) -> Tensor:
        """Bits [S, W] int32 of the logits of rows that sample at num_sampled [B] places.

        A row without a mask may go on with any token.
        """
        ends = np.cumsum(num_sampled)
        bits = np.full((int(ends[-1]), self.num_words), ANY_TOKEN, dtype=np.int32)
        for row, mask in masks.items():
            assert mask.shape == (num_sampled[row], self.num_words), (row, mask.shape, num_sampled[row])
            bits[ends[row] - num_sampled[row] : ends[row]] = mask
        return upload(bits, self.device)

    def constrain(self, bits: Tensor) -> Constrain:
        """Apply these bits [S, W]."""
        return Masked(bits, self.first)
