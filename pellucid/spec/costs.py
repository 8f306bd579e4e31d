"""What steps take, learnt from the clock: plain ones, and by how much drafts make them longer.

For about as many rows as there are.  A plain step's seconds are the median of the last few.  What a step
with drafts takes beside is counted in plain steps, and is linear in what it does: a part for running the
proposer at all, one for each of its further passes, one for each draft of a row that is verified.  The three
are fitted with forgetting, from a guess on, which is never forgotten: steps that are all alike do not tell
the three apart.  Recorded steps are padded, so time is no line: by how much steps of so many passes miss it
is learnt beside.  No torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
MOST_PASSES = 64
EYE = np.eye(3)
WINDOW = 16  # plain steps that are remembered
REMEMBERING = 31 / 32  # weight of what is known, with each step more
LASTING = 1 / 16  # weight of the guess in the end, in steps; at first it is one
PROMPTS_SHARE = 0.1  # of a step with prompts, until it is known
SETTLED = 8  # steps with drafts, behind which more passes are tried
ENOUGH = 1.9  # of which so many have been seen, with forgetting: one may have been held up
# Plain steps beyond what was expected, or as much again: what takes longer was held up by something else.
MOST_SURPRISE = 0.25


@dataclass(slots=True)
class Crowd:
    """What is known of steps with about as many rows."""

    guess: Numbers  # [3], of the parts: running, passes, drafts
    squares: Numbers = field(init=False)  # [3, 3], of how much of each part steps had; and
    products: Numbers = field(init=False)  # [3], with what they took beside
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seconds: float | None = None  # of a plain step: their median
    # By passes, of steps in which most rows have as many drafts: how many, with forgetting; on the mean,
    # their drafts a row, and what they took beside plain ones.
    seen: Numbers = field(default_factory=lambda: np.zeros(1 + MOST_PASSES))
    drafts: Numbers = field(default_factory=lambda: np.zeros(1 + MOST_PASSES))
    took: Numbers = field(default_factory=lambda: np.zeros(1 + MOST_PASSES))
    num: int = 0  # steps with drafts
    most: int = 1  # passes of any
    parts: Numbers = field(init=False)  # what follows from them, as it was last worked out
    is_new: bool = False  # is it to be worked out again?

    def __post_init__(self) -> None:
        self.learn(self.guess)

    def learn(self, guess: Numbers) -> None:
        """Begin with other parts."""
        self.guess, self.squares, self.products, self.parts = guess, np.eye(3), guess, guess

    def add_plain(self, seconds: float) -> None:
        self.plain.append(seconds)
        self.seconds = sorted(self.plain)[(len(self.plain) - 1) // 2]

    @property
    def most_known(self) -> int:
        """Most passes of which enough steps have been seen; 0: there are none."""
        known = np.flatnonzero(self.seen >= ENOUGH)
        return int(known[-1]) if len(known) else 0

    def linear(self, passes: Numbers | float, drafts: Numbers | float) -> Numbers:
        a_step, a_pass, a_draft = self.parts
        return a_step + a_pass * (passes - 1) + a_draft * drafts


class StepCosts:
    """Costs in plain steps."""

    def __init__(self, cheap_tokens: int, *, takes_passes: bool = False) -> None:
        """cheap_tokens: as many more as take a step as long again.  takes_passes: one for each draft."""
        self._cheap_tokens, self._passes = cheap_tokens, 0.2 if takes_passes else 0.01
        self._crowds: dict[int, Crowd] = {}
        self._a_prompt_token = [0.0, 0.0]  # seconds, without the proposer and with it

    def add_plain(self, num_rows: int, seconds: float) -> None:
        self._crowd(num_rows).add_plain(seconds)

    def add(
        self, num_rows: int, passes: int, drafts: float, seconds: float, *, is_usual: bool = True
    ) -> float | None:
        """A step with so many passes, and drafts a row.  Returns its time in plain ones, if that is known.

        is_usual: says what others with so many passes take.
        """
        plain = self.plain_seconds(num_rows)
        if plain is None:
            return None
        crowd = self._crowd(num_rows)
        expected = float(max(crowd.linear(passes, drafts), crowd.took[passes]))
        beside = min(seconds / plain - 1, max(2 * expected, expected + MOST_SURPRISE))
        if not is_usual:
            return 1 + beside
        parts = np.array([1.0, max(0, passes - 1), drafts])
        crowd.squares *= REMEMBERING
        crowd.squares += parts[:, None] * parts + LASTING * (1 - REMEMBERING) * EYE
        crowd.products = (
            crowd.products * REMEMBERING + beside * parts + LASTING * (1 - REMEMBERING) * crowd.guess
        )
        crowd.num += 1
        if 2 * drafts >= passes:
            crowd.seen[passes] = crowd.seen[passes] * REMEMBERING + 1
            crowd.drafts[passes] += (drafts - crowd.drafts[passes]) / crowd.seen[passes]
            crowd.took[passes] += (beside - crowd.took[passes]) / crowd.seen[passes]
            crowd.most = max(crowd.most, passes)
        crowd.is_new = True
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

    def extra(self, num_rows: int, passes: Numbers, drafts: Numbers) -> Numbers:
        """What a step takes beside a plain one; passes, drafts a row: [n]."""
        self.parts(num_rows)  # are worked out
        crowd, at = self._crowd(num_rows), passes.astype(np.int64)
        seen = crowd.seen[at]
        beside = (crowd.took[at] - crowd.linear(passes, crowd.drafts[at])) * seen / (1 + seen)
        extra = np.maximum(crowd.linear(passes, drafts) + beside, 0.0)
        most = crowd.most_known
        is_new = (seen < ENOUGH) & (passes < most)
        # Fewer passes than are known may be steps of their own: they are worth a try.
        return np.where(is_new, np.minimum(extra, crowd.took[most] * passes / max(1, most)), extra)

    def hoped(self, num_rows: int, passes: Numbers, extra: Numbers) -> Numbers:
        """The same at best: more passes than are known may be the same recorded step."""
        crowd = self._crowd(num_rows)
        most = crowd.most_known
        if crowd.num < SETTLED or not most:
            return extra
        return np.where(passes > most, np.minimum(extra, crowd.took[most]), extra)

    def surprise(self, num_rows: int, passes: Numbers) -> Numbers:
        """By how much more a step may surprise that has more passes than any that has been seen."""
        return np.maximum(passes - self._crowd(num_rows).most, 0) * self._guess(num_rows)[2]

    def parts(self, num_rows: int) -> Numbers:
        """[3]: of a step for running, for each further pass, for each draft of every row; none below 0."""
        crowd = self._crowd(num_rows)
        if crowd.is_new:
            crowd.parts = np.maximum(np.linalg.solve(crowd.squares, crowd.products), 0.0)
            crowd.is_new = False
        return crowd.parts

    def plain_seconds(self, num_rows: int) -> float | None:
        """Of a plain step with so many rows; between two numbers that are known, on a line."""
        size = size_of(num_rows)
        if size in self._crowds and (seconds := self._crowds[size].seconds) is not None:
            return seconds
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

    def _crowd(self, num_rows: int) -> Crowd:
        """Until drafts of so many rows are known it goes by the nearest whose are."""
        size = size_of(num_rows)
        crowd = self._crowds.get(size)
        if crowd is None:
            crowd = self._crowds[size] = Crowd(self._guess(size))
        if not crowd.num:
            known = [(abs(other - size), other) for other, its in self._crowds.items() if its.num]
            if known:
                other = min(known)[1]
                guess = self._guess(size)
                parts = self.parts(other) * (1, 1, guess[2] / self._guess(other)[2])
                is_near = other / 2 <= size <= 2 * other
                crowd.learn(parts if is_near else np.maximum(parts, (0, 0, guess[2])))
                crowd.most = self._crowds[other].most if is_near else 1
        return crowd

    def _guess(self, size: int) -> Numbers:
        """Parts of which nothing is known."""
        return np.array([0.05 + self._passes / 2, self._passes, size / (size + max(1, self._cheap_tokens))])


def size_of(num_rows: int) -> int:
    """About as many: the number with its first three binary digits alone."""
    rest = max(0, num_rows.bit_length() - 3)
    return num_rows >> rest << rest
