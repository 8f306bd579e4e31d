"""Whether drafts pay at all, by the clock: an account of the time that they have saved.

All that speculation costs is in a step's seconds: the drafter's passes, the tokens of drafts, a host that has
more to do.  So it is not modelled but measured, for about as many rows as there are: a step with drafts takes
so many times a plain one's seconds, and yields so many tokens a row; the difference goes to the account, in
plain steps.  A hundredth of every step comes on top: what may be spent on finding out.  While the account is
in credit drafts are wanted.  Where they lose it is soon empty; then nobody gets any, no drafter runs, and
hundredths are saved until they pay a trial.  Where drafts win it is full.  So whatever drafts are like, and
whatever noise is on the clock, they cost a hundredth of the time, and what the account holds.
What a plain step takes is looked at before drafts begin, and again now and then.  Steps with prompts in them
say nothing.  No torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SHARE = 0.01  # of all time may be lost
FIRST, FOR_TRIAL, MOST = 4.0, 2.0, 8.0  # plain steps: in the account at first, for a trial, and at most
LOOK = 4  # plain steps
SOONEST, LATEST = 16, 512  # steps with drafts before another look, which costs half a hundredth between
WINDOW = 16  # plain steps that are remembered
FORGETTING = 1 / 16  # weight of a step
MOST_SURPRISE = 2.0  # times what was expected: a step that takes longer was held up by something else


class Plain:
    """Plain steps: the middle one of the last few, for some are held up by something else."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def seconds(self) -> float | None:
        return sorted(self._last)[len(self._last) // 2] if self._last else None


@dataclass(slots=True)
class Drafting:
    """Steps with drafts, as moving means."""

    num: int = 0
    seconds: float = 0.0
    drafts: float = 0.0  # of a row
    tokens: float = 1.0  # that a row yields

    def add(self, seconds: float, drafts: float, tokens: float) -> None:
        weight = max(FORGETTING, 1 / (self.num + 1))
        self.seconds += weight * (seconds - self.seconds)
        self.drafts += weight * (drafts - self.drafts)
        self.tokens += weight * (tokens - self.tokens)
        self.num += 1


@dataclass(slots=True)
class Crowd:
    """What is known of steps with about as many rows."""

    plain: Plain = field(default_factory=Plain)
    drafting: Drafting = field(default_factory=Drafting)
    since_look: int = 0  # steps with drafts

    @property
    def is_stale(self) -> bool:
        """Is it time for a look?  The nearer the two are, the sooner, and the less it costs."""
        plain, drafting = self.plain.seconds, self.drafting
        if plain is None or not drafting.num:
            return self.since_look >= SOONEST
        gain = drafting.tokens / drafting.seconds * plain
        return self.since_look >= min(max(SOONEST, LOOK * (gain - 1) / (SHARE / 2)), LATEST)

    @property
    def price(self) -> float | None:
        """Seconds that one draft more for each row takes, in tokens of a row; None: nobody knows."""
        plain, drafting = self.plain.seconds, self.drafting
        if plain is None or not drafting.num or drafting.drafts <= 0:
            return None
        seconds = max(0.0, drafting.seconds - plain) / drafting.drafts
        return seconds * max(drafting.tokens / drafting.seconds, 1 / plain)


class Switch:
    """On: drafts are wanted.  A look at plain steps lasts until enough is known."""

    def __init__(self, *, is_on: bool = False) -> None:
        """is_on: to begin with; else a look is the first thing."""
        self.is_on = is_on
        self.left = 0 if is_on else LOOK  # of a look, plain steps
        self.credit = FIRST
        self.saved = 0.0  # seconds, by all steps with drafts
        self._crowds: dict[int, Crowd] = {}  # by about how many rows

    @property
    def is_looking(self) -> bool:
        """Off for a moment alone?"""
        return self.left > 0

    @property
    def is_due(self) -> bool:
        """Is there enough for a trial?"""
        return self.credit >= FOR_TRIAL

    def price(self, num_rows: int) -> float | None:
        """What one draft more for each of so many rows costs, in tokens of a row; None: nobody knows."""
        known = [(size, crowd.price) for size, crowd in self._crowds.items() if crowd.price is not None]
        return min(known, key=lambda pair: abs(pair[0] - num_rows), default=(0, None))[1]

    def took(self, seconds: float, num_rows: int, num_new: int, num_drafts: int, *, is_plain: bool) -> None:
        """A step of decodes alone has come home.

        num_drafts: that it verified, if it made others, too.  is_plain: it did neither.
        """
        crowd = self._crowds.setdefault(size_of(num_rows), Crowd())
        seconds, tokens = max(seconds, 1e-9), num_new / num_rows
        self.credit += SHARE
        if is_plain:
            crowd.plain.add(seconds)
        elif (plain := self._plain_seconds(num_rows)) is not None:
            seconds = min(seconds, MOST_SURPRISE * max(plain, crowd.drafting.seconds))
            self.credit += tokens - seconds / plain
            self.saved += tokens * plain - seconds
            if num_drafts * 2 >= num_rows:  # else too few to tell
                crowd.drafting.add(seconds, num_drafts / num_rows, tokens)
        self._decide(crowd, num_rows, is_plain=is_plain)
        self.credit = min(self.credit, MOST)

    def _decide(self, crowd: Crowd, num_rows: int, *, is_plain: bool) -> None:
        crowd.since_look += not is_plain
        if self.is_looking:
            self.left -= is_plain
            self.is_on = not self.is_looking and self.credit > 0
        elif not self.is_on:
            self.is_on = self.is_due
        elif self.credit < 0:
            self.is_on = False
        elif crowd.is_stale or self._plain_seconds(num_rows) is None:
            crowd.since_look = 0
            self.is_on, self.left = False, LOOK

    def _plain_seconds(self, num_rows: int) -> float | None:
        """What a plain step with so many rows takes; between two numbers that are known, on a line."""
        size = size_of(num_rows)
        known = {n: seconds for n, c in self._crowds.items() if (seconds := c.plain.seconds) is not None}
        if size in known:
            return known[size]
        below = max((other for other in known if other < size), default=None)
        above = min((other for other in known if other > size), default=None)
        if below is None or above is None:
            return None
        share = (size - below) / (above - below)
        return (1 - share) * known[below] + share * known[above]


def size_of(num_rows: int) -> int:
    """About as many: the number with its first three binary digits alone."""
    rest = max(0, num_rows.bit_length() - 3)
    return num_rows >> rest << rest
