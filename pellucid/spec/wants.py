"""How many drafts each sequence wants: those that are worth most for the time that they take.

The n-th draft of a sequence stands with rate ** n; those of trees share the chances of their depths
(chances.py).  Each sequence teaches its rate: of the drafts that were looked at, how many stood; what nothing
is known of goes by what others have taught.  What steps with so many drafts take is known from the start, or
guessed, and measured (costs.py), in plain steps.  Of all rows' drafts together those are taken that are worth
most (worth.py), no more than the account of what drafts have cost (switch.py) has enough for
if all fall.  If that is no more than without, or the account is empty, nobody gets any, until a trial, in
which some rows have a few.  What a drafter that reads texts would have brought is read off them (echoes.py);
one that reads the request's own alone needs no trials.

A drafter with KV of its own runs behind every step while the switch is on, so that its KV stays whole; who
runs or enters while it is off has none, and never wants drafts.  So it is not given up in doubt, nor at once
where drafts have paid; and prompts are followed only where drafts may pay for that (switch.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pellucid.schedule.plan import Column
from pellucid.schedule.step import SchedulerOptions, Step
from pellucid.schedule.table import Table
from pellucid.spec.chances import Chances, Numbers
from pellucid.spec.costs import StepCosts
from pellucid.spec.drafter import UNTIMED, Drafter, Timings
from pellucid.spec.echoes import NUM_TOKENS, Echoes
from pellucid.spec.switch import TRIAL, Switch
from pellucid.spec.worth import UNKNOWN_RATE, Lately, Worth, best_of, rates_of

FORGETTING = 7 / 8  # with each verification
SLOWEST_COUNTS = 0.5  # where nobody waits; rows that have got less than others may yet get more
BEGINNING = 8  # drafts that are looked at: so many of a sequence are like the first ones of others
# Steps with drafts between two choices: at first, and at most, as scheduler.py chooses every so many steps in
# any case.  The interval doubles while each step pays and the choice stays the same.
AGAIN, MOST_AGAIN = 2, 8
AT_RISK = 3  # steps that are planned before the first of them has come home
# Tokens beyond those of a plain step's time, for each doubling of the rows: rows with drafts end one by one,
# and leave steps less full.
GAIN_A_DOUBLING = 0.015
# Of a trial: at most so many rows, or a quarter; steps; and drafts; in each row as many as make a step longer
# by no more than twice what one does, nor than half; and what is kept of what has been taught.
TRIAL_ROWS, TRIAL_STEPS, TRIAL_DRAFTS, TRIAL_COST, TRIAL_MOST, KEPT_FOR_TRIAL = 16, 4, 32, 2.0, 0.5, 1 / 32
LEAST_STEPS = 2  # that verify drafts, for which the account must have enough
RECKONING = 64  # choices, behind which is reckoned anew what trials take
# A drafter with KV may lose this part of what it has gained, lately, before it is given up; how fast that is
# learnt and forgotten, with each choice.
HOPE, HOPING, DESPAIRING = 0.1, 1 / 8, 1 / 64
# Rows whose texts are looked at; and before drafts begin.  As how many drafts that counts for each row: few,
# so that what comes of them soon counts for more.
ECHO_ROWS, MOST_ECHO_ROWS, ECHO_TRIES = 4, 16, 4.0
MOST_AT_RISK = 4.0  # plain steps that a step with them may take beside
# Tokens for a plain step's time, to begin without a trial, and with nothing in the account.
FIRST_GAIN, SURE_GAIN = 1.1, 1.25


class Load(NamedTuple):
    """A plan that is under way: what its time will say."""

    num_rows: int
    num_drafts: int = 0  # that it verifies
    passes: int = 0  # drafts that it makes for each row
    num_tokens: int = 0  # that it computes, if there are prompts among them
    num_decodes: int = 0
    num_joining: int = 0  # prompts that end
    most_drafts: int = 0  # that it verifies of a row

    @property
    def is_plain(self) -> bool:
        return not (self.num_tokens or self.passes or self.num_drafts)


class Trial(NamedTuple):
    """What one is to be like.  Times in plain steps."""

    num_drafts: int  # of each row
    num_steps: int
    took: float  # beside a plain step, by each
    price: float  # to be in the account


class Wants:
    """Writes the column `want`."""

    def __init__(
        self,
        table: Table,
        most: int,
        cheap_tokens: int,
        *,
        drafter: Drafter = Drafter.STATELESS,
        tree_depth: int = 0,
        timings: Timings = UNTIMED,
    ) -> None:
        """most: drafts of a row.  cheap_tokens: 0 if every sequence is always to have so many.

        tree_depth: of the deepest draft, if they are trees.
        """
        keeps_kv, self._tries_none = drafter is Drafter.KEEPS_KV, drafter is Drafter.READS_TEXT
        most = 0 if drafter is Drafter.NONE else most
        self._table, self._most = table, most
        self._chances = Chances(most, tree_depth)
        # With forgetting: drafts that were looked at, up to the first that fell, and those that stood.
        self._tries: NDArray[np.float64] = np.zeros(len(table.want))
        self._hits = self._tries.copy()
        self._is_learning = most > 0 and cheap_tokens > 0
        reads = self._is_learning and drafter in (Drafter.READS_TEXT, Drafter.READS_TEXTS)
        self._echoes = Echoes() if reads else None
        self.switch = Switch(tries=not self._tries_none)
        self.costs = StepCosts(most, cheap_tokens, timings, takes_passes=keeps_kv)
        self._keeps_kv = keeps_kv
        self._has_lost = np.zeros(len(table.want), dtype=bool)  # the drafter's KV
        self._is_followed = self._has_lost.copy()  # prompts of which a part was planned with the drafter
        self._proposes, self._num_proposed = False, 0  # the last plan
        self._rests = False  # nobody had drafts in the last plan, nor wanted any
        self._is_idle = False  # nor does anybody in this one: it is planned as the one before it
        self._is_waiting = False  # a trial: nobody who runs could take part
        self._idle = Load(0)  # the last one of them
        self._loads: deque[Load] = deque()  # of plans under way
        self._took: tuple[Load, float] | None = None
        self._all, self._first = Lately(), Lately()  # any sequence's drafts, and the first of each
        self._num_looked_at: NDArray[np.float64] = np.zeros(len(table.want))  # drafts, of each sequence
        self._ahead: NDArray[np.float64] = np.zeros(len(table.want))  # plain steps, by drafts
        self._entered: list[int] = []  # slots, since the last plan
        self.has_switched = False  # the switch, or enough has been learnt: it is time to choose
        # Steps with drafts that have come home since the last choice, and what their rows have yielded; those
        # that are counted together are less work.
        self._landed: list[tuple[Load, float, Column, NDArray[np.int32] | None]] = []
        self._yielded: list[tuple[Column, Column, NDArray[np.int32]]] = []
        self._again = AGAIN  # steps with drafts, from one choice to the next
        self._num_drafting = 0  # of these, those that are counted
        self._waits = False  # somebody, for a slot
        self._was_plain = False  # the last step that has come home
        self._was_trying, self._num_chosen = False, 1  # when it was last chosen; for how many rows
        self._num_to_try = 0  # steps of a trial that are to be planned
        self._num_tried = 0  # the last trial that anybody takes part in
        self._num_choices = 0  # at every other one some texts are looked at
        self._trials: dict[tuple[int, int], Trial] = {}  # until costs are known better
        self._num_rows = 1  # of the last plan
        self._gain = 1.0  # tokens for a plain step's time, as was expected when it was last chosen
        self._usual_gain = 1.0  # while drafts paid

    @classmethod
    def of(cls, table: Table, options: SchedulerOptions) -> Self:
        return cls(
            table,
            options.num_spec,
            options.cheap_tokens,
            drafter=options.drafter,
            tree_depth=options.tree_depth,
            timings=options.timings,
        )

    def begin(self, slot: int) -> None:
        """A sequence enters."""
        self._take_in()
        self._rests = False
        self._tries[slot] = self._hits[slot] = self._num_looked_at[slot] = self._ahead[slot] = 0.0
        if not self._is_learning:
            self._table.want[slot] = self._most
            return
        self.switch.entered(self._num_rows)
        self._entered.append(slot)
        self._has_lost[slot] = self._keeps_kv and not self._may_follow
        self._is_followed[slot] = False
        self._table.want[slot] = 0
        if self.switch.is_on and not self.switch.is_trying:
            self._table.want[slot] = self._worth(np.array([slot]), self._num_rows).drafts[0]

    def end(self, slot: int) -> None:
        """A sequence leaves."""
        if self._echoes and not self._tries_none:
            self._echoes.remember(self._table.tokens(slot))

    def rests(self, step: Step) -> bool:
        """Will this plan have no drafts, as the last one, nor want any?"""
        rests = self._rests and (self._is_waiting or not self.switch.is_on) and not step.chunks
        self._is_idle = rests and not self._table.drafts[step.decodes].any()
        return self._is_idle

    @property
    def _may_follow(self) -> bool:
        """Are those that enter to have KV of the drafter's?"""
        return not self.switch.is_resting or self.switch.is_on or self.switch.is_due

    def num_propose(self, slots: Column, chunks: Sequence[int]) -> int:
        """Most drafts to be made behind these rows; one at least where a drafter's KV stays whole.

        chunks: slots with a part of a prompt, whether or not they are among the others.
        """
        switch, num_rows = self.switch, max(len(slots), len(chunks))
        if self._entered and not switch.is_on:
            self._begin_as_others_did(np.array(self._entered), num_rows)
        self._entered.clear()
        if switch.is_trying and self._num_tried < switch.num_trials:
            is_new = len(chunks) > 0 and (not self._keeps_kv or self._follows(list(chunks), num_rows))
        else:
            is_new = switch.is_on and not switch.is_trying and len(slots) > 2 * self._num_chosen
        if is_new:
            self.choose(slots)  # for those that are there now
        if self._is_learning and not switch.is_on:
            self._table.want[slots] = 0  # of prompts that began while it was
        most = int(self._table.want[slots].max(initial=0))
        if most or not self._keeps_kv:
            return most
        if not self._is_learning:
            return 1
        if switch.is_on and not self._is_tried:
            decoding = np.setdiff1d(slots, chunks) if chunks else slots
            if not self._has_lost[decoding].all():
                return 1
        return int(len(chunks) > 0 and self._follows(list(chunks), num_rows))

    @property
    def _is_tried(self) -> bool:
        """Is all of a trial planned, and not yet judged?"""
        switch = self.switch
        return switch.is_trying and self._num_tried == switch.num_trials and not self._num_to_try

    def _follows(self, chunks: list[int], num_rows: int) -> bool:
        """Is the drafter to have KV of these prompts?  Where it may not pay, if that is not too dear.

        A prompt that was begun with it is followed to its end, unless drafts have been given up meanwhile.
        """
        if self._has_lost[chunks].all():
            return False
        is_begun = self._is_followed[chunks] & ~self._has_lost[chunks]
        if is_begun.any() and not self.switch.is_resting:
            return True
        num_tokens = int((self._table.known[chunks] - self._table.computed[chunks]).sum())
        gain = self._worth(np.array(chunks), num_rows).gain
        return self.switch.may_follow(self.costs.prompts(num_rows, num_tokens), gain)

    def planned(self, step: Step) -> None:
        """A plan is complete."""
        if not self._is_learning:
            return
        if self._is_idle:
            if self._keeps_kv:
                self._has_lost[step.decodes] = True
            if step.num_rows != self._idle.num_rows:
                self._idle = Load(step.num_rows, num_decodes=step.num_rows)
            self._num_rows = step.num_rows or 1
            self._loads.append(self._idle)
            return
        most_drafts = self._num_proposed if step.num_drafts else 0
        self._proposes, self._num_proposed = step.num_propose > 0, step.num_propose
        if self._keeps_kv and not self._proposes:
            chunks = [row.slot for row in step.chunks]
            self._has_lost[chunks], self._table.want[chunks] = True, 0
            if not (self.switch.is_looking or self._is_tried):
                self._has_lost[step.decodes] = True
        elif self._keeps_kv and step.chunks:
            chunks = [row.slot for row in step.chunks]
            self._is_followed[chunks] = ~self._has_lost[chunks]
        sampled = [*step.decodes, *step.joining] if step.joining else step.decodes
        if self._num_to_try and self._table.want[sampled].any():
            self._num_to_try -= 1
            if not self._num_to_try:
                self._table.want[:] = 0  # until it is judged
        has_drafts = self._proposes or step.num_drafts > 0 or self._table.want[sampled].any()
        self._rests = not (has_drafts or self.switch.is_looking or step.chunks)
        self._num_rows = max(1, step.num_rows)
        num_tokens = step.num_tokens if step.chunks else 0
        counts = step.num_rows, step.num_drafts, step.num_propose, num_tokens
        self._loads.append(Load(*counts, len(step.decodes), len(step.joining), most_drafts))

    def took(self, seconds: float) -> None:
        """The oldest plan has come home, so long after the one before it or after its own start."""
        if self._loads:
            self._took = self._loads.popleft(), max(seconds, 1e-9)

    def landed(self, slots: Column, each: NDArray[np.int32] | None) -> None:
        """Its rows have yielded so many tokens; None: one each."""
        if self._took is None:
            return
        (load, seconds), self._took = self._took, None
        self._landed.append((load, seconds, slots, each))
        if self.switch.is_on or self.switch.is_looking or not load.is_plain:
            if not self._pays(load, seconds, slots, each):
                self._take_in()
                self._again = AGAIN
            self.has_switched |= len(self._landed) + self._num_drafting >= self._again

    def _pays(self, load: Load, seconds: float, slots: Column, each: NDArray[np.int32] | None) -> bool:
        """Has a step with drafts, that is no trial, yielded more than plain ones in as much time?"""
        if each is None or load.num_tokens or not self.switch.is_on or self.switch.is_trying:
            return False
        plain = self.costs.plain_seconds(load.num_rows, self._num_tokens(slots))
        return plain is not None and int(each.sum()) * plain > seconds * len(each)

    def _num_tokens(self, slots: Column) -> float:
        """Of all their texts."""
        return float(self._table.computed[slots].sum())

    def _take_in(self) -> None:
        """Count what has landed.  Several steps at once are less work than one by one."""
        if self._landed and all(landed[0] is self._idle for landed in self._landed):
            self._count_plain(self._idle, self._landed[-1][2], *(landed[1] for landed in self._landed))
        else:
            for landed in self._landed:
                self._count(*landed)
        for yielded in self._yielded:
            self._teach(*yielded)
        self._landed.clear()
        self._yielded.clear()

    def _count_plain(self, load: Load, slots: Column, *seconds: float) -> None:
        """Several plain steps, one behind the other, of these rows."""
        was_on, was_plain, self._was_plain = self.switch.is_on, self._was_plain, True
        self.switch.plain(len(seconds))
        num_tokens = self._num_tokens(slots)
        self.costs.add_plain(load.num_rows, *seconds, is_usual=was_plain, num_tokens=num_tokens)
        self.has_switched |= self.switch.is_on != was_on

    def _count(self, load: Load, seconds: float, slots: Column, each: NDArray[np.int32] | None) -> None:
        """A step and what its rows have yielded."""
        if load.is_plain:
            self._count_plain(load, slots, seconds)
            return
        switch, was = self.switch, (self.switch.is_on, self.switch.is_trying)
        self._was_plain = False
        num_tokens = self._num_tokens(slots)
        plain = self.costs.plain_seconds(load.num_rows, num_tokens) if load.num_rows else None
        num_new = len(slots) if each is None else int(each.sum())
        if load.num_tokens:
            switch.passed(seconds / plain if plain else 0.0)
            if self._keeps_kv:
                self.costs.add_prompt(load.num_tokens, seconds, is_followed=load.passes > 0)
                if load.passes:
                    took = self.costs.prompts(load.num_rows, load.num_tokens)
                    switch.followed(took, self._gained_beside_prompts(load, num_new), plain)
        elif load.num_rows and num_new:
            drafts = load.num_drafts / load.num_rows
            passes = load.passes or load.most_drafts  # a recorded step makes them all, wanted or not
            is_usual = load.passes >= load.most_drafts
            self._trials.clear()
            took = self.costs.add(
                load.num_rows, passes, drafts, seconds, is_usual=is_usual, num_tokens=num_tokens
            )
            if took is None or plain is None:
                switch.look()
            else:
                self._num_drafting += not switch.is_trying
                lost = self._lost(slots, each, took)
                has_drafts = load.num_drafts > 0
                switch.drafted(num_new / len(slots), took, plain, has_drafts=has_drafts, lost=lost)
                gain = self._gain if self.costs.is_known(load.num_rows) else 1.0
                is_doubtful = switch.is_stale(gain) or self.costs.is_doubtful(load.num_rows, num_tokens)
                if switch.is_on and not switch.is_trying and is_doubtful:
                    switch.look()
        # Whoever a trial has waited for may be there now.
        may_start = load.passes > 0 and switch.is_trying and self._num_tried < switch.num_trials
        self.has_switched |= was != (switch.is_on, switch.is_trying) or may_start

    def _lost(self, slots: Column, each: NDArray[np.int32] | None, took: float) -> float:
        """Of what a step has saved, which took so many plain ones, what does not count, for rows are apart.

        Where nobody waits it is how soon the last answer ends, so far as a step takes as long for it alone:
        what the row has got that drafts have helped least.
        """
        before = self._ahead[slots]
        self._ahead[slots] = now = before + (1.0 if each is None else each) - took
        if self._waits:
            return 0.0
        share = self.costs.share_of_rows(len(slots))
        return SLOWEST_COUNTS * (1 - share) * float((now - before).mean() - (now.min() - before.min()))

    def _gained_beside_prompts(self, load: Load, num_new: int) -> float:
        """Plain steps of those that decode, as far as it is known what their drafts take."""
        if not load.num_decodes:
            return 0.0
        tokens, drafts = (num_new - load.num_joining) / load.num_decodes, load.num_drafts / load.num_decodes
        return tokens - 1 - self.costs.extra(load.num_decodes, load.passes, drafts)

    def learn(self, slots: Column, draft: Column, num_new: NDArray[np.int32]) -> None:
        """Rows with so many drafts, or none, have yielded so many tokens."""
        if self._is_learning:
            self._yielded.append((slots, draft, num_new))

    def _teach(self, slots: Column, draft: Column, num_new: NDArray[np.int32]) -> None:
        has_drafts = (draft > 0) & (num_new > 0)
        if np.count_nonzero(has_drafts) < len(slots):
            slots, draft, num_new = slots[has_drafts], draft[has_drafts], num_new[has_drafts]
        tries, hits = self._chances.tries(draft, num_new), num_new - 1
        self._tries[slots] = self._tries[slots] * FORGETTING + tries
        self._hits[slots] = self._hits[slots] * FORGETTING + hits
        self._all.add(float(tries.sum()), float(hits.sum()))
        is_first = self._num_looked_at[slots] < BEGINNING
        if np.count_nonzero(is_first):
            self._first.add(float(tries[is_first].sum()), float(hits[is_first].sum()))
            self._num_looked_at[slots] += tries

    def choose(self, slots: Column, *, waits: bool | None = None) -> None:
        """Those that run want as many from now on as they are worth.

        waits: does anybody for a slot?  Then tokens count, whosever they are; else how soon all answers end.
        """
        self._take_in()
        self.has_switched, self._num_drafting = False, 0
        self._rests = self._is_waiting = False
        self._num_choices += 1
        if waits is not None and waits != self._waits or self._num_choices % RECKONING == 0:
            self._trials.clear()
        self._waits = self._waits if waits is None else waits
        if not self._is_learning or not len(slots):
            return
        switch, want = self.switch, self._table.want
        if switch.is_trying and (want[slots].any() or any(load.num_drafts for load in self._loads)):
            return  # the trial is under way
        self._num_chosen = len(slots)
        able = slots[~self._has_lost[slots]]
        was = want[able]
        want[slots] = 0
        if self._echoes and switch.may_borrow and self._num_choices % 2 == 0:
            self._look_for_echoes(slots, self._echoes)
        if not len(able) and not self._proposes and not switch.is_paid:
            switch.give_up()  # nobody is left whose drafts could pay for the prompts
        if not switch.is_on or switch.is_trying:
            self._try(able, len(slots))
        elif len(able):
            want[able] = self._as_many_as_pay(able, len(slots))
            is_same = np.array_equal(want[able], was)
            self._again = min(2 * self._again, MOST_AGAIN) if is_same else AGAIN
        self._was_trying = switch.is_trying

    def _try(self, able: Column, num_rows: int) -> None:
        """Say what a trial takes; in one, have its rows want drafts."""
        stride = -(-len(able) // max(TRIAL_ROWS, num_rows // 4)) or 1
        some = able[self.switch.num_trials % stride :: stride]  # by turns, so that all get on
        self._is_waiting = not len(some)
        num, num_steps, took, price = self._trial_of(max(1, len(some)), num_rows)
        if not self.switch.may_try(price) or not len(some):
            return
        # What is known of drafts may hold no more.
        self._all.forget(KEPT_FOR_TRIAL)
        self._tries[able] *= KEPT_FOR_TRIAL
        self._hits[able] *= KEPT_FOR_TRIAL
        self._table.want[some] = num
        # A trial is as long as the account has enough for; one step more makes drafts and verifies none.
        num_steps = max(1, min(num_steps, int(self.switch.credit / max(took, 1e-9)) - 1))
        self.switch.trial_steps = self._num_to_try = num_steps
        self._num_tried = self.switch.num_trials

    def _trial_of(self, num_trying: int, num_rows: int) -> Trial:
        """With drafts for so many of the rows."""
        known = self._trials.get((num_trying, num_rows))
        if known is not None:
            return known
        costs, numbers = self.costs, self.costs.numbers
        # Recorded steps may take as long with drafts of a few rows as with those of all.
        extra = [costs.extra(num_rows, num, num) for num in numbers]
        most = min(TRIAL_COST * extra[0], TRIAL_MOST)
        num = max(num for num, took in zip(numbers, extra, strict=True) if num == 1 or took <= most)
        num_steps = min(TRIAL_STEPS, 1 + TRIAL_DRAFTS // (num * num_trying))
        took = costs.extra(num_rows, num, num * num_trying / num_rows)
        best = self._best(self._chances.of(np.ones(1)), num_rows, math.inf).gain
        price = (1 + min(num_steps, LEAST_STEPS)) * took if best > 1 + self._margin(num_rows) else math.inf
        trial = self._trials[num_trying, num_rows] = Trial(num, num_steps, took, price)
        return trial

    def _as_many_as_pay(self, able: Column, num_rows: int) -> Column | int:
        """By rows; none, and given up, if they pay nowhere."""
        switch, is_proven = self.switch, not self._was_trying
        self._gain, drafts = self._worth(able, num_rows)
        least = 1 + self._margin(num_rows)
        if self._keeps_kv:
            least -= self._doubt(able) + HOPE * (self._usual_gain - 1) * is_proven
        if self._gain < least:
            switch.give_up()
            return 0
        switch.keep()
        if is_proven:
            more = self._gain - self._usual_gain
            self._usual_gain += more * (HOPING if more > 0 else DESPAIRING)
        return drafts if drafts.any() else 1

    @staticmethod
    def _margin(num_rows: int) -> float:
        """What drafts must bring beyond a plain step."""
        return GAIN_A_DOUBLING * math.log2(num_rows)

    def _doubt(self, slots: Column) -> float:
        """The standard deviation of their mean rate, if it is what they have taught."""
        tries = float(self._tries[slots].sum()) + 1
        rate = min(1.0, (float(self._hits[slots].sum()) + UNKNOWN_RATE) / tries)
        return math.sqrt(rate * (1 - rate) / tries)

    def _look_for_echoes(self, slots: Column, echoes: Echoes) -> None:
        """Begin if the ends of texts were foretold: without a step with drafts a few show it, then more."""
        first = self._num_choices // 2 * ECHO_ROWS % len(slots)
        found = self._echoes_of(slots[first : first + ECHO_ROWS], echoes)
        lately = Lately(float(NUM_TOKENS * len(found)), float(found.sum()))
        credit, gain = AT_RISK * MOST_AT_RISK, 1.0
        if lately.hits > lately.tries * (1 - 1 / FIRST_GAIN):  # else no number of drafts brings so much
            gain = self._best(self._chances.of(np.full(len(slots), lately.rate)), len(slots), credit).gain
        if self._tries_none or gain >= FIRST_GAIN:  # what trials have taught counts for more than no echoes
            self._all, self._gain = lately, gain
            self._tries[slots] = self._hits[slots] = 0.0
        least = FIRST_GAIN if self.switch.may_begin else SURE_GAIN
        if gain < least:
            return
        some = slots[:MOST_ECHO_ROWS]
        self._tries[some] = ECHO_TRIES
        self._hits[some] = self._echoes_of(some, echoes) * (ECHO_TRIES / NUM_TOKENS)
        self._gain, drafts = self._worth(slots, len(slots), credit)
        if self._gain >= least:
            extra = self.costs.extra(len(slots), int(drafts.max()), float(drafts.mean()))
            self.switch.begin(max(TRIAL, 1.01 * AT_RISK * extra))

    def _echoes_of(self, slots: Column, echoes: Echoes) -> Numbers:
        """How many tokens of each one's end were foretold."""
        return np.array([echoes.num_foretold(self._table.tokens(slot)) for slot in slots.tolist()], float)

    def _begin_as_others_did(self, slots: Column, num_rows: int) -> None:
        """If most of those that run enter now, and the first drafts of others have paid."""
        if self.switch.may_begin and 2 * len(slots) >= num_rows and self._first.tries >= BEGINNING:
            gain, drafts = self._worth(slots, num_rows)
            if gain >= FIRST_GAIN:
                self.switch.begin()
                self._has_lost[slots], self._table.want[slots] = False, drafts

    def _worth(self, slots: Column, num_rows: int, credit: float | None = None) -> Worth:
        """Of the drafts of these rows, of all rows as of these.  credit: None is what the account has.

        So a drafter that most rows have no KV of is kept, until they have left or the account is empty.
        """
        rates = rates_of(self._tries[slots], self._hits[slots], self._all.rate, self._first_rates(slots))
        credit = self.switch.credit if credit is None else credit
        return self._best(self._chances.of(rates), num_rows, credit)

    def _first_rates(self, slots: Column) -> Numbers | float:
        """What is expected of rows that have taught nothing yet.

        What is said of the first drafts only ever begins some: if they fall, that is learnt.
        """
        rate = self._all.rate
        if self._first.tries < BEGINNING or self._first.rate <= rate:
            return rate
        return np.where(self._num_looked_at[slots] < BEGINNING, self._first.rate, rate)

    def _best(self, chances: Numbers, num_rows: int, credit: float) -> Worth:
        """The same for rows whose drafts stand with these chances, [rows, drafts], at the risk of so much."""
        numbers, at_risk = self.costs.numbers if self._keeps_kv else [self._most], credit / AT_RISK
        waits, proposed = self._waits, self._num_proposed
        return best_of(chances, self.costs, numbers, num_rows, at_risk, waits=waits, proposed=proposed)
