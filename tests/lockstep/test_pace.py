"""Engines in step, in threads: random work, no deadlock, every step all engines', none for nobody."""

from __future__ import annotations

import random
import socket
import threading
import time
from itertools import combinations

import pytest

from pellucid.cluster.line import Line, wait
from pellucid.dist.collectives import PeerError
from pellucid.graphs.shapes import StepShape
from pellucid.lockstep.launcher import has_room
from pellucid.lockstep.pace import NOTHING, Need, Pace


def paces(num: int, patience: float = 10.0) -> list[Pace]:
    """Of so many engines, each with a line to every other one."""
    lines: list[dict[int, Line]] = [{} for _ in range(num)]
    for one, other in combinations(range(num), 2):
        lines[one][other], lines[other][one] = map(Line.over, socket.socketpair())
    made = [Pace() for _ in range(num)]
    for pace, own in zip(made, lines, strict=True):
        pace.open(own, patience)
    return made


class Engine(threading.Thread):
    """Has a step to do now and then; else it sleeps until another one has."""

    def __init__(self, pace: Pace, seed: int, work: int, fleet: list[Engine]) -> None:
        """work: steps to do.  fleet: all engines."""
        super().__init__(daemon=True)
        self.pace, self.rng, self.work, self.fleet = pace, random.Random(seed), work, fleet
        self.steps: list[Need] = []  # as all have agreed
        self.own: list[Need] = []
        pace.follow = lambda: self.agree(NOTHING)

    def agree(self, need: Need) -> None:
        self.own.append(need)
        self.steps.append(self.pace.agree(need))

    def run(self) -> None:
        while any(engine.work for engine in self.fleet):
            if self.work and self.rng.random() < 0.5:
                self.agree(Need(self.rng.randint(1, 99), self.rng.randint(1, 9), 1, self.rng.randint(0, 1)))
                self.work -= 1
            else:
                wait(self.pace.lines, self.rng.choice([0.0, 0.002]))
            self.pace.attend()


@pytest.mark.parametrize("num", [2, 4])
def test_all_engines_take_the_same_steps_and_none_for_nobody(num: int) -> None:
    engines, work = list[Engine](), [0 if index == 1 else 30 for index in range(num)]
    for seed, pace in enumerate(paces(num)):
        engines.append(Engine(pace, seed, work[seed], engines))
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(30)
        assert not engine.is_alive(), "a deadlock"
    steps = engines[0].steps
    assert all(engine.steps == steps for engine in engines)
    for step, needs in zip(steps, zip(*(engine.own for engine in engines), strict=True), strict=True):
        assert step == Need(*map(max, zip(*needs, strict=True)))
        assert any(need != NOTHING for need in needs), "a step that nobody has work for"
    assert len(steps) <= sum(work)
    assert sum(need != NOTHING for engine in engines for need in engine.own) == sum(work)


def test_who_does_not_come_is_named() -> None:
    one, _other = paces(2, patience=0.2)
    began = time.monotonic()
    with pytest.raises(PeerError, match="engine 1 has not begun step 0 for 0.2 s; raise --worker-timeout"):
        one.agree(Need(1))
    assert time.monotonic() - began < 5


def test_who_has_ended_is_named_also_to_engines_that_idle() -> None:
    one, other, third = paces(3)
    other.close()
    for pace in (one, third):
        wait(pace.lines, 5)
        with pytest.raises(PeerError, match="engine 1 has ended"):
            pace.attend()


def test_what_one_engine_has_said_before_its_end_counts() -> None:
    one, other = paces(2)
    threading.Thread(target=lambda: (other.agree(Need(3)), other.close())).start()
    assert one.agree(Need(2, 7)) == Need(3, 7)


def test_a_recording_has_room_for_the_needs_of_all() -> None:
    plain, verifying = StepShape(8, 8, num_logits=8), StepShape(16, 4, max_query=4, num_logits=16)
    assert has_room(plain, Need(8, 8, 1)) and not has_room(plain, Need(9, 8, 1))
    assert not has_room(plain, Need(2, 1, 2)), "drafts"
    assert has_room(verifying, Need(16, 4, 4)) and not has_room(verifying, Need(5, 5, 1)), "rows"
