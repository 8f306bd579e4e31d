"""An engine that serves an owner; here in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pellucid.cluster.desk import Desk
from pellucid.cluster.line import Line, wait
from pellucid.cluster.messages import (
    Abort,
    Add,
    ClearPrefixCache,
    Message,
    Order,
    Orders,
    Stop,
    Turn,
    View,
    Watch,
    decode,
    encode,
)
from pellucid.engine.member import serve
from pellucid.observe.xray import Frame
from pellucid.types import FinishReason, SeqUpdate
from tests.engine.test_core import make_engine
from tests.schedule.device import make_request


class Owner:
    """The other end of an engine's line."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def send(self, *orders: Order) -> None:
        self.line.send(encode(Orders([*orders])))

    def heard(self, seconds: float) -> list[Message]:
        """What the engine says, waited for up to so many seconds."""
        wait([self.line], seconds)
        return [decode(frame) for frame in self.line.receive()]


@contextmanager
def serving(dies_in: str = "", **options: int) -> Iterator[Owner]:
    """An engine's process, but for the process."""
    engine, executor = make_engine(**options)
    executor.dies_in = dies_in
    ours, theirs = Line.pair()
    thread = threading.Thread(target=serve, args=(engine, Desk(Line(*theirs), "engine 0", memoryview(b""))))
    thread.start()
    yield Owner(ours)
    ours.send(encode(Stop()))
    thread.join(10)
    assert not thread.is_alive()


def turns(owner: Owner, num_heard: int) -> Iterator[Turn]:
    """What the engine says until it has read so many messages and has nothing to do."""
    while said := owner.heard(10):
        for turn in said:
            assert isinstance(turn, Turn)
            yield turn
            if turn.num_heard == num_heard and not turn.has_work:
                return
    pytest.fail("the engine says nothing")


def ends(said: list[Turn]) -> dict[str, FinishReason]:
    updates = [SeqUpdate(*packed) for turn in said for packed in turn.updates]
    return {u.request_id: u.finish_reason for u in updates if u.finish_reason is not None}


def test_all_orders_of_a_message_are_followed_before_the_next_turn() -> None:
    with serving() as owner:
        names = "abc"
        owner.send(*(Add.of(make_request(name, max_tokens=4)) for name in names))
        said = list(turns(owner, 1))
    tokens = [[packed[1] for packed in turn.updates] for turn in said]
    assert all(len(row) == 3 for row in tokens if row), "the three ran in the same steps"
    assert ends(said) == dict.fromkeys(names, FinishReason.LENGTH)
    assert said[-1].stats.num_sampled_tokens == 12 and said[-1].error is None


def test_aborts_are_answered_and_an_abort_of_nobody_is_acknowledged() -> None:
    with serving() as owner:
        owner.send(Add.of(make_request("a", max_tokens=40)), Abort("a"))
        assert ends(list(turns(owner, 1))) == {"a": FinishReason.ABORT}
        owner.send(Abort("nobody"))
        (turn,) = turns(owner, 2)
        assert turn.updates == []


def test_a_cleared_prefix_cache_is_empty() -> None:
    prompt = list(range(12))
    with serving() as owner:
        for num_heard, extra in ((1, []), (2, []), (3, [ClearPrefixCache()])):
            orders: list[Order] = [*extra, Add.of(make_request(str(num_heard), prompt, max_tokens=2))]
            owner.send(*orders)
            said = list(turns(owner, num_heard))
    assert said[-1].stats.num_prompt_tokens == 36
    assert said[-1].stats.num_cached_tokens == 8, "of the second request alone"


def test_a_watched_engine_shows_what_it_does_until_it_rests() -> None:
    with serving() as owner:
        owner.send(Watch(True), Add.of(make_request("a", max_tokens=40)))
        frames: list[Frame] = []
        while said := owner.heard(0.5):
            frames += [message.frame for message in said if isinstance(message, View)]
        owner.send(Watch(False), Add.of(make_request("b", max_tokens=40)))
        list(turns(owner, 2))
    assert frames[0].is_first and not any(frame.is_first for frame in frames[1:])
    assert sum(sum(step.rows[3::4]) for frame in frames for step in frame.steps) == 40
    assert not frames[-1].running, "the last one is of the end"


def test_an_engine_that_has_nothing_to_do_notices_that_a_worker_has_died(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    monkeypatch.setattr("pellucid.engine.member.IDLE_SECONDS", 0.01)
    with serving() as owner:
        owner.send(Add.of(make_request("a", max_tokens=4)))
        assert list(turns(owner, 1))[-1].error is None
        while owner.heard(0.1):  # an engine at rest says so once
            pass
    with serving(dies_in="idleness") as owner:
        (turn,) = turns(owner, 0)
        assert turn.error is not None and "worker 3 has died" in turn.error


def test_a_request_that_cannot_be_read_is_answered_and_harms_no_other() -> None:
    odd = make_request("odd")
    object.__setattr__(odd, "priority", "high")
    with serving() as owner:
        owner.send(Add.of(odd))
        said = list(turns(owner, 1))
        assert ends(said) == {"odd": FinishReason.ERROR}
        error = SeqUpdate(*said[-1].updates[0]).error
        assert error is not None and "cannot be read" in error and "priority" in error
        owner.send(Add.of(make_request("b", max_tokens=2)))
        assert ends(list(turns(owner, 2))) == {"b": FinishReason.LENGTH}
