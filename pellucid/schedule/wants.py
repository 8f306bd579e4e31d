"""How many drafts each sequence wants: those that are likely enough to stand.

A step takes longer with each token in it, and all its rows wait.  With B rows, and `cheap_tokens` that take
as long as a step without any would, a token costs B / (B + cheap_tokens) of one that a row yields, so a draft
is worth it that stands with at least this chance.  The n-th does with rate ** n.  Each sequence teaches its
rate: of the drafts that were looked at, how many stood.  Who wants none teaches nothing more, so what is
known of it fades until it tries again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pellucid.schedule.plan import Column
from pellucid.schedule.table import Table

LEAST_CHANCE = 0.1  # of a draft, however cheap tokens are: to propose it costs, too
# What nothing is known of, as if so many drafts had been looked at, and so many had stood.
FIRST_TRIES, FIRST_HITS = 0.5, 0.35
FORGETTING = 7 / 8  # with each verification
FADING = 15 / 16  # with each choice to want none


class Wants:
    """Writes the column `want`."""

    def __init__(self, table: Table, most: int, cheap_tokens: int) -> None:
        """most: drafts of a row.  cheap_tokens: 0 if every sequence is always to have so many."""
        self._table, self._most, self._cheap_tokens = table, most, cheap_tokens
        # With forgetting: drafts that were looked at, up to the first that fell, and those that stood.
        self._tries: NDArray[np.float64] = np.zeros(len(table.want))
        self._hits = self._tries.copy()
        self._is_learning = most > 0 and cheap_tokens > 0

    def begin(self, slot: int) -> None:
        """A sequence enters."""
        self._table.want[slot] = self._most
        self._tries[slot] = self._hits[slot] = 0.0

    def learn(self, slots: Column, draft: Column, num_new: NDArray[np.int32]) -> None:
        """Rows with so many drafts, or none, have yielded so many tokens."""
        has_drafts = (draft > 0) & (num_new > 0)
        if not self._is_learning or not np.count_nonzero(has_drafts):
            return
        slots, draft, num_new = slots[has_drafts], draft[has_drafts], num_new[has_drafts]
        self._tries[slots] = self._tries[slots] * FORGETTING + np.minimum(num_new, draft)
        self._hits[slots] = self._hits[slots] * FORGETTING + num_new - 1

    def choose(self, slots: Column) -> None:
        """Those that run want as many from now on as they are worth."""
        if not self._is_learning or not len(slots):
            return
        none = slots[self._table.want[slots] == 0]
        self._tries[none] *= FADING
        self._hits[none] *= FADING
        rate = (self._hits[slots] + FIRST_HITS) / (self._tries[slots] + FIRST_TRIES)
        chance = max(LEAST_CHANCE, len(slots) / (len(slots) + self._cheap_tokens))
        num = np.log(chance) / np.log(np.minimum(rate, 1 - 1e-9))
        self._table.want[slots] = np.minimum(num, self._most)
