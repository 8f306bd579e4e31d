"""Ctrl-C at any place in a step: nothing is lost, and the engine goes on."""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import pellucid
from pellucid.engine.core import Engine
from pellucid.interrupts import held_back
from pellucid.types import FinishReason, SeqUpdate
from tests.engine.test_core import EagerExecutor
from tests.schedule.device import make_request, make_scheduler

OURS = Path(pellucid.__file__).parent
HOST = tuple(
    str(OURS / name) for name in ("engine", "schedule", "kv", "text", "llm_engine.py", "interrupts.py")
)
NUM_PLACES = 200


class Places:
    """Counts the places in our code at which Python runs signal handlers, and sends a Ctrl-C at one of them.

    These are behind calls, at the beginning of functions and where loops go back.
    """

    def __init__(self, chosen: int = 0) -> None:
        self.num, self._chosen = 0, chosen
        self._previous: dict[FrameType, str] = {}  # opcodes

    def __call__(self, frame: FrameType, event: str, argument: object) -> Places | None:
        if not frame.f_code.co_filename.startswith(HOST):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            previous = self._previous.get(frame, "RESUME")
            self._previous[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if previous.startswith(("RESUME", "CALL", "JUMP_BACKWARD")):
                self.num += 1
                if self.num == self._chosen:
                    signal.raise_signal(signal.SIGINT)
        elif event == "return":
            self._previous.pop(frame, None)
        return self

    @contextmanager
    def watched(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def run(places: Places) -> tuple[list[SeqUpdate], int]:
    """All that an engine says of some requests, and how often it was interrupted."""
    engine = Engine(make_scheduler(num_slots=2, max_model_len=24), EagerExecutor(), depth=2)
    for name, num_tokens in (("a", 5), ("too long", 30), ("b", 9), ("c", 4), ("gone", 3)):
        engine.add(make_request(name, num_tokens, max_tokens=4))
    engine.abort("gone")
    updates: list[SeqUpdate] = []
    num_interrupted = 0
    while engine.has_work:
        try:
            with places.watched():
                new = engine.step()
            updates += new
        except KeyboardInterrupt:
            num_interrupted += 1
    assert engine.error is None and engine.scheduler.kv.usage == 0
    return updates, num_interrupted


def told(updates: list[SeqUpdate]) -> dict[str, tuple[list[int], list[FinishReason]]]:
    return {
        name: (
            [token for update in updates if update.request_id == name for token in update.new_token_ids],
            [u.finish_reason for u in updates if u.request_id == name and u.finish_reason is not None],
        )
        for name in {update.request_id for update in updates}
    }


def test_ctrl_c_anywhere_in_a_step_loses_nothing() -> None:
    everywhere = Places()
    expected, num_interrupted = run(everywhere)
    assert not num_interrupted and everywhere.num > 2 * NUM_PLACES
    for chosen in range(1, everywhere.num, everywhere.num // NUM_PLACES):
        updates, num_interrupted = run(Places(chosen))
        assert told(updates) == told(expected), f"interrupted at place {chosen}"
        assert num_interrupted == 1, f"Ctrl-C at place {chosen} came to nothing"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def handler_of_sigint(handler: Callable[[int, FrameType | None], object] | int) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is handler, "whatever was there is there again"
    finally:
        signal.signal(signal.SIGINT, before)


def test_whatever_handler_there_is_runs_once_all_is_whole() -> None:
    order: list[str] = []
    with handler_of_sigint(lambda number, frame: order.append("handler")), held_back:
        with held_back:
            signal.raise_signal(signal.SIGINT)
        order.append("whole")
        held_back.let_through()
        order.append("the rest")
    assert order == ["whole", "handler", "the rest"]


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    with handler_of_sigint(signal.SIG_IGN), held_back:
        signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_is_not_held_back() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), held_back:
        signal.raise_signal(signal.SIGINT)
        reached = True
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was held back")
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_anywhere_leaves_the_handler_that_was_there() -> None:
    places = Places()
    with places.watched(), held_back:
        pass
    for chosen in range(1, 2 * places.num):  # the first Ctrl-C adds some places
        with pytest.raises(KeyboardInterrupt), Places(chosen).watched(), held_back:
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"place {chosen}"
        with pytest.raises(KeyboardInterrupt), held_back:
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"after place {chosen}"


def test_other_threads_hold_nothing_back() -> None:
    def in_a_thread() -> None:
        with held_back:
            entered.set()
            left.wait(10)

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    entered.wait(10)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    left.set()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
