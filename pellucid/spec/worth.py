"""What drafts are worth: of all rows' drafts together those that bring most for the time that they take.

While others wait for a slot tokens count, whosever they are.  Where nobody waits it counts how soon all
answers end: drafts that help one row delay the others.  So far as a step takes as long for one row as for
all, the last answer ends with the slowest row: of rows' steps for a token a high power is summed, in which
the slowest ones weigh most.  So far as each row takes time of its own, slow ones that are left alone take
little of it, and the mean counts.  No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.spec.chances import Numbers
from pellucid.spec.costs import StepCosts

UNKNOWN_RATE = 0.7  # of drafts, if nothing is known
MEMORY = 16  # drafts: what was looked at so long ago hardly counts any more
LEAST_CHANCE = 0.05  # of a draft, however cheap it is
STAYING = 1.02  # for as many passes as before: a step with more verifies as few drafts as the one before it
# As how many of a row's own drafts that have been looked at the rate of all counts.
FIRST_TRIES, TRIES_A_ROW = 4.0, 0.25
LEAST_TRIES, MOST_TRIES = 0.5, 16.0
SLOWEST = 8.0  # the power: if drafts help all rows but an eighth, these may be delayed by 30 %
MANY = 4  # rows, of which it is told how much they differ


@dataclass(slots=True)
class Lately:
    """Drafts that were looked at, up to the first that fell, and those that stood, with forgetting."""

    tries: float = 0.0
    hits: float = 0.0

    @property
    def rate(self) -> float:
        return min(1.0, (self.hits + UNKNOWN_RATE) / (self.tries + 1))

    def add(self, tries: float, hits: float) -> None:
        self.forget(MEMORY / (MEMORY + tries))
        self.tries += tries
        self.hits += hits

    def forget(self, kept: float) -> None:
        self.tries *= kept
        self.hits *= kept


class Worth(NamedTuple):
    """Of the best number of passes."""

    gain: float  # what they bring for a plain step's time; a plain step brings 1
    drafts: NDArray[np.int64]  # [rows]


def rates_of(tries: Numbers, hits: Numbers, rate: float, first: Numbers | float) -> Numbers:
    """With what chance drafts of rows stand, of which so many were looked at, and stood.

    rate: of all.  first: what is expected of rows of which nothing is known.
    """
    others = tries_of_others(tries, hits, rate)
    return np.minimum((hits + others * first) / (tries + others), 1.0)


def tries_of_others(tries: Numbers, hits: Numbers, rate: float) -> float:
    """As how many of its own drafts the rate of all counts for a row: the less, the more rows differ.

    So many tries has a beta distribution with the spread of their rates, less what is chance in it.
    """
    most = min(FIRST_TRIES + TRIES_A_ROW * len(tries), MOST_TRIES)
    seen = tries >= 1
    if np.count_nonzero(seen) < MANY:
        return most
    tries, chance = tries[seen], rate * (1 - rate)
    spread = float(np.mean((hits[seen] / tries - rate) ** 2 - chance / tries))
    return min(most, max(LEAST_TRIES, chance / spread - 1)) if spread > 0 else most


def best_of(  # noqa: PLR0913
    chances: Numbers,
    costs: StepCosts,
    numbers: Sequence[int],
    num_rows: int,
    at_risk: float,
    *,
    waits: bool,
    proposed: int,
) -> Worth:
    """chances: [rows, drafts], that each stands.  numbers: of drafts that may be made for each row.

    num_rows: that run, perhaps more than these, which stand for all.  at_risk: plain steps that one may take
    beside.  waits: does anybody, for a slot?  proposed: drafts that the last step has made for each row.
    """
    num_slots = len(chances)
    at_risk = max(at_risk, costs.extra(num_rows, 1, 1))
    found, gain, at_best = Worth(0.0, np.zeros(num_slots, dtype=np.int64)), 0.0, 0.0
    tokens, share = 1 + chances.cumsum(axis=1), costs.share_of_rows(num_rows)
    # Of each draft behind those before it: tokens, or steps that it saves on the mean, and in the high power.
    steps = slowest = chances
    if not waits:
        steps = 1 / (tokens - chances) - 1 / tokens
        slowest = (tokens - chances) ** -SLOWEST - tokens**-SLOWEST
    worth = share * steps + (1 - share) * slowest
    for num in numbers:
        chance, each = chances[:, :num].ravel(), worth[:, :num].ravel()
        order = np.argsort(-each, kind="stable")
        mean = steps[:, :num].ravel()[order].cumsum() / num_slots
        extra = costs.extras(num_rows, num, np.arange(1, 1 + len(order)) / num_slots)
        if waits:
            gains = (1 + mean) / (1 + extra)
        else:
            last = (1 - slowest[:, :num].ravel()[order].cumsum() / num_slots) ** (1 / SLOWEST)
            gains = 1 / ((share * (1 - mean) + (1 - share) * last) * (1 + extra))
        gains[extra > at_risk] = 0.0
        best = int(np.argmax(gains))
        gain = max(gain, float(gains[best]))
        hoped = gains[best] * (STAYING if num == proposed else 1)
        if hoped > at_best:
            at_best, chosen = hoped, order[: 1 + best]
            chosen = chosen[chance[chosen] >= LEAST_CHANCE]
            found = Worth(gain, np.bincount(chosen // num, minlength=num_slots))
    return found._replace(gain=gain)
