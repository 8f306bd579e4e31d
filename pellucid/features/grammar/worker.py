"""Masks on their way from the host to a step's logits, and drafts on their way back.

A mask holds for one place in the text, so a row with drafts has one for each of its logits.  It comes late,
while the forward already runs: all that is done before it is the same with and without.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pellucid.features.base import Halves, Home, WorkerFacts, WorkerFeature, Yielded
from pellucid.features.grammar.host import Drafts, ForcedDrafts, Masks
from pellucid.kernels.sampling.mask_logits import mask_logits
from pellucid.rows import StepRows
from pellucid.sample.grammars.base import ANY_TOKEN
from pellucid.transfer import upload
from pellucid.worker.inputs import StepCounts

NAME = "grammar"


class TokenMasks(WorkerFeature):
    """Constrained decoding, in a worker."""

    halves = Halves.SPLIT

    def __init__(self, facts: WorkerFacts) -> None:
        self._num_words, self._device = -(-facts.vocab_size // 32), facts.device
        self._first = facts.sampler.vocabulary.first  # the first token whose logits this rank has
        self._token_ids = facts.slots.token_ids
        self._has_drafts, self._slots = facts.shape.num_drafts > 0, facts.slots
        self._room = self._bits = self._any(0)

    def make_room(self, most: int) -> None:
        self._room = self._bits = self._any(most)

    def before(self, counts: StepCounts, ride: ForcedDrafts | None) -> None:
        """What grammars force takes its place behind texts, where drafts are; a chain, even among trees."""
        if ride is None:
            return
        cells = [
            (counts.slots[row], ride.places[row] + number, number, token)
            for row, drafts in ride.rows.items()
            for number, token in enumerate(drafts)
        ]
        slots, places, numbers, tokens = upload(np.array(cells, dtype=np.int64).T.copy(), self._device)
        self._token_ids[slots, places] = tokens.int()
        if (trees := self._slots.trees(slots)) is not None:
            trees.parents[slots, numbers] = numbers.to(trees.parents.dtype)

    def fill(self, counts: StepCounts, late: Masks) -> None:
        """A row without a mask may go on with any token."""
        ends = np.cumsum(counts.num_sampled)
        bits = np.full((int(ends[-1]), self._num_words), ANY_TOKEN, dtype=np.int32)
        for row, mask in late.rows.items():
            num = counts.num_sampled[row]
            bits[ends[row] - num : ends[row]] = np.frombuffer(mask, np.int32).reshape(num, self._num_words)
        self._bits = upload(bits, self._device)
        if len(bits) <= len(self._room):
            self._room[: len(bits)].copy_(self._bits)
            self._bits = self._room

    def clear(self, counts: StepCounts) -> None:
        self._room[: int(counts.num_sampled.sum())].fill_(ANY_TOKEN)
        self._bits = self._room

    def between(self, rows: StepRows, logits: Tensor) -> None:
        mask_logits(logits, self._bits[: len(logits)], self._first)

    def after(self, rows: StepRows, yielded: Yielded) -> Home | None:
        """The host must see the drafts before the next step verifies them, and see that there are none.

        A tree's are read by nobody: rows with a grammar have those alone that it forces.
        """
        if not self._has_drafts:
            return None
        is_tree = self._slots.shape.tree_depth > 0
        return Home([yielded.drafts[:, :0] if is_tree else yielded.drafts], read_drafts)

    def _any(self, num_logits: int) -> Tensor:
        """[num_logits, W] int32: any token may come."""
        shape = (num_logits, self._num_words)
        return torch.full(shape, ANY_TOKEN, dtype=torch.int32, device=self._device)


def read_drafts(
    counts: StepCounts, num_new: np.ndarray, arrays: list[np.ndarray], failed: dict[int, str]
) -> Drafts:
    drafts = arrays[0]
    return Drafts({row: drafts[row].tolist() for row in counts.riders.rows_of(NAME).tolist() if num_new[row]})
