"""A worker as a member of its engine: plans in, results out.

The main thread launches plans, in the order in which they come; another one waits for their results.
"""

from __future__ import annotations

import queue
import threading
from typing import Protocol, cast

import msgspec

from pellucid import collector
from pellucid.cluster.desk import Desk
from pellucid.cluster.messages import (
    Answer,
    Call,
    Late,
    Plan,
    Ready,
    Result,
    Said,
    Stop,
    tagged,
    untagged,
)
from pellucid.executor.base import Capacity, NoPace, Pending, Seat, Ticket
from pellucid.nodes.place import Place
from pellucid.observe.progress import Progress, Standing
from pellucid.registry import load_object
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a worker."""

    worker: str  # "module:Class"
    rank: int
    place: Place
    addresses: tuple[str | None, str | None]  # of its machine, and of rank 0's, if there are several
    resolved: Resolved


class Worker(Protocol):
    """What its process asks of a worker."""

    @property
    def reports(self) -> bool:
        """Do this rank's results tell what was sampled?"""
        ...

    def start(self) -> Capacity: ...

    def execute(self, plan: StepPlan) -> Pending: ...

    @property
    def pace(self) -> NoPace: ...

    def shutdown(self) -> None: ...


def live(desk: Desk, work: Work) -> None:
    """Load, and serve until told to stop."""
    progress = Progress(desk.notes)
    desk.standing = Standing(lambda: bytes(desk.notes))
    seat = Seat(
        rank=work.rank,
        device=work.place.device,
        node=work.place.node,
        address=work.addresses[0],
        first=work.addresses[1],
        meet=desk.meet,
        entered=progress.enter,
        waiting=progress.wait,
        say=lambda name, said: desk.send(Said(name, tagged(said))),
    )
    with collector.paused():
        worker: Worker = load_object(work.worker)(work.resolved, seat)
        capacity = worker.start()
    collector.freeze()
    desk.send(Ready(tagged(capacity)))
    Hands(desk, worker, progress).serve()
    worker.shutdown()


class Hands:
    """The two threads of a worker that serves."""

    def __init__(self, desk: Desk, worker: Worker, progress: Progress) -> None:
        self._desk, self._worker, self._progress = desk, worker, progress
        self._landing: queue.SimpleQueue[Pending] = queue.SimpleQueue()

    def serve(self) -> None:
        """Run plans in the order in which they come, until told to stop."""
        threading.Thread(target=self._report, daemon=True).start()
        waiting, pace = cast("Ticket | None", None), self._worker.pace
        while True:
            beside = pace if waiting is None else NoPace()  # while one is open, no other step may be launched
            match self._desk.next(beside.lines, beside.attend):
                case Plan() as message:
                    plan = message.whole()
                    self._progress.begin(plan.id)
                    pending = self._worker.execute(plan)
                    if plan.is_open:
                        waiting = cast(Ticket, pending)
                    else:
                        self._launched(pending)
                case Late() as late:
                    assert waiting is not None, "no plan is open"
                    waiting.provide(late.whole())
                    self._launched(waiting)
                    waiting = None
                case Call(name, args):
                    answer = getattr(self._worker, name)(*map(untagged, args))
                    self._desk.send(Answer(tagged(answer)))
                case Stop():
                    return
                case message:
                    raise AssertionError(f"{message} is not for workers")

    def _launched(self, pending: Pending) -> None:
        """A step is wholly under way."""
        self._progress.end()
        if self._worker.reports:
            self._landing.put(pending)

    def _report(self) -> None:
        while True:
            pending = self._landing.get()
            try:
                self._desk.send(Result.of(pending.result()))
            except Exception as error:
                return self._desk.fail(error)
