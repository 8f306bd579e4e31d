"""The one loop: any thread hands in, one thread steps, and every request ends in an answer."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from pellucid.connectors.base import Ended
from pellucid.engine.core import Engine
from pellucid.executor.base import Hear
from pellucid.features.base import AskingRow
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.schedule.prefill_budget import UnlimitedPrefill
from pellucid.types import FinishReason, Request, SeqUpdate
from tests.schedule.device import Device, ToyGrammar, make_request, make_scheduler
from tests.schedule.store import Store, StoreTransfer


@dataclass
class EagerTicket:
    """A step that has run; wait() may tell that the worker has died."""

    executor: EagerExecutor
    answer: StepResult
    late: object = None
    wait_seconds: float = 0.0  # that each call takes
    result_seconds: float = 0.0

    def provide(self, late: Mapping[str, object]) -> None:
        self.late = late["grammar"]

    def wait(self) -> None:
        time.sleep(self.wait_seconds)
        if self.executor.dies_in == "wait":
            raise RuntimeError("worker 3 has died")
        if self.executor.dies_in == "interrupt":
            self.executor.dies_in = ""
            raise KeyboardInterrupt

    def result(self) -> StepResult:
        time.sleep(self.result_seconds)
        return self.answer


@dataclass
class EagerExecutor:
    """Runs each plan when it is submitted."""

    device: Device = field(default_factory=Device)
    tickets: list[EagerTicket] = field(default_factory=list[EagerTicket])
    max_inflight: int = 0
    dies_in: str = ""
    is_shut_down: bool = False
    num_late_compilations: int = 0

    def start(self, resolved: object) -> object:
        raise NotImplementedError

    def submit(self, plan: StepPlan) -> EagerTicket:
        if self.dies_in == "submit":
            raise RuntimeError("worker 3 has died")
        if self.dies_in == "interrupted submit":
            raise KeyboardInterrupt
        self.max_inflight = max(self.max_inflight, plan.id - plan.committed)
        answer = self.device.run(plan)
        if self.num_late_compilations:
            answer = replace(answer, num_late_compilations=self.num_late_compilations)
        self.tickets.append(EagerTicket(self, answer))
        return self.tickets[-1]

    def call(self, name: str, *args: object) -> object:
        raise NotImplementedError

    def check(self) -> None:
        if self.dies_in == "idleness":
            raise RuntimeError("worker 3 has died")

    def listen(self, hear: Hear) -> None:
        self.hear = hear

    @property
    def lines(self) -> tuple[()]:
        return ()

    def shutdown(self) -> None:
        self.is_shut_down = True


def make_engine(depth: int = 1, **options: Any) -> tuple[Engine, EagerExecutor]:
    executor = EagerExecutor()
    return Engine(make_scheduler(**options), executor, depth=depth, check_invariants=True), executor


def drain(engine: Engine) -> dict[str, list[SeqUpdate]]:
    """Step until everything is answered; updates by request."""
    updates: dict[str, list[SeqUpdate]] = {}
    while engine.has_work:
        for update in engine.step():
            updates.setdefault(update.request_id, []).append(update)
    return updates


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_depth_is_how_many_plans_are_in_flight_and_changes_no_answer(depth: int) -> None:
    engine, executor = make_engine(depth)
    for name in "abc":
        engine.add(make_request(name, max_tokens=9))
    updates = drain(engine)
    assert executor.max_inflight == depth
    tokens = {name: [t for u in answer for t in u.new_token_ids] for name, answer in updates.items()}
    assert tokens == {name: [100_005 + i * 1000 + n for n in range(9)] for i, name in enumerate("abc")}
    assert all(answer[-1].finish_reason is FinishReason.LENGTH for answer in updates.values())


def test_a_step_with_nothing_to_do_returns_nothing() -> None:
    engine, _ = make_engine()
    assert engine.step() == [] and engine.idle and not engine.has_work


def test_a_request_counts_as_work_from_the_moment_it_is_handed_in() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a"))
    assert engine.has_work and not engine.idle


def test_a_request_that_can_never_run_is_answered_by_the_next_step() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", 100))
    (update,) = engine.step()
    assert update.finish_reason is FinishReason.ERROR and not engine.has_work


def test_an_abort_is_answered_once_and_one_that_comes_too_late_never() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", max_tokens=40))
    engine.add(make_request("b", max_tokens=2))
    engine.step()
    engine.abort("a")
    updates = drain(engine)
    assert [u.finish_reason for u in updates["a"]] == [FinishReason.ABORT]
    engine.abort("b")
    assert engine.step() == []


@pytest.mark.parametrize("where", ["submit", "wait"])
def test_when_a_worker_dies_every_request_is_answered_with_its_message(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    engine, executor = make_engine(depth=2, num_slots=2)
    for name in "abc":
        engine.add(make_request(name))
    engine.step()
    executor.dies_in = where
    updates = drain(engine)
    assert sorted(updates) == ["a", "b", "c"]
    for answer in updates.values():
        assert answer[-1].finish_reason is FinishReason.ERROR
        assert answer[-1].error and "worker 3 has died" in answer[-1].error
    assert engine.error and not engine.has_work and engine.idle


def test_a_dead_engine_answers_whoever_still_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    engine, executor = make_engine()
    executor.dies_in = "submit"
    engine.add(make_request("a"))
    engine.step()
    engine.add(make_request("b"))
    (update,) = engine.step()
    assert update.request_id == "b" and update.error and "worker 3 has died" in update.error


def test_a_worker_that_dies_while_nothing_runs_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    engine, executor = make_engine()
    executor.dies_in = "idleness"
    engine.step()
    assert engine.error and "worker 3 has died" in engine.error
    engine.step()  # a second death is none


def test_a_refusal_in_the_step_that_dies_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    engine, executor = make_engine()
    executor.dies_in = "submit"
    engine.add(make_request("too long", 100))
    engine.add(make_request("a"))
    assert sorted(update.request_id for update in engine.step()) == ["a", "too long"]


def test_an_engine_that_would_spin_fails_loudly_instead(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    engine, _ = make_engine(num_slots=0)  # nobody can ever be admitted
    engine.add(make_request("a"))
    updates = [update for _ in range(3) for update in engine.step()]
    assert len(updates) == 1 and updates[0].error and "nothing can run" in updates[0].error


def test_while_a_connector_works_the_engine_neither_spins_nor_gives_up() -> None:
    store, executor = StoreTransfer(Store(num_tokens=4)), EagerExecutor()
    engine = Engine(make_scheduler(store=store), executor, depth=2, check_invariants=True)
    engine.patience = 0.01
    engine.add(make_request("a", max_tokens=2))
    for _ in range(20):
        assert engine.step() == []
    assert engine.idle and engine.has_work and engine.error is None
    engine.patience = 60.0
    threading.Timer(0.05, lambda: executor.hear(0, "kv_transfer", Ended(0, True))).start()
    assert engine.step() == [], "woken by what a worker says"
    assert sum(len(update.new_token_ids) for update in drain(engine)["a"]) == 2


def test_requests_may_come_from_any_thread() -> None:
    engine, _ = make_engine(depth=2)
    senders = [
        threading.Thread(target=lambda n=n: [engine.add(make_request(f"{n}-{i}")) for i in range(20)])
        for n in range(4)
    ]
    for sender in senders:
        sender.start()
    answered = set[str]()
    while any(sender.is_alive() for sender in senders) or engine.has_work:
        answered |= {update.request_id for update in engine.step() if update.finish_reason}
    assert len(answered) == 80


def test_something_may_be_run_between_two_steps() -> None:
    engine, _ = make_engine()
    ran = list[int]()
    engine.call(lambda: ran.append(1))
    assert engine.step() == [] and ran == [1]


class OddTokens(ToyGrammar):
    """A grammar that remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.gone: list[str] = []

    def late(self, rows: Sequence[AskingRow]) -> list[int]:
        self.seen += [row.token_ids.tolist() for row in rows]
        return [row.index for row in rows]

    def leave(self, request_id: str) -> None:
        self.gone.append(request_id)


def engine_with(grammar: ToyGrammar, *, depth: int = 1, check_invariants: bool = False) -> Engine:
    scheduler = make_scheduler(features={"grammar": grammar})
    return Engine(scheduler, EagerExecutor(), depth=depth, check_invariants=check_invariants)


def test_a_grammar_sees_every_token_before_it_masks_the_next_one() -> None:
    grammar = OddTokens()
    engine = engine_with(grammar, depth=2)
    engine.add(make_request("a", [1, 2, 3], max_tokens=3, grammar="odd"))
    engine.add(make_request("b", [4, 5, 6], max_tokens=3))
    tokens = [t for u in drain(engine)["a"] for t in u.new_token_ids]
    assert grammar.seen == [[1, 2, 3], [1, 2, 3, *tokens[:1]], [1, 2, 3, *tokens[:2]]]
    assert isinstance(engine.executor, EagerExecutor)
    assert [t.late for t in engine.executor.tickets if t.late is not None] == [[0], [0], [0]]
    assert sorted(grammar.gone) == ["a", "b"]


class SlowGrammar(OddTokens):
    """A grammar that is ready when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.attaching: Future[object] = Future()
        self.over: dict[str, str | None] = {}

    def prepare(self, request: Request) -> Future[object]:
        return self.attaching

    def ended(self) -> dict[str, str | None]:
        over, self.over = self.over, {}
        return over


def test_a_request_waits_for_its_grammar_and_no_other_does() -> None:
    grammar = SlowGrammar()
    engine = engine_with(grammar, depth=2)
    engine.add(make_request("a", [1, 2, 3], max_tokens=2, grammar="odd"))
    engine.add(make_request("b", [4, 5, 6], max_tokens=2))
    ended = [update.request_id for _ in range(5) for update in engine.step() if update.finish_reason]
    assert ended == ["b"]
    assert engine.has_work and engine.idle and engine.stats().num_waiting == 1
    grammar.attaching.set_result(None)
    assert drain(engine)["a"][-1].finish_reason is FinishReason.LENGTH
    assert not engine.has_work


def test_a_grammar_that_cannot_be_is_its_requests_error() -> None:
    grammar = SlowGrammar()
    engine = engine_with(grammar)
    engine.add(make_request("a", [1, 2, 3], grammar="odd"))
    assert engine.step() == []
    grammar.attaching.set_exception(ValueError("no language"))
    (update,) = drain(engine)["a"]
    assert update.finish_reason is FinishReason.ERROR and update.error == "its grammar: no language"


def test_a_grammar_keeps_neither_the_requests_that_have_waited_for_it_nor_itself() -> None:
    grammar = SlowGrammar()
    engine = engine_with(grammar)
    request = make_request("a", [1, 2, 3], grammar="odd")
    num_held = sys.getrefcount(request)
    engine.add(request)
    engine.step()
    engine.abort("a")
    grammar.attaching.set_result(None)
    drain(engine)
    assert sys.getrefcount(request) == num_held
    attached = weakref.ref(grammar.attaching)
    gc.disable()
    try:
        del grammar.attaching
        assert attached() is None
    finally:
        gc.enable()


def test_a_request_that_waits_for_its_grammar_can_be_aborted_and_dies_with_the_engine() -> None:
    grammar = SlowGrammar()
    engine = engine_with(grammar)
    engine.add(make_request("a", [1, 2, 3], grammar="odd"))
    engine.add(make_request("b", [1, 2, 3], grammar="odd"))
    engine.abort("a")
    (update,) = engine.step()
    assert (update.request_id, update.finish_reason) == ("a", FinishReason.ABORT)
    engine._die(RuntimeError("gone"))
    (update,) = engine.step()
    assert update.request_id == "b" and "gone" in str(update.error)
    grammar.attaching.set_result(None)
    assert drain(engine) == {}


@pytest.mark.parametrize("error", [None, "left"])
def test_a_text_behind_which_nothing_may_come_ends_at_once(error: str | None) -> None:
    grammar = SlowGrammar()
    grammar.attaching.set_result(None)
    engine = engine_with(grammar, depth=2, check_invariants=True)
    engine.add(make_request("a", [1, 2, 3], max_tokens=9, grammar="odd"))
    first = engine.step()
    grammar.over = {"a": error}
    updates = [*first, *drain(engine)["a"]]
    assert [len(update.new_token_ids) for update in updates] == [1, 0]
    assert updates[-1].error == error
    assert updates[-1].finish_reason is (FinishReason.ERROR if error else FinishReason.STOP)


def test_statistics_tell_what_has_been_done() -> None:
    engine, _ = make_engine(depth=2)
    prompt = list(range(12))
    for name in "ab":
        engine.add(make_request(name, prompt, max_tokens=4))
    drain(engine)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_sampled_tokens) == (24, 8, 8)
    assert stats.num_steps == 4 and stats.num_running == stats.num_waiting == 0 and stats.kv_usage == 0
    assert stats.host_seconds > 0 and stats.wait_seconds > 0


def test_compilations_that_a_worker_has_told_of_are_told() -> None:
    """It tells how many it has seen in all, and not with every result."""
    engine, executor = make_engine()
    engine.add(make_request("a", max_tokens=4))
    for num in (0, 3, 0):
        executor.num_late_compilations = num
        engine.step()
    assert engine.stats().num_late_compilations == 3


def test_time_spent_idle_is_not_the_hosts() -> None:
    engine, _ = make_engine()
    engine.step()
    time.sleep(0.05)
    engine.add(make_request("a"))
    drain(engine)
    assert engine.stats().host_seconds < 0.04


@pytest.mark.parametrize("part", ["wait_seconds", "result_seconds"])
def test_to_wait_for_a_result_is_no_work_of_the_hosts_and_to_read_it_is(part: str) -> None:
    engine, executor = make_engine(depth=2)
    engine.add(make_request("a", max_tokens=4))
    while engine.has_work:
        engine.step()
        for ticket in executor.tickets:
            setattr(ticket, part, 0.05)
    stats = engine.stats()
    assert (stats.wait_seconds >= 0.1) == (part == "wait_seconds")
    assert (stats.host_seconds >= 0.05) == (part == "result_seconds")


def test_shutdown_reaches_the_workers() -> None:
    engine, executor = make_engine()
    engine.shutdown()
    assert executor.is_shut_down


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_while_waiting_loses_no_step(depth: int) -> None:
    engine, executor = make_engine(depth, num_slots=1)
    engine.add(make_request("a", [1, 2, 3], max_tokens=4))
    executor.dies_in = "interrupt"
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort("a")
    engine.add(make_request("b", [1, 2, 3], max_tokens=4))
    updates = []
    while engine.has_work:
        updates += engine.step()
    ends = [(u.request_id, u.finish_reason) for u in updates if u.finish_reason is not None]
    assert ends == [("a", FinishReason.ABORT), ("b", FinishReason.LENGTH)]


def test_ctrl_c_while_a_step_is_launched_ends_the_engine_and_answers_every_request() -> None:
    engine, executor = make_engine(1, num_slots=1)
    engine.add(make_request("a", [1, 2, 3], max_tokens=4))
    executor.dies_in = "interrupted submit"
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    updates = engine.step()
    assert [(u.request_id, u.finish_reason) for u in updates] == [("a", FinishReason.ERROR)]
    assert not engine.has_work and engine.error is not None


class Recorder(UnlimitedPrefill):
    """A prefill budget that remembers what the steps took."""

    def __init__(self) -> None:
        self.num_planned = 0
        self.seconds: list[float] = []

    def planned(self, num_decode: int, num_prompt: int, reach: int) -> None:
        self.num_planned += 1

    def took(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_pace_is_told_of_every_step_and_of_no_time_without_one(depth: int) -> None:
    engine, _ = make_engine(depth=depth)
    engine.scheduler.prefill_budget = budget = Recorder()
    began = time.perf_counter()
    for name in "ab":
        engine.add(make_request(name))
        while engine.has_work:
            engine.step()
        time.sleep(0.2)
    assert len(budget.seconds) == budget.num_planned == engine.stats().num_steps
    assert min(budget.seconds) >= 0 and sum(budget.seconds) <= time.perf_counter() - began - 0.4
