"""How many drafts each sequence wants: those that are likely enough to stand.

A step takes longer with each draft in it, and all its rows wait.  What one more for every row costs is
measured (switch.py), in tokens that a row would have got meanwhile: a draft is worth it that stands with at
least this chance.  The n-th does with rate ** n.  Each sequence teaches its rate: of the drafts that were
looked at, how many stood; what nothing is known of goes by what others have taught.  Who wants none teaches
nothing more, so what is known of it fades until it tries again.

Whether drafts pay at all is the switch's to say.  A drafter with KV of its own runs behind every step while
it is on, so that its KV stays whole; who runs or enters while it is off has none, and never wants drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.schedule.plan import Column
from pellucid.schedule.step import Step
from pellucid.schedule.table import Table
from pellucid.spec.switch import Switch

LEAST_CHANCE, MOST_CHANCE = 0.05, 0.98  # of a draft, however cheap or dear it is
# What nothing is known of a sequence, as if so many of its drafts had been looked at.
FIRST_TRIES, FIRST_RATE = 4.0, 0.7
FORGETTING = 7 / 8  # with each verification
FADING = 15 / 16  # with each choice to want none
OTHERS = 64  # drafts: what was looked at so long ago in any sequence hardly counts any more


class Load(NamedTuple):
    """A plan that is under way: what its time will say."""

    num_rows: int  # 0: nothing, it has prompts in it
    num_drafts: int = 0  # that it verifies, if it makes others, too
    is_plain: bool = True  # it does neither


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
        # Of any sequence's drafts, with forgetting.
        self._all_tries = self._all_hits = 0.0
        self.has_switched = False  # the switch, since the last choice
        self._num_rows = 1  # of the last plan

    def begin(self, slot: int) -> None:
        """A sequence enters."""
        self._tries[slot] = self._hits[slot] = 0.0
        if not self._is_learning:
            self._table.want[slot] = self._most
            return
        self._has_lost[slot] = self._keeps_kv and not self._may_follow
        self._table.want[slot] = 0
        if self.switch.is_on:
            self._choose(np.array([slot]), self._num_rows)

    @property
    def _may_follow(self) -> bool:
        """Are those that enter to have KV of the drafter's?"""
        return self.switch.is_on or self.switch.is_looking or self.switch.is_due

    def num_propose(self, slots: Column, chunks: Sequence[int]) -> int:
        """Most drafts to be made behind these rows; one at least where a drafter's KV stays whole.

        chunks: slots with a part of a prompt, whether or not they are among the others.
        """
        most = int(self._table.want[slots].max(initial=0))
        if most or not self._keeps_kv:
            return most
        follows = (self.switch.is_on or not self._is_learning) and not self._has_lost[slots].all()
        return int(follows or not self._has_lost[list(chunks)].all())

    def planned(self, step: Step) -> None:
        """A plan is complete."""
        if not self._is_learning:
            return
        is_proposing, num_drafts = step.num_propose > 0, step.num_drafts
        if self._keeps_kv and not is_proposing and not self.switch.is_looking:
            self._has_lost[step.decodes] = True
        self._num_rows = max(1, step.num_rows)
        num_rows = 0 if step.chunks else len(step.decodes)
        is_plain = not is_proposing and not num_drafts
        self._loads.append(Load(num_rows, num_drafts if is_proposing else 0, is_plain))

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
            self.switch.took(seconds, load.num_rows, num_new, load.num_drafts, is_plain=load.is_plain)
            self.has_switched |= was_on != self.switch.is_on

    def learn(self, slots: Column, draft: Column, num_new: NDArray[np.int32]) -> None:
        """Rows with so many drafts, or none, have yielded so many tokens."""
        has_drafts = (draft > 0) & (num_new > 0)
        if not self._is_learning or not np.count_nonzero(has_drafts):
            return
        slots, draft, num_new = slots[has_drafts], draft[has_drafts], num_new[has_drafts]
        tries, hits = np.minimum(num_new, draft), num_new - 1
        self._tries[slots] = self._tries[slots] * FORGETTING + tries
        self._hits[slots] = self._hits[slots] * FORGETTING + hits
        num = float(tries.sum())
        kept = OTHERS / (OTHERS + num)
        self._all_tries = kept * self._all_tries + num
        self._all_hits = kept * self._all_hits + float(hits.sum())

    def choose(self, slots: Column) -> None:
        """Those that run want as many from now on as they are worth."""
        least, self.has_switched = int(self.has_switched), False  # what has just begun is to be tried
        if not self._is_learning or not len(slots):
            return
        if not self.switch.is_on:
            self._table.want[slots] = 0
            return
        none = slots[self._table.want[slots] == 0]
        self._tries[none] *= FADING
        self._hits[none] *= FADING
        if len(none) == len(slots):
            self._all_tries *= FADING
            self._all_hits *= FADING
        self._choose(slots, len(slots), least)

    def _choose(self, slots: Column, num_rows: int, least: int = 0) -> None:
        """For these, of so many rows."""
        price = self.switch.price(num_rows)
        chance = num_rows / (num_rows + self._cheap_tokens) if price is None else price
        chance = min(max(LEAST_CHANCE, chance), MOST_CHANCE)
        first = (self._all_hits + FIRST_RATE) / (self._all_tries + 1)
        rate = (self._hits[slots] + FIRST_TRIES * first) / (self._tries[slots] + FIRST_TRIES)
        num = np.log(chance) / np.log(np.clip(rate, 1e-9, 1 - 1e-9))
        self._table.want[slots] = np.where(self._has_lost[slots], 0, np.clip(num, least, self._most))
