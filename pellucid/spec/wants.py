"""How many drafts each sequence wants: those that are likely enough to stand.

A step takes longer with each token in it, and all its rows wait.  With B rows, and `cheap_tokens` that take
as long as a step without any would, a token costs B / (B + cheap_tokens) of one that a row yields, so a draft
is worth it that stands with at least this chance.  The n-th does with rate ** n.  Each sequence teaches its
rate: of the drafts that were looked at, how many stood.  Who wants none teaches nothing more, so what is
known of it fades until it tries again.

Whether drafts pay at all is the switch's to say (switch.py), which goes by the clock.  A drafter with KV of
its own runs behind every step while it is on, so that its KV stays whole; when it goes off, those that run
have lost theirs, and want no drafts any more.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.schedule.plan import Column
from pellucid.schedule.step import Step
from pellucid.schedule.table import Table
from pellucid.spec.switch import Switch

LEAST_CHANCE = 0.1  # of a draft, however cheap tokens are: to propose it costs, too
# What nothing is known of, as if so many drafts had been looked at, and so many had stood.
FIRST_TRIES, FIRST_HITS = 0.5, 0.35
FORGETTING = 7 / 8  # with each verification
FADING = 15 / 16  # with each choice to want none


class Load(NamedTuple):
    """A plan that is under way: what its time will say."""

    num_rows: int  # 0: nothing, it has prompts in it, or is a change from one kind of steps to the other
    is_drafting: bool = False


class Wants:
    """Writes the column `want`."""

    def __init__(self, table: Table, most: int, cheap_tokens: int, *, keeps_kv: bool = False) -> None:
        """most: drafts of a row.  cheap_tokens: 0 if every sequence is always to have so many.

        keeps_kv: the drafter has KV of its own, which is whole only if it runs behind every step.
        """
        self._table, self._most, self._cheap_tokens = table, most, cheap_tokens
        # With forgetting: drafts that were looked at, up to the first that fell, and those that stood.
        self._tries: NDArray[np.float64] = np.zeros(len(table.want))
        self._hits = self._tries.copy()
        self._is_learning = most > 0 and cheap_tokens > 0
        self.switch = Switch()
        self._keeps_kv = keeps_kv
        self._has_lost = np.zeros(len(table.want), dtype=bool)  # the drafter's KV
        self._loads: deque[Load] = deque()  # of plans under way
        self._took: tuple[Load, float] | None = None
        self._was_proposing = False
        self.has_turned = False  # the switch, since the last choice

    def begin(self, slot: int) -> None:
        """A sequence enters."""
        self._table.want[slot] = self._most if self.switch.is_on else 0
        self._has_lost[slot] = False
        self._tries[slot] = self._hits[slot] = 0.0

    def num_propose(self, slots: Column) -> int:
        """Most drafts to be made behind these rows; one at least where a drafter's KV stays whole."""
        most = int(self._table.want[slots].max(initial=0))
        is_kept = self._keeps_kv and self.switch.is_on and not self._has_lost[slots].all()
        return max(most, 1) if is_kept else most

    def planned(self, step: Step) -> None:
        """A plan is complete."""
        if not self._is_learning:
            return
        is_proposing, is_verifying = step.num_propose > 0, step.draft is not None
        if self._keeps_kv and not is_proposing and not self.switch.is_brief:
            self._has_lost[step.decodes] = True
        is_steady = is_proposing == self._was_proposing and is_verifying <= is_proposing
        self._was_proposing = is_proposing
        num_rows = 0 if step.chunks or not is_steady else len(step.decodes)
        self._loads.append(Load(num_rows, is_proposing))

    def took(self, seconds: float) -> None:
        """The oldest plan has come home, so long after the one before it or after its own start."""
        if self._loads:
            self._took = self._loads.popleft(), seconds

    def landed(self, num_new: int) -> None:
        """All its rows together have yielded so many tokens."""
        if self._took is None:
            return
        (load, seconds), self._took = self._took, None
        if load.num_rows and num_new:
            was_on = self.switch.is_on
            self.switch.took(seconds, load.num_rows, num_new, is_drafting=load.is_drafting)
            self.has_turned |= was_on != self.switch.is_on

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
        self.has_turned = False
        if not self._is_learning or not len(slots):
            return
        if not self.switch.is_on:
            self._table.want[slots] = 0
            return
        none = slots[self._table.want[slots] == 0]
        self._tries[none] *= FADING
        self._hits[none] *= FADING
        rate = (self._hits[slots] + FIRST_HITS) / (self._tries[slots] + FIRST_TRIES)
        chance = max(LEAST_CHANCE, len(slots) / (len(slots) + self._cheap_tokens))
        num = np.log(chance) / np.log(np.minimum(rate, 1 - 1e-9))
        self._table.want[slots] = np.where(self._has_lost[slots], 0, np.minimum(num, self._most))
