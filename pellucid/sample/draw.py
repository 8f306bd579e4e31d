"""The draw: a token of softmax(logits / T), and at T = 0 the argmax.

In two stages, first a block of tokens and then one of them, by Gumbel noise of their own:
kernels/sampling/sample.py has the definition.  One object draws for all steps of an engine, so a row's
token does not depend on what else its batch asks for.  Legend: S logits, V vocab (or a rank's share of
it), B blocks of tokens.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.sampling.noise import keys_ref
from pellucid.kernels.sampling.sample import BLOCK_TOKENS, UNITS, draw
from pellucid.platform import has_triton
from pellucid.sample.noise import Purpose, gumbel_of
from pellucid.sample.state import Column, LogitsBatch, SamplingState, Trait
from pellucid.sample.vocabulary import Vocabulary

# Elements of one [rows, V] tensor: 128 MiB of each of a few.
_SLICE_ELEMENTS = 1 << 25


class Draw(Protocol):
    """Draws one token from each row of logits, greedy and random rows alike."""

    def __call__(self, logits: Tensor, batch: LogitsBatch, vocabulary: Vocabulary) -> Tensor:
        """[S] int32.  logits: [S, V], those that are this rank's by `vocabulary`, of any float type."""
        ...


def choose_draw(state: SamplingState) -> Draw:
    """Kernels on a GPU, where Triton is installed; torch anywhere else."""
    if state.device.type == "cuda" and has_triton():
        return FusedDraw(state)
    return TorchDraw(state)


class TorchDraw:
    """Draws for a bounded number of rows at a time."""

    def __init__(self, state: SamplingState) -> None:
        self.state = state
        self._purposes = torch.tensor([[Purpose.BLOCK], [Purpose.DRAW]], device=state.device)

    def __call__(self, logits: Tensor, batch: LogitsBatch, vocabulary: Vocabulary) -> Tensor:
        if Trait.RANDOM not in batch.traits or logits.shape[1] == 0:  # all greedy, or padding alone
            return vocabulary.argmax(logits).int()
        params = self.state.params(batch.slots)
        size = max(1, _SLICE_ELEMENTS // self.state.vocab_size)
        keys = keys_ref(params.ints(Column.SEED), batch.positions, self._purposes)
        temperature = params.floats(Column.TEMPERATURE)[:, None]
        parts = zip(logits.split(size), keys.split(size, dim=1), temperature.split(size), strict=True)
        drawn = [self._draw(*part, first=vocabulary.first) for part in parts]
        values, places = (torch.cat(column) for column in zip(*drawn, strict=True))
        return vocabulary.agree(values, places).int()

    def _draw(
        self, logits: Tensor, keys: Tensor, temperature: Tensor, *, first: int
    ) -> tuple[Tensor, Tensor]:
        """The highest score of a block [S] float32, and the place of the token drawn in it [S] int64.

        keys: [2, S], of the blocks' noise and of the tokens'.  temperature: [S, 1].
        """
        padded = F.pad(logits.float(), (0, -logits.shape[1] % BLOCK_TOKENS), value=-float("inf"))
        blocks = padded.unflatten(1, (-1, BLOCK_TOKENS))
        codes = self.state.block_codes[first // BLOCK_TOKENS :][: blocks.shape[1]]
        values, block = block_scores(blocks, temperature, gumbel_of(keys[0], codes)).max(-1)
        places = block[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=logits.device)
        tokens = (first + places).clamp_(max=self.state.vocab_size - 1)  # padding's noise is anyone's
        scores = gumbel_of(keys[1], self.state.codes[tokens]).mul_(temperature).add_(padded.gather(1, places))
        return values, places.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def block_scores(blocks: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """T * logsumexp(logits / T) + T * noise of every block, at T = 0 its highest logit: [S, B] float32.

    blocks: [S, B, BLOCK_TOKENS] float32.  temperature: [S, 1].  noise: [S, B].
    """
    highest = blocks.amax(-1)
    shares = (blocks - highest[:, :, None]).div_(temperature[:, :, None]).exp_()
    # A sum of integers, which no order of adding changes: see kernels/sampling/sample.py.
    num_units = shares.add_(2.0).view(torch.int32).sum(-1, dtype=torch.int32)
    log_mass = num_units.float().log_().sub_(math.log(UNITS.value))
    scores = log_mass.add_(noise).mul_(temperature).add_(highest)
    return scores.where((temperature > 0) & highest.isfinite(), highest)


class FusedDraw:
    """Two kernels: kernels/sampling/sample.py."""

    def __init__(self, state: SamplingState) -> None:
        self.state = state

    def __call__(self, logits: Tensor, batch: LogitsBatch, vocabulary: Vocabulary) -> Tensor:
        if logits.shape[1] == 0:  # a rank that holds padding alone
            return vocabulary.argmax(logits).int()
        table = self.state.table
        values, index = draw(
            logits,
            self.state.block_codes,
            table[:, Column.SEED],
            table.view(torch.float64)[:, Column.TEMPERATURE],
            batch.slots,
            batch.positions,
            first=vocabulary.first,
        )
        return vocabulary.agree(values, index).int()
