"""Which tokens' logits this rank holds: all of them, or a slice of the vocabulary.

The plain draw needs no more than each rank's best (value, id); what looks at all logits gathers them first.
Legend: S logits, V vocab, L this rank's share of it, padding included.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pellucid.dist.collectives import Group


class Vocabulary(Protocol):
    """The vocabulary as this rank sees it."""

    def own(self, table: Tensor) -> Tensor:
        """Of a table [V, ...] the entries of the tokens that are this rank's."""
        ...

    def argmax(self, scores: Tensor) -> Tensor:
        """[S] int64, ids of the highest of all ranks' scores [S, L], the lower id in a tie."""
        ...

    def whole(self, logits: Tensor) -> Tensor:
        """[S, L] -> [S, V], the same on every rank."""
        ...

    def trim(self, logits: Tensor) -> Tensor:
        """[S, L] without the padding."""
        ...


class WholeVocabulary:
    """This rank holds all logits."""

    def own(self, table: Tensor) -> Tensor:
        return table

    def argmax(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)

    def whole(self, logits: Tensor) -> Tensor:
        return logits

    def trim(self, logits: Tensor) -> Tensor:
        return logits


class SplitVocabulary:
    """Each rank holds an equal slice; the last ones are padded."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        self._group, self._vocab_size = group, vocab_size
        share = -(-vocab_size // group.size)
        self._first = min(group.rank * share, vocab_size)
        self._num = min(share, vocab_size - self._first)

    def own(self, table: Tensor) -> Tensor:
        return table[self._first : self._first + self._num]

    def argmax(self, scores: Tensor) -> Tensor:
        best = scores.new_full((len(scores), 2), -float("inf"), dtype=torch.float64)
        best[:, 1] = self._vocab_size
        if self._num:
            values, index = scores.max(-1)
            # A float64 holds a float32 and a token id exactly, so one message carries both.
            best[:, 0], best[:, 1] = values, index + self._first
        values, ids = self._group.gather(best).unbind(-1)  # [size, S] each
        return ids.where(values == values.amax(0), self._vocab_size - 1).amin(0).long()

    def whole(self, logits: Tensor) -> Tensor:
        parts = self._group.gather(logits)  # [size, S, L]
        return parts.transpose(0, 1).reshape(len(logits), -1)[:, : self._vocab_size]

    def trim(self, logits: Tensor) -> Tensor:
        return logits[:, : self._num]


WHOLE_VOCABULARY = WholeVocabulary()


def vocabulary(group: Group, vocab_size: int) -> Vocabulary:
    """The share of this rank of the group."""
    return WHOLE_VOCABULARY if group.size == 1 else SplitVocabulary(group, vocab_size)
