"""A worker's own process: reads plans from a ring, runs them in order, sends results back over a pipe.

It names its worker by string.  The messages beside plans and results are defined here, for both sides.
"""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from ctypes import Array, c_char, c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import NoReturn, Protocol, cast

from pellucid.executor.base import Capacity, Pending, Seat, Ticket
from pellucid.executor.ring import ReaderEnd, RingReader
from pellucid.executor.wire import decode, encode
from pellucid.registry import load_object
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, StepResult

ECHO = "PeerError"  # the name of errors that another rank's end causes


@dataclass(frozen=True, slots=True)
class Call:
    """To a worker: run this method."""

    name: str
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Late:
    """To a worker, behind a plan with a grammar and before any other: its masks."""

    masks: object


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: leave."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker that has loaded its part."""

    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Answer:
    """To a call."""

    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker's last breath, or about it."""

    message: str
    is_echo: bool = False  # another worker's failure is the cause
    is_users: bool = False  # a ValueError: the user can mend it


Message = Ready | StepResult | Answer | Failed  # from a worker; results from the one that reports


class Progress:
    """How far a worker has come, in memory that its owner shares: still legible when the worker is stuck."""

    def __init__(self, numbers: Array[c_int64], name: Array[c_char]) -> None:
        # Last plan finished, whether it waits for another stage, last plan begun, collectives entered since.
        self._numbers, self._name = numbers, name

    @classmethod
    def shared(cls, context: SpawnContext) -> Progress:
        numbers = context.RawArray(c_int64, [-1, 0, -1, 0])
        return cls(numbers, context.RawArray(c_char, 32))

    @property
    def value(self) -> tuple[int, ...]:
        """Whoever is behind has less; with as many plans finished, one that waits is not behind."""
        return tuple(self._numbers)

    @property
    def has_begun(self) -> bool:
        """Has it begun a plan?"""
        return self._numbers[2] >= 0

    def __str__(self) -> str:
        _, _, plan, collectives = self._numbers
        said = f"its last plan was {plan}" if plan >= 0 else "before its first plan"
        if not collectives:
            return said
        return f"{said}, its last collective there number {collectives}, {self._name.value.decode()}"

    def begin(self, plan_id: int) -> None:
        self._numbers[2:] = plan_id, 0

    def end(self) -> None:
        """The plan is finished, or on a GPU all of it launched."""
        self._numbers[0] = self._numbers[2]

    def wait(self, begins: bool) -> None:
        """It begins, or ceases, to wait for another pipeline stage."""
        self._numbers[1] = begins

    def enter(self, collective: str) -> None:
        """Note a collective by its name, before it begins.  (A CUDA graph's are not seen.)"""
        self._name.value = collective.encode()[:31]
        self._numbers[3] += 1


class Worker(Protocol):
    """What a process asks of its worker."""

    @property
    def reports(self) -> bool:
        """Do this rank's results tell what was sampled?"""
        ...

    def start(self) -> Capacity: ...

    def execute(self, plan: StepPlan) -> Pending: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a process needs to know.  Pickled once, by spawn."""

    worker: str  # "module:Class"
    rank: int
    resolved: Resolved
    rendezvous: str  # a path of the ranks' own, in a folder of their own
    inbox: ReaderEnd
    outbox: Connection
    progress: Progress
    log_level: int


def run_worker(start: Start) -> None:
    """The process's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its owner's to answer
    threading.Thread(target=_leave_with_owner, args=(Path(start.rendezvous).parent,), daemon=True).start()
    logging.basicConfig(level=start.log_level, format=f"%(levelname)s worker {start.rank}: %(message)s")
    progress = start.progress
    seat = Seat(rank=start.rank, rendezvous=start.rendezvous, entered=progress.enter, waiting=progress.wait)
    desk = Desk(start.outbox, start.rank, progress)
    try:
        worker: Worker = load_object(start.worker)(start.resolved, seat)
        capacity = worker.start()
        gc.collect()
        gc.freeze()  # what is there stays, and to look at all of it takes the collector longer than steps do
        atexit.register(gc.unfreeze)  # else extension modules report at the end what was never given back
        desk.send(Ready(capacity))
        desk.serve(worker, RingReader(start.inbox))
        worker.shutdown()
    except (EOFError, BrokenPipeError):
        return  # the owner has gone
    except Exception as error:
        desk.fail(error)
        return
    leave()


def leave() -> NoReturn:
    """End this process at once, when all is said and given back.

    The interpreter would wait for threads, and take seconds to take itself apart.
    """
    with suppress(AttributeError, OSError, ValueError):  # its caller has closed it, or nobody reads it
        sys.stdout.flush()
    os._exit(0)


def _leave_with_owner(folder: Path) -> None:
    """End this process when its owner's has ended, in whatever way, and whatever this one waits for."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class Desk:
    """Plans in, results out; the main thread launches plans, another one waits for their results."""

    def __init__(self, outbox: Connection, rank: int, progress: Progress) -> None:
        self._outbox, self._rank, self._progress = outbox, rank, progress
        self._lock = threading.Lock()
        self._landing: queue.SimpleQueue[Pending] = queue.SimpleQueue()

    def serve(self, worker: Worker, inbox: RingReader) -> None:
        """Run plans in the order in which they come, until told to stop."""
        threading.Thread(target=self._report, daemon=True).start()
        waiting: Ticket | None = None
        while True:
            match decode(inbox.read()):
                case StepPlan() as plan:
                    self._progress.begin(plan.id)
                    pending = worker.execute(plan)
                    if plan.has_grammar:
                        waiting = cast(Ticket, pending)
                    else:
                        self._launched(pending, worker)
                case Late(masks):
                    assert waiting is not None, "no plan has a grammar"
                    waiting.provide(masks)
                    self._launched(waiting, worker)
                case Call(name, args):
                    self.send(Answer(getattr(worker, name)(*args)))
                case Stop():
                    return
                case message:
                    raise AssertionError(f"{message} is not for workers")

    def _launched(self, pending: Pending, worker: Worker) -> None:
        """A step is wholly under way."""
        self._progress.end()
        if worker.reports:
            self._landing.put(pending)

    def send(self, message: Message) -> None:
        packed = encode(message)
        with self._lock:
            self._outbox.send_bytes(packed)

    def fail(self, error: Exception) -> None:
        """Say what went wrong; the process ends with it."""
        name = type(error).__name__
        said = f"worker {self._rank} has failed, {self._progress}: {name}: {error}"
        is_users = isinstance(error, ValueError) and not self._progress.has_begun
        message = str(error) if is_users else f"{said}\n{traceback.format_exc()}"
        try:
            self.send(Failed(message, is_echo=name == ECHO, is_users=is_users))
        except OSError:
            return  # the owner has gone

    def _report(self) -> None:
        while True:
            pending = self._landing.get()
            try:
                self.send(pending.result())
            except Exception as error:
                return self.fail(error)
