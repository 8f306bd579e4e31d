"""Engines in step: random work (simulate.py), and what they say of one that does not come or has ended."""

from __future__ import annotations

import threading
import time

import pytest

from pellucid.cluster.line import wait
from pellucid.dist.collectives import PeerError
from pellucid.graphs.shapes import StepShape
from pellucid.lockstep.launcher import has_room
from pellucid.lockstep.pace import Need
from tests.lockstep.simulate import paces, run


@pytest.mark.parametrize("seed", range(40))
def test_all_engines_take_the_same_steps_and_none_for_nobody(seed: int) -> None:
    run(seed)


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
