"""The draw: argmax(logits + T * gumbel) is a token of softmax(logits / T), and at T = 0 it is argmax.

One object draws for all steps of an engine, so a row's token does not depend on what else its batch asks for.
Legend: S logits, V vocab.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pellucid.platform import has_triton
from pellucid.sample.noise import gumbel
from pellucid.sample.state import Column, Feature, LogitsBatch, SamplingState
from pellucid.sample.vocabulary import Vocabulary

# Elements of one [rows, V] noise tensor: 256 MiB while it is int64.
_SLICE_ELEMENTS = 1 << 25


class Draw(Protocol):
    """Draws one token from each row of logits, greedy and random rows alike."""

    def __call__(self, logits: Tensor, batch: LogitsBatch, vocabulary: Vocabulary) -> Tensor:
        """[S] int32.  logits: [S, V], those that are this rank's by `vocabulary`, of any float type."""
        ...


def choose_draw(state: SamplingState) -> Draw:
    """One kernel on a GPU, where Triton is installed; torch anywhere else."""
    if state.device.type == "cuda" and has_triton():
        return FusedDraw(state)
    return TorchDraw(state)


class TorchDraw:
    """Makes the noise of a bounded number of rows at a time."""

    def __init__(self, state: SamplingState) -> None:
        self.state = state

    def __call__(self, logits: Tensor, batch: LogitsBatch, vocabulary: Vocabulary) -> Tensor:
        if Feature.RANDOM not in batch.features:
            return vocabulary.argmax(logits).int()
        params = self.state.params(batch.slots)
        size = max(1, _SLICE_ELEMENTS // self.state.vocab_size)
        codes = vocabulary.own(self.state.codes)
        columns = (params.ints(Column.SEED), batch.positions, params.floats(Column.TEMPERATURE), logits)
        drawn = []
        for seeds, places, temperature, part in zip(*(column.split(size) for column in columns), strict=True):
            noise = gumbel(seeds, places, codes)
            drawn.append(vocabulary.argmax(noise.mul_(temperature[:, None]).add_(part.float())))
        return torch.cat(drawn).int()


class FusedDraw:
    """One pass over the logits, with the noise made on the way: kernels/sample.py."""

    def __init__(self, state: SamplingState) -> None:
        from pellucid.kernels.sample import draw  # where Triton is installed

        self.state, self._draw = state, draw

    def __call__(self, logits: Tensor, batch: LogitsBatch, vocabulary: Vocabulary) -> Tensor:
        codes, table = vocabulary.own(self.state.codes), self.state.table
        if len(codes) == 0:  # a rank that holds padding alone
            return vocabulary.argmax(logits).int()
        values, index = self._draw(
            logits,
            codes,
            table[:, Column.SEED],
            table.view(torch.float64)[:, Column.TEMPERATURE],
            batch.slots,
            batch.positions,
        )
        return vocabulary.agree(values, index).int()
