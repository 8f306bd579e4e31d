"""Whether drafts pay at all, by the clock: what a token of a row costs in steps with drafts and without.

All that speculation costs is in a step's seconds: the drafter's passes, the tokens of drafts, a host that
has more to do.  So it is not modelled but measured, for about as many rows as there are: steps with drafts
against plain ones, and tokens a row yields in each.  Where drafts lose nobody wants any; no drafter runs.
Now and then the other way is tried, more seldom the more often it has lost: with a wait that doubles, trials
cost less and less.  Steps with prompts in them say nothing.  No torch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

LOOK_AFTER, LOOK_AGAIN = 24, 1024  # steps with drafts before plain steps are looked at, and from then on
FIRST_WAIT, LONGEST_WAIT = 128, 8192  # plain steps before drafts are tried again
FEWEST = 4  # steps of either kind that are to be known
KEEP, COME_BACK = 0.995, 1.03  # least gain of drafts to go on with them, and to begin again
FORGETTING = 1 / 32  # weight of a step
MOST_SURPRISE = 1.5  # of what was expected: a step that takes longer was held up by something else


@dataclass(slots=True)
class Pace:
    """Of steps of one kind."""

    num: int = 0
    seconds: float = 0.0
    tokens: float = 1.0  # that a row yields

    def add(self, seconds: float, tokens: float) -> None:
        if self.num:
            seconds = min(seconds, MOST_SURPRISE * self.seconds)
        weight = max(FORGETTING, 1 / (self.num + 1))
        self.seconds += weight * (seconds - self.seconds)
        self.tokens += weight * (tokens - self.tokens)
        self.num += 1

    def forget(self) -> None:
        """Let what comes next say it."""
        self.num = min(self.num, 1)


@dataclass(slots=True)
class Crowd:
    """What is known of steps with about as many rows."""

    plain: Pace
    drafting: Pace

    @property
    def is_known(self) -> bool:
        return min(self.plain.num, self.drafting.num) >= FEWEST

    @property
    def gain(self) -> float:
        """How much faster tokens come with drafts; 1 while nobody knows."""
        if not self.is_known:
            return 1.0
        return self.drafting.tokens / self.drafting.seconds * self.plain.seconds / self.plain.tokens


class Switch:
    """On: drafts are wanted.  A look at plain steps, or a trial of drafts, lasts until enough is known."""

    def __init__(self) -> None:
        self.is_on = True
        self.is_brief = False  # on or off for a look or a trial alone
        self.gain = 1.0  # by what was last known
        self._crowds: defaultdict[int, Crowd] = defaultdict(lambda: Crowd(Pace(), Pace()))
        self._left = LOOK_AFTER  # steps of this kind before the other one is tried
        self._wait = FIRST_WAIT

    def took(self, seconds: float, num_rows: int, num_new: int, *, is_drafting: bool) -> None:
        """A step of decodes alone has come home.  is_drafting: it verified drafts and made others."""
        crowd = self._crowds[num_rows.bit_length()]
        (crowd.drafting if is_drafting else crowd.plain).add(max(seconds, 1e-9), num_new / num_rows)
        if is_drafting != self.is_on:
            return  # it was planned before the last change
        self._left -= 1
        self.gain = crowd.gain
        if self.is_on:
            self._judge_drafts(crowd)
        else:
            self._judge_plain(crowd)

    def _judge_drafts(self, crowd: Crowd) -> None:
        is_trial = self.is_brief
        if crowd.is_known and (self._left <= 0 or not is_trial):
            if crowd.gain < (COME_BACK if is_trial else KEEP):
                self._wait = min(2 * self._wait, LONGEST_WAIT) if is_trial else FIRST_WAIT
                self._turn(on=False, brief=False, left=self._wait)
                return
            if is_trial:
                self._turn(on=True, brief=False, left=LOOK_AGAIN)
                return
        if self._left <= 0:
            crowd.plain.forget()
            self._turn(on=False, brief=True, left=FEWEST)

    def _judge_plain(self, crowd: Crowd) -> None:
        if self._left > 0:
            return
        if self.is_brief:
            self._turn(on=True, brief=False, left=LOOK_AGAIN)
        else:
            crowd.drafting.forget()
            self._turn(on=True, brief=True, left=2 * FEWEST)

    def _turn(self, *, on: bool, brief: bool, left: int) -> None:
        self.is_on, self.is_brief, self._left = on, brief, left
