"""Engines in step, in threads, on a toy all-to-all: random work, no deadlock, every step all engines'.

Pace and launcher are real.  What is toy's is the device: its layers of experts meet those of the other
engines, and fail where one of these brings another number of tokens, or does not come.
"""

from __future__ import annotations

import random
import socket
import threading
from itertools import combinations
from typing import cast

import numpy as np

from pellucid.cluster.line import Line, wait
from pellucid.graphs.launch import Launcher
from pellucid.graphs.shapes import StepShape
from pellucid.lockstep.launcher import LockstepLauncher
from pellucid.lockstep.pace import Pace
from pellucid.worker.inputs import StepCounts

PATIENCE = 2.0  # seconds
MOST_STEPS = 8  # of one engine's own
SHAPES = [
    StepShape(2, 2, num_logits=2),
    StepShape(4, 4, num_logits=4),
    StepShape(8, 3, max_query=3, num_logits=8),
]


def run(seed: int) -> None:
    """Engines with random work, to its end.  Raises what the first of them has failed of."""
    rng = random.Random(seed)
    works = [rng.choice([0, rng.randint(1, MOST_STEPS)]) for _ in range(rng.randint(2, 4))]
    meeting, fleet = Meeting(len(works)), list[Engine]()
    for index, pace in enumerate(paces(len(works))):
        fleet.append(Engine(index, pace, works[index], meeting, fleet, rng.randrange(1 << 30)))
    for engine in fleet:
        engine.start()
    for engine in fleet:
        engine.join(10 * PATIENCE)
    for engine in fleet:
        engine.pace.close()
    if meeting.errors:
        raise meeting.errors[0]
    assert not any(engine.is_alive() for engine in fleet), "a deadlock"
    check([engine.steps for engine in fleet], works)


def check(all_steps: list[list[tuple[int, bool]]], works: list[int]) -> None:
    """all_steps: each engine's, the tokens of each, and whether it had work for it."""
    steps = list(zip(*all_steps, strict=True))
    assert all(len({num_tokens for num_tokens, _ in step}) == 1 for step in steps)
    assert all(any(has_work for _, has_work in step) for step in steps), "a step that nobody has work for"
    assert [sum(has_work for _, has_work in steps) for steps in all_steps] == works


def paces(num: int, patience: float = PATIENCE) -> list[Pace]:
    """Of so many engines, each with a line to every other one."""
    lines: list[dict[int, Line]] = [{} for _ in range(num)]
    for one, other in combinations(range(num), 2):
        lines[one][other], lines[other][one] = map(Line.over, socket.socketpair())
    made = [Pace() for _ in range(num)]
    for pace, own in zip(made, lines, strict=True):
        pace.open(own, patience)
    return made


class Meeting:
    """Where layers of experts meet: every engine comes as often, and with as many tokens."""

    def __init__(self, num: int) -> None:
        self._brought, self._barrier = [0] * num, threading.Barrier(num)
        self.errors: list[Exception] = []  # the first one has led to the others

    def come(self, engine: int, num_tokens: int) -> None:
        self._brought[engine] = num_tokens
        self._barrier.wait(PATIENCE)
        brought = list(self._brought)
        self._barrier.wait(PATIENCE)
        assert len(set(brought)) == 1, f"engines bring {brought} tokens"

    def break_off(self, error: Exception) -> None:
        self.errors.append(error)
        self._barrier.abort()


class Engine(threading.Thread):
    """Has a step to do now and then; else it sleeps until another one has.

    Its own launcher, inside the real one, and its own layer of experts.
    """

    def __init__(
        self, index: int, pace: Pace, work: int, meeting: Meeting, fleet: list[Engine], seed: int
    ) -> None:
        """work: steps to do.  fleet: all engines."""
        super().__init__(daemon=True)
        self.index, self.pace, self.work, self.meeting, self.fleet = index, pace, work, meeting, fleet
        self.rng = random.Random(seed)
        self.steps: list[tuple[int, bool]] = []
        inner = cast("Launcher[None]", self)
        self._launcher = LockstepLauncher(inner, SHAPES, [self], pace, lambda: lambda run: run)
        self._launcher.capture()
        self._launcher.capture()

    def run(self) -> None:
        try:
            while any(engine.work for engine in self.fleet):
                if self.work and self.rng.random() < 0.5:
                    self._launcher(self._random_counts())
                    self.work -= 1
                else:
                    wait(self.pace.lines, self.rng.choice([0.0, 0.002]))
                self.pace.attend()
        except Exception as error:
            self.meeting.break_off(error)
            self.pace.close()

    def _random_counts(self) -> StepCounts:
        num_rows, any_drafts = self.rng.randint(1, 5), self.rng.random() < 0.3
        num_drafts = np.array([self.rng.randint(0, 2 * any_drafts) for _ in range(num_rows)])
        num_query = 1 + num_drafts
        if self.rng.random() < 0.2:
            num_query[-1] += self.rng.randint(1, 9)
        return StepCounts(
            slots=np.arange(num_rows),
            num_query=num_query,
            num_drafts=num_drafts,
            num_sampled=1 + num_drafts,
            num_scores=np.full(num_rows, self.rng.random() < 0.1, dtype=int),
            num_propose=self.rng.randint(0, 2 * any_drafts),
        )

    # A launcher of steps, and a layer of experts

    def capture(self) -> None:
        """Recordings run what they have recorded."""

    def __call__(self, counts: StepCounts) -> None:
        assert (common := counts.common) is not None, "a step of one's own"
        if (shape := common.shape) is not None:
            assert not counts.has_chunks and not counts.any_scores, "nothing of that is recorded"
            assert shape.num_rows >= counts.num_rows, "a row has no place"
            assert shape.max_query >= max(counts.max_query, 1 + (counts.num_propose > 0)), "nor have drafts"
        assert common.num_tokens >= counts.num_tokens, "a token has no place"
        self._come(common.num_tokens, has_work=True)

    def lend(self, num_tokens: int) -> None:
        self._come(num_tokens, has_work=False)

    def _come(self, num_tokens: int, *, has_work: bool) -> None:
        self.steps.append((num_tokens, has_work))
        self.meeting.come(self.index, num_tokens)
