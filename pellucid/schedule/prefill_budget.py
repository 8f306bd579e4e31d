"""How many prompt tokens a step may have beside streams: chunks are sized by what they cost.

Whoever reads along waits, between two tokens, for a whole step, and what makes steps long is prompts.  The
prefill budget of a step learns from those that come home what decodes and prompt tokens take, and keeps steps
with streams in them to a target.  Knows no clock: the engine tells how long a step took.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict, deque
from typing import NamedTuple, Protocol

FLOOR = 64  # tokens that a step may always have for prompts, so that these advance under any target
TILE = 128  # rows that products compute at once, needed or not: a step has room for whole tiles of tokens
# Places for decodes that a step has beside chunks, needed or not (graphs/shapes.py), and how many more may
# come with the chunks.  So many share tiles with these; more decodes have tiles of their own.
PLACES, MORE = (32, 64), 16

# The target of those who name none, in steps that only decode.  At 3.5, a prompt has five sevenths of each
# step: it is done in 7/5 of the time that it takes alone, and 4.5 would save it only another 1/9.  Where
# prompts hardly ever cease, that overhead is what makes them queue without end: there they get more.
EASY_MULTIPLE, BUSY_MULTIPLE = 3.5, 5.7
# Seconds, the target at least: nobody reads 200 tokens a second, and where decodes are very fast even a small
# chunk costs several of them.
LEAST_TARGET = 4.8e-3
# Seconds: more than 37 tokens a second are no smoother, so streams give so much readily, and hardly more.
SMOOTH_TARGET = 27e-3
# Of what any chunk adds to a step, however small: so much its tokens may take at least, lest prompts crawl.
WORTHWHILE = 0.5
# Where more wait for a first token, for each token of decodes, those who decode bear more.
FAIR_CROWD, FEW_DECODES = 0.1, 32
LOOKS = 3  # steps without prompts, for decodes that are no less than twice as many as are known
BUSY_SECONDS = 1.0  # about how long the share of time with prompts looks back
AIM = 0.9  # of a target that the user names: steps scatter around what was expected of them

SHORTEST = 1e-6  # seconds that a step takes at least, whatever a clock says
NEWEST = 1 / 8  # what the newest of many steps counts, of those that only decode
MOST_SURPRISE = 4.0  # a step that took more times what was expected is an accident, and counts as this much
FEW_TOKENS = 256  # a chunk of fewer takes about as long as one of so many: until then the weights are read
LONG_REACH = 16384  # first guess: so many tokens before a prompt token double what it takes


class PrefillBudget(Protocol):
    """Asked before a step is planned, told of it when it is, and once more when it has come home."""

    def room(self, num_decode: int, start: int, num_waiting: int = 0) -> int:
        """Prompt tokens that may join `num_decode` tokens of a step in which somebody streams.

        At least 1 if there are no decodes, and now and then at any rate.
        start: tokens before the first chunk.  num_waiting: requests that have no first token yet.
        """
        ...

    def planned(self, num_decode: int, num_prompt: int, reach: int) -> None:
        """A step has so many tokens of decodes (drafts included) and prompts.

        reach: the tokens before each prompt token, summed.
        """
        ...

    def took(self, seconds: float) -> None:
        """The oldest step planned has come home, so long after the one before it or after its own start."""
        ...


class UnlimitedPrefill:
    """No limit."""

    def room(self, num_decode: int, start: int, num_waiting: int = 0) -> int:
        return sys.maxsize

    def planned(self, num_decode: int, num_prompt: int, reach: int) -> None:
        pass

    def took(self, seconds: float) -> None:
        pass


class Load(NamedTuple):
    """What `planned` was told."""

    num_decode: int
    num_prompt: int
    reach: int


class LearnedPrefillBudget:
    """Expects of a step with prompts

        fixed * (seconds of a step with these decodes alone) + token * num_prompt + attention * reach

    Decodes alone are measured, by powers of two of their number; steps with prompts teach the factors.
    """

    def __init__(self, target: float | None = None) -> None:
        """target: seconds of a step with streams in it; None: a multiple of one without prompts."""
        self._target = target
        self._loads: deque[Load] = deque()  # of steps under way
        # Seconds of steps without prompts, by bit length of their tokens.
        self._decodes: defaultdict[int, Mean] = defaultdict(Mean)
        self._factors: Factors | None = None
        self._looks: Counter[int] = Counter()  # at what decodes take without prompts, by the same
        self._busy = 0.0  # share of the last time in which steps had prompts
        self._was_surprised = False  # by the last step whose decodes had to be guessed

    def room(self, num_decode: int, start: int, num_waiting: int = 0) -> int:
        if self._factors is None:
            return FLOOR
        crowd = num_waiting / max(num_decode, FEW_DECODES)
        if crowd <= FAIR_CROWD and self._wants_look(num_decode):
            return 0
        fixed, token, attention = self._factors.values
        decode = self._decode_seconds(num_decode)
        spare = self._target_beside(decode, crowd) - fixed * decode
        if self._target is None:
            spare = max(spare, (fixed - 1.0) * decode * WORTHWHILE)
        if spare <= 0:
            return FLOOR
        # n tokens behind `start` others reach n * (start + n / 2): solve for n.
        first = token + attention * start
        n = 2 * spare / (first + math.sqrt(first * first + 2 * attention * spare))
        return max(FLOOR, fill_tiles(num_decode, int(n)))

    def _target_beside(self, decode: float, crowd: float) -> float:
        if self._target is not None:
            return AIM * self._target
        easy, busy = EASY_MULTIPLE * decode, BUSY_MULTIPLE * decode
        busy = min(busy, max(SMOOTH_TARGET, 2 * easy - SMOOTH_TARGET))
        target = (easy + (busy - easy) * self._busy) * max(1.0, crowd / FAIR_CROWD)
        return max(target, LEAST_TARGET) if target else target

    def planned(self, num_decode: int, num_prompt: int, reach: int) -> None:
        self._loads.append(Load(num_decode, num_prompt, reach))

    def took(self, seconds: float) -> None:
        load, seconds = self._loads.popleft(), max(seconds, SHORTEST)
        has_prompts = load.num_prompt > 0
        self._busy += min(1.0, seconds / BUSY_SECONDS) * (has_prompts - self._busy)
        if has_prompts:
            self._learn_prompts(load, seconds)
        elif load.num_decode and not (self._loads and self._loads[0].num_prompt):
            # Else the host has launched a step with prompts meanwhile, and may have seen the end too late.
            self._learn_decodes(load, seconds)

    def _learn_decodes(self, load: Load, seconds: float) -> None:
        self._decodes[_bucket(load.num_decode)].add(seconds)

    def _learn_prompts(self, load: Load, seconds: float) -> None:
        if load.num_decode and not self._is_measured(load.num_decode):
            self._guess_decodes(load, seconds)
        decode = self._decode_seconds(load.num_decode)
        if self._factors is None:
            token = max(seconds - decode, seconds / 2) / max(load.num_prompt, FEW_TOKENS)
            self._factors = Factors(1.0, token, token / LONG_REACH)
        else:
            self._factors.learn((decode, load.num_prompt, load.reach), seconds)

    def _guess_decodes(self, load: Load, seconds: float) -> None:
        """What so many decodes may take alone, though none ever are: a crowd always has prompts."""
        fixed, token, attention = self._factors.values if self._factors else (1.0, 0.0, 0.0)
        prompts = token * load.num_prompt + attention * load.reach
        expected = fixed * self._decode_seconds(load.num_decode) + prompts
        is_surprise = bool(self._decodes) and seconds > MOST_SURPRISE * expected
        if is_surprise and not self._was_surprised:
            self._was_surprised = True
            return  # an accident, if alone: nothing would correct the guess while prompts never cease
        self._was_surprised = False
        if load.num_prompt <= FLOOR:
            self._learn_decodes(load, seconds)  # about that
        elif self._factors is not None and (bucket := _bucket(load.num_decode)) not in self._decodes:
            fewer = (mean.value for known, mean in self._decodes.items() if known < bucket)
            self._decodes[bucket] = Mean(max(seconds - prompts, *fewer, 0.0))

    def _wants_look(self, num_decode: int) -> bool:
        """Streams where prompts never cease: unless some steps do without, nobody learns what they take."""
        if not num_decode or self._target is not None or self._is_measured(num_decode):
            return False
        self._looks[_bucket(num_decode)] += 1
        return self._looks[_bucket(num_decode)] <= LOOKS

    def _is_measured(self, num_tokens: int) -> bool:
        """Or are decodes of about this number unknown, of half of it as well, or guessed?"""
        bucket = _bucket(num_tokens)
        mean = self._decodes.get(bucket) or self._decodes.get(bucket - 1)
        return mean is not None and mean.num > 0

    def _decode_seconds(self, num_tokens: int) -> float:
        """Of a step with these decodes alone, or with the nearest number that is known; 0 if none is."""
        if not self._decodes:
            return 0.0
        bucket = _bucket(num_tokens)
        return self._decodes[min(self._decodes, key=lambda known: abs(known - bucket))].value


def fill_tiles(num_decode: int, num_prompt: int) -> int:
    """So many prompt tokens or some fewer, that fill tiles together with the decodes beside them."""
    beside = next((max(num_decode, places) for places in PLACES if num_decode <= places + MORE), 0)
    return (num_prompt + beside) // TILE * TILE - beside


class Mean:
    """A running mean, in which the newest counts most and accidents count little."""

    __slots__ = ("num", "value")

    def __init__(self, guess: float = 0.0) -> None:
        self.num = 0
        self.value = guess

    def add(self, value: float) -> None:
        self.num += 1
        likely = min(value, 2 * self.value) if self.num > 1 else value
        self.value += max(NEWEST, 1 / self.num) * (likely - self.value)


class Factors:
    """What each part of a step costs, from what whole steps took: a Kalman filter of relative errors.

    The factors stay positive.  `_doubt` is the covariance of their errors, in units of the first guesses.
    """

    FIRST_DOUBT = 0.3
    DRIFT = 1e-4  # of the doubt, with each step: factors change, slowly
    NOISE = 0.01  # variance of a step's time, as a share of it
    LEAST = 1e-3  # of the first guess

    def __init__(self, *first: float) -> None:
        """first: guesses, all positive."""
        self.values, self._units = list(first), first
        self._doubt = [[self.FIRST_DOUBT * (i == j) for j in range(len(first))] for i in range(len(first))]

    def learn(self, amounts: tuple[float, ...], seconds: float) -> None:
        """A step with so much of each part took so long."""
        expected = sum(value * amount for value, amount in zip(self.values, amounts, strict=True))
        error = min(max(seconds / expected, 1 / MOST_SURPRISE), MOST_SURPRISE) - 1
        parts = [unit * amount / expected for unit, amount in zip(self._units, amounts, strict=True)]
        blame = [_dot(row, parts) for row in self._doubt]
        certainty = 1 / (self.NOISE + _dot(blame, parts))
        for i, (value, unit) in enumerate(zip(self.values, self._units, strict=True)):
            self.values[i] = max(value + unit * blame[i] * certainty * error, value / 2, unit * self.LEAST)
            for j, other in enumerate(blame):
                self._doubt[i][j] -= blame[i] * certainty * other
            if self._doubt[i][i] < self.FIRST_DOUBT:
                self._doubt[i][i] += self.DRIFT


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _bucket(num_tokens: int) -> int:
    return (max(num_tokens, 1) - 1).bit_length()
