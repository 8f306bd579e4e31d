"""What steps take, learnt from the clock: plain ones, and by how much drafts make them longer.

For about as many rows as there are.  A plain step's seconds are the lower quartile of the last few, of
those behind another one: a CPU's caches hold other things behind prompts and drafts; corrected by what
plain steps have shown a token of a text to take, since texts have been longer or shorter then.  What a
step with drafts takes beside is counted in plain steps.  It is known for some numbers of drafts that each
row makes and verifies: timed when the engine started, else guessed, and corrected by each step.  More
drafts never take less.  Of rows that verify fewer than are made, each draft less saves a part of what
lies between two numbers.

No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from pellucid.spec.drafter import UNTIMED, Timed, Timings

Numbers = NDArray[np.float64]
NUMBERS = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48)  # of drafts, from which to choose
WINDOW = 16  # plain steps that are remembered
MEMORY_OF_TEXTS = 64  # plain steps: what was learnt of texts' lengths so long ago hardly counts any more
FAR = 0.4  # of their tokens: behind the first plain step with texts so much shorter all is learnt anew
DOUBTFUL = 0.1  # of a plain step: if shorter texts seem to take as much less, that is looked at
IN_DOUBT = 4.0  # plain steps with texts twice as long as usual: fewer say little of what a token takes
LEARNING, LEARNING_IF_TIMED = 1 / 4, 1 / 16  # by so much a step corrects what is known
PROMPTS_SHARE = 0.1  # of a step with prompts, until it is known
# Plain steps beyond what was expected, or as much again: what takes longer was held up by something else.
MOST_SURPRISE = 0.25


@dataclass(slots=True)
class Crowd:
    """What is known of steps with about as many rows."""

    # [1 + n], units: with no drafts behind the proposer, and with each number of them.
    beside: list[float]
    unit: float | None = None  # seconds, of a plain step when others were timed; None: whatever one takes
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seconds: float | None = None  # of a plain step: their lower quartile
    num_tokens: float = 0.0  # of all rows' texts, on the mean of about as many; 0 if that is not known
    mean: tuple[float, float] = (0.0, 0.0)  # of more of them: tokens and seconds
    is_seen: bool = False  # have there been steps with drafts?

    @property
    def scale(self) -> float:
        """Plain steps of a unit: longer texts make plain steps longer, and hardly what drafts take beside."""
        return min(max(1 / 2, self.unit / self.seconds), 2.0) if self.unit and self.seconds else 1.0

    def add_plain(self, *seconds: float) -> None:
        self.plain.extend(seconds)
        self.seconds = sorted(self.plain)[(len(self.plain) - 1) // 4]

    def correct(self, place: int, by: float) -> None:
        """By so many plain steps.  More drafts take no less, and fewer no more.

        If they take less than was thought, more of them, which are not seen, do so by as much.
        """
        by /= self.scale
        value, less = max(0.0, self.beside[place] + by), min(by, 0.0)
        fewer, more = self.beside[:place], self.beside[place + 1 :]
        self.beside = [*(min(its, value) for its in fewer), value, *(max(its + less, value) for its in more)]


class StepCosts:
    """Costs in plain steps."""

    def __init__(
        self,
        most: int,
        cheap_tokens: int,
        timings: Timings = UNTIMED,
        *,
        takes_passes: bool = False,
    ) -> None:
        """most: drafts of a row.  cheap_tokens: as many more as take a step as long again.

        takes_passes: one of the drafter for each draft.
        """
        self._is_padded, timed = timings
        self._cheap_tokens, self._takes_passes = cheap_tokens, takes_passes
        self._learning = LEARNING_IF_TIMED if timed else LEARNING
        self.numbers = numbers_of(most, all_or_one=takes_passes and self._is_padded)
        self._knots = [0.0, *map(float, self.numbers)]
        self._crowds: dict[int, Crowd] = {}
        self._a_prompt_token = [0.0, 0.0]  # seconds, without the proposer and with it
        # With forgetting: of tokens of texts, and with seconds, about their means.
        self._squares = self._products = 0.0
        for num_rows, steps in groupby(sorted(timed), key=itemgetter(0)):
            self._begin_with(self._crowd(num_rows), steps)

    def _begin_with(self, crowd: Crowd, steps: Iterable[Timed]) -> None:
        """What was timed, of so many rows; between two numbers of drafts, on a line."""
        known = {0: crowd.beside[0]}
        for _, verified, made, seconds in steps:
            if not made:
                crowd.add_plain(seconds)
                crowd.unit = crowd.seconds
            elif crowd.seconds:
                known[verified] = max(0.0, seconds / crowd.seconds - 1)
                crowd.is_seen = True
        known[0] = min(known.values())
        if not crowd.is_seen:
            crowd.unit = None
        else:
            most = self.numbers[-1]  # where so many do not fit into a step it is guessed
            known.setdefault(most, max(crowd.beside[-1], *known.values()))
            crowd.beside = np.interp(self._knots, list(known), list(known.values())).tolist()

    def add_plain(
        self, num_rows: int, *seconds: float, is_usual: bool = True, num_tokens: float = 0.0
    ) -> None:
        """Steps in a row.  is_usual: behind another one; else the first counts only where there are none.

        num_tokens: of all rows' texts.
        """
        crowd = self._crowds.get(size_of(num_rows)) or self._crowd(num_rows)
        is_far = 0 < num_tokens < (1 - FAR) * crowd.num_tokens
        if not is_usual and crowd.plain and not is_far:
            seconds = seconds[1:]
        if seconds:
            if num_tokens:
                self._learn_of_texts(crowd, sum(seconds) / len(seconds), len(seconds), num_tokens)
            if is_far:
                crowd.plain.clear()
                crowd.num_tokens = num_tokens
            crowd.add_plain(*seconds)

    def _learn_of_texts(self, crowd: Crowd, seconds: float, num_steps: int, num_tokens: float) -> None:
        """What a token of a text takes: the slope of the line through plain steps, of all crowds together."""
        if crowd.num_tokens and crowd.seconds:
            usual, taking = crowd.mean
            tokens, more = num_tokens - usual, min(seconds, 2 * crowd.seconds) - taking
            share = min(1.0, num_steps / MEMORY_OF_TEXTS)
            self._squares = (1 - share) * self._squares + num_steps * tokens**2
            self._products = (1 - share) * self._products + num_steps * tokens * more
            crowd.mean = usual + share * tokens, taking + share * more
            crowd.num_tokens += min(1.0, num_steps / WINDOW) * (num_tokens - crowd.num_tokens)
        else:
            crowd.num_tokens, crowd.mean = num_tokens, (num_tokens, seconds)

    def add(
        self, num_rows: int, passes: int, drafts: float, seconds: float, *, is_usual: bool = True,
        num_tokens: float = 0.0,
    ) -> float | None:  # fmt: skip
        """A step that makes so many drafts for each row, and verifies so many of each, on the mean.

        is_usual: says what others like it take.  num_tokens: of all rows' texts.  Returns its time in plain
        steps, if that is known.
        """
        plain = self.plain_seconds(num_rows, num_tokens)
        if plain is None:
            return None
        crowd = self._crowd(num_rows)
        expected = self.extra(num_rows, passes, drafts)
        beside = min(seconds / plain - 1, max(2 * expected, expected + MOST_SURPRISE))
        if is_usual:
            crowd.is_seen = True
            error = self._learning * (beside - expected)
            if self._takes_passes or self._is_padded:
                crowd.correct(self._place(passes if self._takes_passes else drafts), error)
            else:
                above, share = self._between(drafts)
                crowd.correct(above, error * (1 - share))
                if share > 0:
                    crowd.correct(above - 1, error * share)
        return 1 + beside

    def add_prompt(self, num_tokens: int, seconds: float, *, is_followed: bool) -> None:
        """A step with prompts, and perhaps with the proposer behind."""
        means, each = self._a_prompt_token, seconds / num_tokens
        means[is_followed] += (each - means[is_followed]) / 4 if means[is_followed] else each

    def prompts(self, num_rows: int, num_tokens: int) -> float:
        """What the proposer takes of so many tokens of prompts, in plain steps of so many rows."""
        alone, both = self._a_prompt_token
        plain = self.plain_seconds(num_rows)
        if plain is None or not (alone or both):
            return PROMPTS_SHARE * num_tokens / (num_rows + max(1, self._cheap_tokens))
        share = min(max(0.0, 1 - alone / both), 0.5) if alone and both else PROMPTS_SHARE
        return share * (both or alone) * num_tokens / plain

    def is_known(self, num_rows: int) -> bool:
        """Have plain steps been seen with not twice as many rows, and not half as many?"""
        size = size_of(num_rows)
        return any(n < 2 * size and size < 2 * n for n, crowd in self._crowds.items() if crowd.plain)

    def extra(self, num_rows: int, passes: int, drafts: float) -> float:
        """What a step takes beside a plain one that makes so many drafts for each row.

        drafts: that it verifies of each row, on the mean.
        """
        beside = self._beside(num_rows)
        if self._takes_passes:
            place = self._place(passes)
            saved = (
                0.0 if self._is_padded else self._a_draft(num_rows, beside) * (self._knots[place] - drafts)
            )
            return max(0.0, beside[place] - saved)
        above, share = self._between(drafts)  # how many are made does not matter
        return beside[above] - share * (beside[above] - beside[above - 1]) if share else beside[above]

    def extras(self, num_rows: int, passes: int, drafts: Numbers) -> Numbers:
        """The same for several numbers of drafts, [n]."""
        beside = self._beside(num_rows)
        if self._takes_passes:
            place = self._place(passes)
            if self._is_padded:
                return np.full(len(drafts), beside[place])
            a_draft = self._a_draft(num_rows, beside)
            return np.maximum(beside[place] - a_draft * (self._knots[place] - drafts), 0.0)
        if self._is_padded:
            return np.array(beside)[np.searchsorted(self._knots, drafts)]
        return np.interp(drafts, self._knots, beside)

    def _beside(self, num_rows: int) -> list[float]:
        """[1 + n], plain steps."""
        crowd = self._crowd(num_rows)
        scale = crowd.scale
        return [scale * its for its in crowd.beside]

    def plain_seconds(self, num_rows: int, num_tokens: float = 0.0) -> float | None:
        """Of a plain step with so many rows; between two numbers that are known, on a line.

        num_tokens: of all rows' texts; 0 is as many as the last ones had.
        """
        size = size_of(num_rows)
        if size in self._crowds and (seconds := self._crowds[size].seconds) is not None:
            return min(max(seconds / 2, seconds + self._longer(size, num_tokens)), 2 * seconds)
        known = {n: seconds for n, c in self._crowds.items() if (seconds := c.seconds) is not None}
        if not known:
            return None
        below = max((other for other in known if other < size), default=None)
        above = min((other for other in known if other > size), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None
            return known[nearest] * (size + self._cheap_tokens) / (nearest + self._cheap_tokens)
        share = (size - below) / (above - below)
        return (1 - share) * known[below] + share * known[above]

    def _longer(self, size: int, num_tokens: float) -> float:
        """Seconds that a plain step takes beyond the last ones, for so many tokens of all rows' texts."""
        crowd = self._crowds[size]
        if not num_tokens or not crowd.num_tokens:
            return 0.0
        a_token = self._products / (self._squares + IN_DOUBT * crowd.num_tokens**2)
        return max(0.0, a_token) * (num_tokens - crowd.num_tokens)

    def is_doubtful(self, num_rows: int, num_tokens: float) -> bool:
        """Are texts so much shorter than those of the last plain steps that one is to be looked at?

        Where they are longer plain steps are thought to be too quick, so that drafts get too little.
        """
        crowd = self._crowds.get(size_of(num_rows))
        if crowd is None or crowd.seconds is None or num_tokens > (1 - FAR) * crowd.num_tokens:
            return False
        shorter = self._products / max(self._squares, 1.0) * (crowd.num_tokens - num_tokens)
        return shorter > DOUBTFUL * crowd.seconds

    def share_of_rows(self, num_rows: int) -> float:
        """Of a plain step's time: what it takes longer than one of a single row.  0 if nothing is known."""
        one, all = self.plain_seconds(1), self.plain_seconds(num_rows)
        return max(0.0, 1 - one / all) if one and all else 0.0

    def _place(self, drafts: float) -> int:
        """Of the least number that is no less."""
        return 1 + bisect_left(self.numbers, min(drafts, self.numbers[-1])) if drafts > 0 else 0

    def _between(self, drafts: float) -> tuple[int, float]:
        """That place, and what share of a step with so many takes what one takes with the number below."""
        above = self._place(drafts)
        if self._is_padded or not above:
            return above, 0.0
        least, most = self._knots[above - 1 : above + 1]
        return above, max(0.0, (most - drafts) / (most - least))

    def _a_draft(self, num_rows: int, beside: list[float]) -> float:
        """What a draft of each row takes to be verified, where a pass makes it."""
        a_pass, a_draft = self._guess(num_rows)
        return a_draft * (beside[-1] - beside[0]) / (self.numbers[-1] * (a_pass + a_draft))

    def _crowd(self, num_rows: int) -> Crowd:
        """Until drafts of so many rows are known it goes by the nearest whose are."""
        size = size_of(num_rows)
        crowd = self._crowds.get(size)
        if crowd is None:
            crowd = self._crowds[size] = Crowd(self._guesses(size))
        if not crowd.is_seen:
            known = [(abs(other - size), other) for other, its in self._crowds.items() if its.is_seen]
            if known:
                other = min(known)[1]
                beside = self._beside(other)
                is_near = other / 2 <= size <= 2 * other
                guesses = zip(beside, self._guesses(size), self._guesses(other), strict=True)
                crowd.beside = [its if is_near else its * here / there for its, here, there in guesses]
        return crowd

    def _guesses(self, size: int) -> list[float]:
        """[1 + n], of which nothing is known."""
        a_pass, a_draft = self._guess(size)
        return [0.1 + a_pass / 2 + a_pass * max(num - 1, 0) + a_draft * num for num in self._knots]

    def _guess(self, size: int) -> tuple[float, float]:
        """What a pass of the drafter takes, and a draft of each row."""
        return 0.2 if self._takes_passes else 0.01, size / (size + max(1, self._cheap_tokens))


def size_of(num_rows: int) -> int:
    """About as many: the number with its first three binary digits alone."""
    rest = max(0, num_rows.bit_length() - 3)
    return num_rows >> rest << rest


def numbers_of(most: int, *, all_or_one: bool) -> list[int]:
    """Of drafts, from which to choose.  all_or_one: recorded steps make one pass of the drafter, or all."""
    return sorted({1, most} if all_or_one else {*(num for num in NUMBERS if num < most), most})


def kinds_to_time(
    most_rows: int, most: int, *, all_or_one: bool = False, is_padded: bool = False
) -> list[tuple[int, int, int]]:
    """(rows, drafts of each that are verified, and made): steps that stand for all others.

    The most telling ones come first: few rows and many, no drafts and all.  Where steps are padded the
    proposer alone takes what one draft does.
    """
    powers = [1 << i for i in range(most_rows.bit_length())]
    rows = dict.fromkeys(map(size_of, [1, most_rows, *powers[::2], *powers]))
    numbers = [(n, n) for n in numbers_of(most, all_or_one=all_or_one)]
    each = dict.fromkeys([(0, 0), numbers[-1], numbers[0], *[(0, 1)] * (not is_padded), *numbers])
    return [(num_rows, *numbers) for num_rows in rows for numbers in each]
