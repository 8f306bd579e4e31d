"""How many drafts each sequence wants: those by which the step yields the most tokens for its time.

The n-th draft of a sequence stands with rate ** n.  Each sequence teaches its rate: of the drafts that were
looked at, how many stood; what nothing is known of goes by what others have taught.  What passes and drafts
take of a step is measured (costs.py), in plain steps.  A draft is worth it that stands with at least the
chance by which a row would have got a token meanwhile; of all numbers of passes the one is taken by which
tokens for time are the most.  If that is none, or the account of what drafts have cost is empty (switch.py),
nobody gets any, until a trial, in which a few rows have one each.  A drafter that reads the text alone needs
no trials: what it would have brought is read off the texts (echoes.py).

A drafter with KV of its own runs behind every step while the switch is on, so that its KV stays whole; who
runs or enters while it is off has none, and never wants drafts.
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
from pellucid.spec.costs import Numbers, StepCosts
from pellucid.spec.drafter import Drafter
from pellucid.spec.echoes import NUM_TOKENS, num_foretold
from pellucid.spec.switch import Switch

LEAST_CHANCE = 0.05  # of a draft, however cheap it is
# What nothing is known of a sequence, as if so many of its drafts had been looked at.
FIRST_TRIES, FIRST_RATE = 4.0, 0.7
TRIES_A_ROW, MOST_TRIES = 0.25, 16.0
FORGETTING = 7 / 8  # with each verification
OTHERS = 64  # drafts: what was looked at so long ago in any sequence hardly counts any more
KEPT_FOR_TRIAL = 1 / 8  # of what has been taught, when it is asked anew
TRIAL_ROWS = 16
# Tokens for a plain step's time: rows with drafts end one by one, and leave steps less full.
LEAST_GAIN = 1.04
ECHO_ROWS, ECHO_GAIN = 4, 1.1  # whose texts are looked at; tokens for a plain step's time, to begin
AGAIN = 4  # steps with drafts, behind which is chosen anew


class Load(NamedTuple):
    """A plan that is under way: what its time will say."""

    num_rows: int
    num_drafts: int  # that it verifies
    passes: int  # drafts that it makes for each row
    num_tokens: int  # that it computes, if there are prompts among them


class Wants:
    """Writes the column `want`."""

    def __init__(
        self, table: Table, most: int, cheap_tokens: int, *, drafter: Drafter = Drafter.STATELESS
    ) -> None:
        """most: drafts of a row.  cheap_tokens: 0 if every sequence is always to have so many."""
        keeps_kv, self._reads_text = drafter is Drafter.KEEPS_KV, drafter is Drafter.READS_TEXT
        most = 0 if drafter is Drafter.NONE else most
        self._table, self._most = table, most
        # With forgetting: drafts that were looked at, up to the first that fell, and those that stood.
        self._tries: NDArray[np.float64] = np.zeros(len(table.want))
        self._hits = self._tries.copy()
        self._is_learning = most > 0 and cheap_tokens > 0
        self.switch = Switch(tries=not self._reads_text)
        self.costs = StepCosts(cheap_tokens, takes_passes=keeps_kv)
        self._keeps_kv = keeps_kv
        self._has_lost = np.zeros(len(table.want), dtype=bool)  # the drafter's KV
        self._loads: deque[Load] = deque()  # of plans under way
        self._took: tuple[Load, float] | None = None
        # Of any sequence's drafts, with forgetting.
        self._all_tries = self._all_hits = 0.0
        self.has_switched = False  # the switch, or enough has been learnt: it is time to choose
        self._has_begun, self._num_drafting = False, 0  # a trial; steps with drafts since the last choice
        self._num_looks = 0  # at texts
        self._num_rows = 1  # of the last plan
        self._gain = 1.0  # tokens for a plain step's time, as was expected when it was last chosen

    def begin(self, slot: int) -> None:
        """A sequence enters."""
        self._tries[slot] = self._hits[slot] = 0.0
        if not self._is_learning:
            self._table.want[slot] = self._most
            return
        self.switch.entered(self._num_rows)
        self._has_lost[slot] = self._keeps_kv and not self._may_follow
        self._table.want[slot] = 0
        if self.switch.is_trying:
            self._table.want[slot] = not self._has_lost[slot]
        elif self.switch.is_on:
            self._table.want[slot] = self._worth(np.array([slot]), self._num_rows)[1][0]

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
        if self._keeps_kv and not step.num_propose and not self.switch.is_looking:
            self._has_lost[step.decodes] = True
        self._num_rows = max(1, step.num_rows)
        num_tokens = step.num_tokens if step.chunks else 0
        self._loads.append(Load(step.num_rows, step.num_drafts, step.num_propose, num_tokens))

    def took(self, seconds: float) -> None:
        """The oldest plan has come home, so long after the one before it or after its own start."""
        if self._loads:
            self._took = self._loads.popleft(), max(seconds, 1e-9)

    def landed(self, num_new: int) -> None:
        """All its rows together have yielded so many tokens."""
        if self._took is None:
            return
        (load, seconds), self._took = self._took, None
        switch, was = self.switch, (self.switch.is_on, self.switch.is_trying)
        plain = self.costs.plain_seconds(load.num_rows) if load.num_rows else None
        if load.num_tokens and self._keeps_kv:
            took = self.costs.add_prompt(load.num_tokens, seconds, is_followed=load.passes > 0)
            switch.followed(took / plain if plain else 0.0)
        elif load.num_tokens:
            pass  # it says nothing
        elif not load.passes and not load.num_drafts:
            switch.plain()
            self.costs.add_plain(load.num_rows, seconds)
        elif load.num_rows and num_new:
            drafts = load.num_drafts / load.num_rows
            took = self.costs.add(load.num_rows, max(1, load.passes), drafts, seconds)
            if took is None or plain is None:
                switch.look()
            else:
                self._num_drafting += 1
                switch.drafted(num_new / load.num_rows, took, plain, load.num_drafts)
                if switch.is_on and not switch.is_trying and switch.is_stale(self._gain):
                    switch.look()
        self._has_begun |= switch.is_trying and not was[1]
        self.has_switched |= was != (switch.is_on, switch.is_trying) or self._num_drafting >= AGAIN

    def learn(self, slots: Column, draft: Column, num_new: NDArray[np.int32]) -> None:
        """Rows with so many drafts, or none, have yielded so many tokens."""
        if not self._is_learning:
            return
        has_drafts = (draft > 0) & (num_new > 0)
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
        has_begun, self._has_begun = self._has_begun, False
        self.has_switched, self._num_drafting = False, 0
        if not self._is_learning or not len(slots):
            return
        switch, want = self.switch, self._table.want
        if has_begun:  # a trial: what is known of drafts may hold no more
            self._all_tries *= KEPT_FOR_TRIAL
            self._all_hits *= KEPT_FOR_TRIAL
            self._tries[slots] *= KEPT_FOR_TRIAL
            self._hits[slots] *= KEPT_FOR_TRIAL
        able = slots[~self._has_lost[slots]]
        want[slots] = 0
        if self._reads_text and switch.may_begin:
            self._look_for_echoes(slots)
        if not switch.is_on or not len(able):
            return
        if switch.is_trying:
            want[able[:: -(-len(able) // TRIAL_ROWS)]] = 1
            return
        self._gain, worth = self._worth(able, len(slots))
        if self._gain < LEAST_GAIN:
            switch.give_up()
            return
        switch.keep()
        want[able] = worth

    def _look_for_echoes(self, slots: Column) -> None:
        """Begin if the ends of some texts were foretold, which costs nothing to find out."""
        self._num_looks += 1
        some = np.roll(slots, -self._num_looks * ECHO_ROWS)[:ECHO_ROWS]
        found = sum(num_foretold(self._table.tokens(slot)) for slot in some.tolist())
        num = NUM_TOKENS * len(some)
        self._all_tries, self._all_hits = float(num), float(found)
        self._tries[slots] = self._hits[slots] = 0.0
        self._gain = self._worth(slots, len(slots))[0]
        if self._gain >= ECHO_GAIN:
            self.switch.begin()

    def _worth(self, slots: Column, num_rows: int) -> tuple[float, Column]:
        """Tokens for a plain step's time, at best, and by how many drafts of each; of all rows as of these.

        So a drafter that most rows have no KV of is kept, until they have left or the account is empty.
        """
        first = (self._all_hits + FIRST_RATE) / (self._all_tries + 1)
        tries = min(FIRST_TRIES + TRIES_A_ROW * num_rows, MOST_TRIES)
        rates = (self._hits[slots] + tries * first) / (self._tries[slots] + tries)
        chances = np.power(np.minimum(rates, 1.0)[:, None], np.arange(1.0, 1 + self._most))  # [rows, drafts]
        gain, _ = self._best(chances, num_rows, 1.0)
        return self._best(chances, num_rows, gain)  # which hardly depends on what is expected

    def _best(self, chances: Numbers, num_rows: int, gain: float) -> tuple[float, Column]:
        """By the passes with the most tokens for time.  gain: tokens that a plain step's time is to yield."""
        costs, most = self.costs, min(self._most, 2 * self.costs.most_passes(num_rows))
        is_worth = chances[:, :most] >= max(LEAST_CHANCE, float(costs.parts(num_rows)[2]) * gain)
        tokens = 1 + np.where(is_worth, chances[:, :most], 0.0).mean(axis=0).cumsum()
        drafts = is_worth.mean(axis=0).cumsum()
        gains = tokens / (1 + costs.extra(num_rows, np.arange(1.0, 1 + most), drafts))
        best = int(np.argmax(gains))
        return float(gains[best]), np.count_nonzero(is_worth[:, : best + 1], axis=1).astype(np.int64)
