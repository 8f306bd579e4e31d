"""What goes wrong in a feature, or is said twice, loses no request's answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pellucid.engine.core import Engine
from pellucid.features.base import AskingRow, HostFeature, RowKind
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan
from pellucid.schedule.sequence import Sequence as Seq
from pellucid.types import FinishReason, Request, SeqUpdate
from tests.engine.test_core import EagerExecutor, EagerTicket
from tests.schedule.device import make_request, make_scheduler

UNUSED: Any = None


class Asked(HostFeature):
    """Asked for by extra_args."""

    def asks(self, request: Request) -> bool:
        return bool(request.sampling.extra_args)


@dataclass
class Executor(EagerExecutor):
    """Tells the feature `x` something with each result."""

    tells: bool = False
    plans: list[StepPlan] = field(default_factory=list[StepPlan])

    def submit(self, plan: StepPlan) -> EagerTicket:
        self.plans.append(plan)
        ticket = super().submit(plan)
        if self.tells and plan.asked:
            ticket.answer.told["x"] = 1
        return ticket


def engine_of(feature: HostFeature, depth: int = 1, *, tells: bool = False, **options: int) -> Engine:
    scheduler = make_scheduler(features={"x": feature}, **options)
    return Engine(scheduler, Executor(tells=tells), depth=depth, check_invariants=True)


def asking(name: str, max_tokens: int = 4, prompt: int = 5, **more: Any) -> Request:
    return make_request(
        name, prompt, sampling=SamplingParams(max_tokens=max_tokens, extra_args={"x": 1}, **more)
    )


def drain(engine: Engine, most: int = 60) -> dict[str, SeqUpdate]:
    """The last update of each request."""
    last: dict[str, SeqUpdate] = {}
    for _ in range(most):
        if not engine.has_work:
            break
        for update in engine.step():
            last[update.request_id] = update
    return last


def test_who_ends_in_the_step_whose_land_fails_is_answered() -> None:
    """Law 10."""

    class Fails(Asked):
        def land(self, told: Any, news: Any, scheduler: Any) -> None:
            if any(landed.update.finish_reason for landed in news.landed.values()):
                raise RuntimeError("cannot land")

    engine = engine_of(Fails(UNUSED), tells=True)
    engine.add(asking("x", max_tokens=9))
    engine.add(make_request("plain", max_tokens=3))
    last = drain(engine)
    assert last["x"].finish_reason and last["plain"].finish_reason, "plain was never answered"


def test_who_was_ended_beside_an_end_that_fails_is_answered() -> None:
    """`ended` names two, of which one has gone already."""

    class Ends(Asked):
        num = 0

        def late(self, rows: Sequence[AskingRow]) -> int:
            self.num += 1
            return 1

        def ended(self) -> dict[str, str | None]:
            return {"a": None, "gone": None} if self.num == 2 else {}

    engine = engine_of(Ends(UNUSED))
    engine.executor.submit = patched(engine)  # type: ignore[method-assign]
    engine.add(asking("a"))
    engine.add(make_request("plain", max_tokens=3))
    last = drain(engine)
    assert last["a"].finish_reason and last["plain"].finish_reason, "a was never answered"


def patched(engine: Engine) -> Any:
    submit = engine.executor.submit

    def open_submit(plan: StepPlan) -> Any:
        ticket = submit(plan)
        ticket.provide = lambda late: None  # type: ignore[method-assign]
        return ticket

    return open_submit


def test_host_bound_and_not_watched_goes_on() -> None:
    class Bound(Asked):
        rows, is_host_bound = RowKind.SAMPLING, True

    engine = engine_of(Bound(UNUSED))
    engine.add(asking("a"))
    engine.add(make_request("plain", max_tokens=20))
    last = drain(engine)
    assert engine.error is None
    assert last["a"].finish_reason is FinishReason.LENGTH


def test_cancelled_future_says_whose() -> None:
    future: Future[Any] = Future()

    class Waits(Asked):
        def prepare(self, request: Request) -> Future[Any] | None:
            return future

    engine = engine_of(Waits(UNUSED))
    engine.add(asking("a"))
    engine.step()
    future.cancel()
    last = drain(engine)
    assert last["a"].error is not None and last["a"].error.startswith("its x: "), last["a"].error


def test_an_id_that_comes_again_in_the_same_turn_keeps_its_state() -> None:
    """Abort and add, before the engine's next turn."""
    held: set[str] = set()

    class Holds(Asked):
        def enter(self, seq: Seq) -> None:
            held.add(seq.request.id)

        def leave(self, request_id: str) -> None:
            held.discard(request_id)

    engine = engine_of(Holds(UNUSED))
    engine.add(asking("a", max_tokens=20))
    engine.step()
    engine.abort("a")
    engine.add(asking("a", max_tokens=20))
    engine.step()
    assert held == {"a"}


def test_a_request_that_failed_is_told_its_error_alone() -> None:
    """As eb606b5 did: no prompt logprobs of a request whose admission could not be read."""
    from tests.schedule.device import Device

    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", 5, sampling=SamplingParams(max_tokens=4, prompt_logprobs=1)))
    plan = scheduler.next_plan()
    assert plan is not None
    result = device.run(plan)
    result.failed[0] = "token id -1 is out of range"
    news = scheduler.commit(plan, result)
    scheduler.features.land(result.told, news, scheduler)
    (update,) = news.updates
    assert update.error is not None and update.prompt_logprobs is None
