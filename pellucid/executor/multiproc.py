"""One process for each worker: plans go out over a ring, results come back from the one that has them.

A worker that dies, fails or falls silent is named, with the last plan that it began; then all of them are
ended, for a step needs every one.  The processes' own side is in process.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import selectors
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from pathlib import Path

import psutil

from pellucid.executor.base import WORKER, Capacity
from pellucid.executor.process import (
    Answer,
    Call,
    Failed,
    Late,
    Progress,
    Ready,
    Start,
    Stop,
    run_worker,
)
from pellucid.executor.ring import ReaderEnd, RingWriter
from pellucid.executor.wire import decode, encode
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)
GRACE = 2.0  # seconds in which the others' complaints wait for the cause
FAREWELL = 5.0  # seconds that workers have to leave by themselves
POLL = 0.001  # seconds between two looks at a full ring


class WorkerProcess:
    """A worker as its owner sees it."""

    def __init__(
        self, context: SpawnContext, resolved: Resolved, inbox: ReaderEnd, *, worker: str, rendezvous: str
    ) -> None:
        self.rank, self.progress = inbox.index, Progress.shared(context)
        self.connection, theirs = context.Pipe(duplex=False)
        start = Start(
            worker=worker,
            rank=self.rank,
            resolved=resolved,
            rendezvous=rendezvous,
            inbox=inbox,
            outbox=theirs,
            progress=self.progress,
            log_level=logging.getLogger("pellucid").getEffectiveLevel(),
        )
        name = f"pellucid worker {self.rank} of {resolved.num_workers}"
        self._process = context.Process(target=run_worker, args=(start,), name=name, daemon=True)
        self._process.start()
        theirs.close()  # so that the end of either side is an end of file for the other
        inbox.bell.close()

    @property
    def sentinel(self) -> int:
        """Ready once the process has ended."""
        return self._process.sentinel

    @property
    def is_stopped(self) -> bool:
        """Has something stopped the process (SIGSTOP, a debugger)?"""
        return psutil.Process(self._process.pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )

    def describe_death(self) -> str:
        self._process.join(GRACE)
        return f"worker {self.rank} has died (exit code {self._process.exitcode}), {self.progress}"

    def end(self, *, seconds: float) -> None:
        """Wait for the process to leave, and make it leave after `seconds`."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()  # a stopped process does not hear anything gentler
            self._process.join()


class MultiprocTicket:
    """A plan that the workers have been sent."""

    def __init__(self, executor: MultiprocExecutor, plan_id: int) -> None:
        self._executor, self._plan_id = executor, plan_id

    def provide(self, masks: object) -> None:
        self._executor.provide(masks)

    def wait(self) -> None:
        self._executor.wait_for(self._plan_id)

    def result(self) -> StepResult:
        return self._executor.take_result(self._plan_id)


class MultiprocExecutor:
    """Workers in processes of their own, one for each rank of the mesh."""

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker  # "module:Class"
        self._workers: list[WorkerProcess] = []
        self._ears = selectors.DefaultSelector()  # the workers' connections and sentinels
        self._capacities: dict[int, Capacity] = {}  # by rank
        self._results: dict[int, StepResult] = {}  # by plan id, until they are asked for
        self._answers: dict[int, object] = {}  # by rank
        self._failures: dict[int, Failed] = {}  # by rank
        self._ended_because: str | None = None

    def start(self, resolved: Resolved) -> Capacity:
        """Start the processes and wait until all have loaded their part."""
        self._timeout = resolved.user.parallel.worker_timeout
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        try:
            self._start_processes(resolved, rendezvous)
            self._wait_until(lambda: len(self._capacities) == len(self._workers), timeout=None)
        except BaseException:  # Ctrl-C, too: a loading worker holds memory that others may want
            self._ended_because = self._ended_because or "the engine has not started"
            self._end(seconds=0)
            raise
        return self._capacities[0]

    def _start_processes(self, resolved: Resolved, rendezvous: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ring = RingWriter(context, resolved.num_workers)
        for end in self._ring.ends:
            worker = WorkerProcess(context, resolved, end, worker=self._worker, rendezvous=rendezvous)
            self._workers.append(worker)
            self._ears.register(worker.connection, selectors.EVENT_READ, worker)
            self._ears.register(worker.sentinel, selectors.EVENT_READ, worker)

    def submit(self, plan: StepPlan) -> MultiprocTicket:
        self._send(plan)
        return MultiprocTicket(self, plan.id)

    def provide(self, masks: object) -> None:
        """Send what the plan that was submitted last waits for."""
        self._send(Late(masks))

    def wait_for(self, plan_id: int) -> None:
        """Until a plan's result has come.  Raises RuntimeError naming the worker that failed."""
        self._wait_until(lambda: plan_id in self._results, timeout=self._timeout)

    def take_result(self, plan_id: int) -> StepResult:
        """A plan's result, waited for if need be."""
        self.wait_for(plan_id)
        return self._results.pop(plan_id)

    def call(self, name: str, *args: object) -> object:
        self._answers.clear()
        self._send(Call(name, args))
        self._wait_until(lambda: len(self._answers) == len(self._workers), timeout=self._timeout)
        return self._answers[0]

    def check(self) -> None:
        self._receive(timeout=0)
        self._raise_failures()

    def shutdown(self) -> None:
        """End all workers; those that can leave by themselves do."""
        if self._ended_because is None:
            self._ended_because = "the engine was shut down"
            if not self._ring.is_full:
                self._send(Stop())
            self._end(seconds=FAREWELL)

    def _end(self, *, seconds: float) -> None:
        until = time.monotonic() + seconds
        for worker in self._workers:
            worker.end(seconds=max(0.0, until - time.monotonic()))
        self._ears.close()
        self._folder.cleanup()

    # What workers are told, and what they say

    def _send(self, message: StepPlan | Late | Call | Stop) -> None:
        """Tell all workers.  Waits only if they have left a whole ring unread, which is how one hangs."""
        until = time.monotonic() + self._timeout

        def wait_for_room() -> None:
            if time.monotonic() > until:
                self._fail(self._describe_silence("no room for a plan"))
            self._receive(timeout=POLL)
            self._raise_failures()

        self._ring.write(encode(message), wait_for_room)

    def _wait_until(self, is_done: Callable[[], bool], *, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while not is_done():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                self._fail(self._describe_silence("no result"))
            self._receive(timeout=left)
            self._raise_failures()

    def _receive(self, *, timeout: float | None) -> None:
        """Take in what workers say, waiting for the first word up to `timeout` seconds."""
        if self._ended_because is not None:
            raise RuntimeError(self._ended_because)
        for key, _ in self._ears.select(timeout):
            worker: WorkerProcess = key.data
            if worker.rank in self._failures:
                continue
            try:
                if key.fileobj is worker.connection:
                    self._hear(worker.rank, decode(worker.connection.recv_bytes()))
                else:
                    self._hear_last_words(worker)
            except (EOFError, OSError):
                self._failures.setdefault(worker.rank, Failed(worker.describe_death()))
            if worker.rank in self._failures:
                self._ears.unregister(worker.connection)
                self._ears.unregister(worker.sentinel)

    def _hear_last_words(self, worker: WorkerProcess) -> None:
        """The process has ended; what it said before is still to be read."""
        while worker.connection.poll():
            self._hear(worker.rank, decode(worker.connection.recv_bytes()))
        raise EOFError

    def _hear(self, rank: int, message: object) -> None:
        match message:
            case Ready(capacity):
                self._capacities[rank] = capacity
            case StepResult():
                self._results[message.plan_id] = message
            case Answer(value):
                self._answers[rank] = value
            case Failed():
                self._failures[rank] = message
            case _:
                raise AssertionError(f"{message} is not from workers")

    def _raise_failures(self) -> None:
        """Raise what went wrong.  Ranks that only miss another one wait a little for the cause."""
        until = time.monotonic() + GRACE
        while self._failures and all(failure.is_echo for failure in self._failures.values()):
            left = until - time.monotonic()
            if left <= 0 or len(self._failures) == len(self._workers):
                break
            self._receive(timeout=left)
        if self._failures:
            causes = sorted(self._failures.values(), key=lambda failure: failure.is_echo)
            self._fail(causes[0].message, is_users=causes[0].is_users)

    def _describe_silence(self, what: str) -> str:
        """Who is stopped, or else furthest behind: the others wait for it."""
        stopped = [worker for worker in self._workers if worker.is_stopped]
        least = min(worker.progress.value for worker in self._workers)
        late = [worker for worker in self._workers if worker.progress.value == least]
        named = "; ".join(f"worker {worker.rank}, {worker.progress}" for worker in stopped or late)
        state = " (stopped by a signal)" if stopped else ""
        return (
            f"{what} for {self._timeout:g} s, waiting for {named}{state}; "
            "raise --worker-timeout if steps may take as long"
        )

    def _fail(self, message: str, *, is_users: bool = False) -> None:
        logger.error("%s", message)
        self._ended_because = message
        self._end(seconds=0)
        raise ValueError(message) if is_users else RuntimeError(message)
