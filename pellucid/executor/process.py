"""A worker's own process: reads plans from a pipe, runs them in order, sends results back.

It names its worker by string.  What goes over the pipe is defined here, for both sides.
"""

from __future__ import annotations

import logging
import pickle
import queue
import signal
import threading
import traceback
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Protocol

from pellucid.config import Resolved
from pellucid.executor.base import Capacity, Seat
from pellucid.registry import load_object
from pellucid.schedule.plan import StepPlan, StepResult

WORKER = "pellucid.worker.worker:Worker"
ECHO = "PeerError"  # the name of errors that another rank's end causes


@dataclass(frozen=True, slots=True)
class Call:
    """To a worker: run this method."""

    name: str
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: leave."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker that has loaded its part."""

    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Landed:
    """From the worker that samples."""

    result: StepResult


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


Message = Ready | Landed | Answer | Failed


class Progress:
    """How far a worker has come, in memory that its owner shares: still legible when the worker is stuck."""

    def __init__(self, numbers: list[c_int64]) -> None:
        self._plan, self._collectives = numbers

    @classmethod
    def shared(cls, context: SpawnContext) -> Progress:
        return cls([context.RawValue(c_int64, -1), context.RawValue(c_int64, 0)])

    @property
    def value(self) -> tuple[int, int]:
        """(last plan begun, collectives entered): they only grow."""
        return self._plan.value, self._collectives.value

    def __str__(self) -> str:
        plan = self._plan.value
        return f"its last plan was {plan}" if plan >= 0 else "before its first plan"

    def begin(self, plan_id: int) -> None:
        self._plan.value = plan_id

    def enter(self) -> None:
        self._collectives.value += 1


class Pending(Protocol):
    """What a worker hands back for a plan that it has launched."""

    def result(self) -> StepResult: ...


class Worker(Protocol):
    """What a process asks of its worker."""

    @property
    def reports(self) -> bool:
        """Do this rank's results tell what was sampled?"""
        ...

    def start(self) -> Capacity: ...

    def execute(self, plan: StepPlan) -> Pending: ...

    def shutdown(self) -> None: ...


def run_worker(
    connection: Connection, rank: int, resolved: Resolved, rendezvous: str, progress: Progress, log_level: int
) -> None:
    """The process's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its owner's to answer
    logging.basicConfig(level=log_level, format=f"%(levelname)s worker {rank}: %(message)s")
    seat = Seat(rank=rank, rendezvous=rendezvous, entered=progress.enter)
    desk = Desk(connection, rank, progress)
    try:
        worker: Worker = load_object(WORKER)(resolved, seat)
        desk.send(Ready(worker.start()))
        desk.serve(worker)
        worker.shutdown()
    except (EOFError, BrokenPipeError):
        return  # the owner has gone
    except Exception as error:
        desk.fail(error)


class Desk:
    """One end of the pipe; the main thread launches plans, another one waits for their results."""

    def __init__(self, connection: Connection, rank: int, progress: Progress) -> None:
        self._connection, self._rank, self._progress = connection, rank, progress
        self._lock = threading.Lock()
        self._landing: queue.SimpleQueue[Pending] = queue.SimpleQueue()

    def serve(self, worker: Worker) -> None:
        """Run plans in the order in which they come, until told to stop."""
        threading.Thread(target=self._report, daemon=True).start()
        while True:
            message: StepPlan | Call | Stop = pickle.loads(self._connection.recv_bytes())
            match message:
                case StepPlan():
                    self._progress.begin(message.id)
                    pending = worker.execute(message)
                    if worker.reports:
                        self._landing.put(pending)
                case Call():
                    self.send(Answer(getattr(worker, message.name)(*message.args)))
                case Stop():
                    return

    def send(self, message: Message) -> None:
        with self._lock:
            self._connection.send(message)

    def fail(self, error: Exception) -> None:
        """Say what went wrong; the process ends with it."""
        name = type(error).__name__
        said = f"worker {self._rank} has failed, {self._progress}: {name}: {error}"
        is_users = isinstance(error, ValueError) and self._progress.value[0] < 0
        message = str(error) if is_users else f"{said}\n{traceback.format_exc()}"
        try:
            self.send(Failed(message, is_echo=name == ECHO, is_users=is_users))
        except OSError:
            return  # the owner has gone

    def _report(self) -> None:
        while True:
            pending = self._landing.get()
            try:
                self.send(Landed(pending.result()))
            except Exception as error:
                return self.fail(error)
