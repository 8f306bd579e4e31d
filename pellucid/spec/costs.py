"""What steps take, learnt from the clock: plain ones, and by how much drafts make them longer.

For about as many rows as there are.  A plain step's seconds are the median of the last few.  What a step
with drafts takes beside is counted in plain steps, and is linear in what it does: a part for running the
proposer at all, one for each of its further passes, one for each draft of a row that is verified.  The three
are fitted with forgetting, from a guess on, which is never forgotten: steps that are all alike do not tell
the three apart.  No torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
WINDOW = 16  # plain steps that are remembered
REMEMBERING = 31 / 32  # weight of what is known, with each step more
LASTING = 1 / 16  # weight of the guess in the end, in steps; at first it is one
PROMPTS_SHARE = 0.1  # of a step with prompts, until it is known
MOST_SURPRISE = 2.0  # times what was expected: a step that takes longer was held up by something else


@dataclass(slots=True)
class Crowd:
    """What is known of steps with about as many rows."""

    guess: Numbers  # [3], of the parts: running, passes, drafts
    squares: Numbers  # [3, 3], of how much of each part steps had; and
    products: Numbers  # [3], with what they took beside
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num: int = 0  # steps with drafts
    most_passes: int = 1
    parts: Numbers | None = None  # what follows from them; None: to be worked out

    @property
    def seconds(self) -> float | None:
        """Of a plain step."""
        return sorted(self.plain)[len(self.plain) // 2] if self.plain else None


class StepCosts:
    """Costs in plain steps."""

    def __init__(self, cheap_tokens: int, *, takes_passes: bool = False) -> None:
        """cheap_tokens: as many more as take a step as long again.  takes_passes: one for each draft."""
        self._cheap_tokens, self._passes = cheap_tokens, 0.2 if takes_passes else 0.01
        self._crowds: dict[int, Crowd] = {}
        self._a_prompt_token = [0.0, 0.0]  # seconds, without the proposer and with it

    def add_plain(self, num_rows: int, seconds: float) -> None:
        self._crowd(num_rows).plain.append(seconds)

    def add(self, num_rows: int, passes: int, drafts: float, seconds: float) -> float | None:
        """A step with so many passes, and drafts a row.  Returns its time in plain ones, if that is known."""
        plain = self.plain_seconds(num_rows)
        if plain is None:
            return None
        crowd = self._crowd(num_rows)
        expected = 1 + float(self.extra(num_rows, np.array([passes]), np.array([drafts]))[0])
        took = min(seconds / plain, MOST_SURPRISE * expected)
        parts = np.array([1.0, max(0, passes - 1), drafts])
        lasting = LASTING * (1 - REMEMBERING)
        crowd.squares = crowd.squares * REMEMBERING + np.outer(parts, parts) + lasting * np.eye(3)
        crowd.products = crowd.products * REMEMBERING + parts * (took - 1) + lasting * crowd.guess
        crowd.num += 1
        crowd.most_passes = max(crowd.most_passes, passes)
        crowd.parts = None
        return took

    def add_prompt(self, num_tokens: int, seconds: float, *, is_followed: bool) -> float:
        """A step with prompts.  Returns the seconds that the proposer took of it, or a guess."""
        means, each = self._a_prompt_token, seconds / num_tokens
        means[is_followed] += (each - means[is_followed]) / 4 if means[is_followed] else each
        if not is_followed:
            return 0.0
        if not means[0]:
            return seconds * PROMPTS_SHARE
        return min(max(0.0, means[1] - means[0]) * num_tokens, seconds / 2)

    def most_passes(self, num_rows: int) -> int:
        """Of the steps that have been seen."""
        return self._nearest(num_rows).most_passes

    def extra(self, num_rows: int, passes: Numbers, drafts: Numbers) -> Numbers:
        """What a step takes beside a plain one; passes, drafts a row: [n]."""
        a_step, a_pass, a_draft = self.parts(num_rows)
        return a_step + a_pass * (passes - 1) + a_draft * drafts

    def parts(self, num_rows: int) -> Numbers:
        """[3]: of a step for running, for each further pass, for each draft of every row; none below 0."""
        crowd = self._nearest(num_rows)
        if crowd.parts is None:
            crowd.parts = np.maximum(np.linalg.solve(crowd.squares, crowd.products), 0.0)
        return crowd.parts

    def plain_seconds(self, num_rows: int) -> float | None:
        """Of a plain step with so many rows; between two numbers that are known, on a line."""
        size = size_of(num_rows)
        known = {n: seconds for n, c in self._crowds.items() if (seconds := c.seconds) is not None}
        if size in known:
            return known[size]
        below = max((other for other in known if other < size), default=None)
        above = min((other for other in known if other > size), default=None)
        if below is None or above is None:
            return None
        share = (size - below) / (above - below)
        return (1 - share) * known[below] + share * known[above]

    def _nearest(self, num_rows: int) -> Crowd:
        """Of those whose drafts are known."""
        crowd, size = self._crowd(num_rows), size_of(num_rows)
        if crowd.num:
            return crowd
        known = [(other, its) for other, its in self._crowds.items() if its.num]
        return min(known, key=lambda pair: abs(pair[0] - size), default=(size, crowd))[1]

    def _crowd(self, num_rows: int) -> Crowd:
        size = size_of(num_rows)
        if size not in self._crowds:
            guess = np.array(
                [0.05 + self._passes / 2, self._passes, size / (size + max(1, self._cheap_tokens))]
            )
            self._crowds[size] = Crowd(guess, np.eye(3), guess)
        return self._crowds[size]


def size_of(num_rows: int) -> int:
    """About as many: the number with its first three binary digits alone."""
    rest = max(0, num_rows.bit_length() - 3)
    return num_rows >> rest << rest
