"""Which tokens' logits this rank holds: all of them, or a slice of the vocabulary.

The plain draw needs no more than each rank's best (value, id); what looks at all logits gathers them first.
Legend: S logits, V vocab, L this rank's share of it, padding included.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pellucid.dist.collectives import Group
from pellucid.dist.vocab_share import vocab_share
from pellucid.kernels.ranks.all_reduce import MAX_WORDS, best_of_ranks
from pellucid.native.between import highest


class Vocabulary(Protocol):
    """The vocabulary as this rank sees it."""

    first: int  # the first token whose logits this rank has

    def argmax(self, scores: Tensor) -> Tensor:
        """[S] ids, integers, of the highest of all ranks' scores [S, L], the lower id in a tie."""
        ...

    def agree(self, values: Tensor, index: Tensor) -> Tensor:
        """[S] ids of the highest of all ranks' values, given each one's best [S] and its place [S] in L."""
        ...

    def whole(self, logits: Tensor) -> Tensor:
        """[S, L] -> [S, V], the same on every rank."""
        ...

    def trim(self, logits: Tensor) -> Tensor:
        """[S, L] without the padding."""
        ...


class WholeVocabulary:
    """This rank holds all logits."""

    first = 0

    def argmax(self, scores: Tensor) -> Tensor:
        places = highest(scores)
        return scores.argmax(-1) if places is None else places

    def agree(self, values: Tensor, index: Tensor) -> Tensor:
        return index

    def whole(self, logits: Tensor) -> Tensor:
        return logits

    def trim(self, logits: Tensor) -> Tensor:
        return logits


class SplitVocabulary:
    """Each rank holds an equal slice, of whole blocks; the last ones are padded."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        self._group, self._vocab_size = group, vocab_size
        share = vocab_share(vocab_size, group.size)
        self.first = min(group.rank * share, vocab_size)
        self._num = min(share, vocab_size - self.first)

    def argmax(self, scores: Tensor) -> Tensor:
        if self._num:
            return self.agree(*scores.max(-1))
        # In float32, as others draw: ranks whose values differ in type would speak in different ways.
        nothing = scores.new_full((len(scores),), -float("inf"), dtype=torch.float32)
        return self.agree(nothing, torch.zeros_like(nothing))

    def agree(self, values: Tensor, index: Tensor) -> Tensor:
        mailbox = self._group.mailbox
        if mailbox is not None and values.dtype == torch.float32 and 0 < len(values) <= MAX_WORDS // 2:
            return best_of_ranks(values, index.int() + self.first, mailbox)
        # A float64 holds a float32 and a token id exactly, so one message carries both.
        best = torch.stack((values.double(), index.double() + self.first), dim=-1)
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
