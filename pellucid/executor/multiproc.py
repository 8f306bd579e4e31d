"""One process for each worker: plans go out over pipes, results come back from the one that has them.

A worker that dies, fails or falls silent is named, with the last plan that it began; then all of them are
ended, for a step needs every one.  The processes' own side is in process.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pellucid.config import Resolved
from pellucid.executor.base import Capacity
from pellucid.executor.process import Answer, Call, Failed, Landed, Message, Progress, Ready, Stop, run_worker
from pellucid.schedule.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)
GRACE = 2.0  # seconds in which the others' complaints wait for the cause
FAREWELL = 5.0  # seconds that workers have to leave by themselves


class WorkerProcess:
    """A worker as its owner sees it."""

    def __init__(self, rank: int, resolved: Resolved, rendezvous: str, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank, self.progress = rank, Progress.shared(context)
        self.connection, theirs = context.Pipe()
        level = logging.getLogger("pellucid").getEffectiveLevel()
        self._process = context.Process(
            target=run_worker,
            args=(theirs, rank, resolved, rendezvous, self.progress, level),
            name=f"pellucid worker {rank} of {num_workers}",
            daemon=True,
        )
        self._process.start()
        theirs.close()  # so that the end of either side is an end of file for the other
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, packed: bytes) -> None:
        """Hand over a pickled message.  Does not wait for the worker to read it, which may be never."""
        self._outbox.put(packed)

    def _send_all(self) -> None:
        while True:
            try:
                self.connection.send_bytes(self._outbox.get())
            except OSError:
                return  # the sentinel tells

    @property
    def sentinel(self) -> int:
        """Ready once the process has ended."""
        return self._process.sentinel

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
        raise NotImplementedError("grammar masks arrive with structured output")

    def result(self) -> StepResult:
        return self._executor.take_result(self._plan_id)


class MultiprocExecutor:
    """Workers in processes of their own, one for each rank of the mesh."""

    def __init__(self) -> None:
        self._workers: list[WorkerProcess] = []
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
        for rank in range(resolved.num_workers):
            self._workers.append(WorkerProcess(rank, resolved, rendezvous, resolved.num_workers))
        self._wait_until(lambda: len(self._capacities) == len(self._workers), timeout=None)
        return self._capacities[0]

    def submit(self, plan: StepPlan) -> MultiprocTicket:
        self._send(plan)
        return MultiprocTicket(self, plan.id)

    def take_result(self, plan_id: int) -> StepResult:
        """Wait for a plan's result.  Raises RuntimeError naming the worker that failed."""
        self._wait_until(lambda: plan_id in self._results, timeout=self._timeout)
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
            self._send(Stop())
            self._end(seconds=FAREWELL)

    def _end(self, *, seconds: float) -> None:
        until = time.monotonic() + seconds
        for worker in self._workers:
            worker.end(seconds=max(0.0, until - time.monotonic()))
        self._folder.cleanup()

    # What workers say

    def _send(self, message: StepPlan | Call | Stop) -> None:
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for worker in self._workers:
            worker.send(packed)

    def _wait_until(self, is_done: Callable[[], bool], *, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while not is_done():
            if self._ended_because is not None:
                raise RuntimeError(self._ended_because)
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                self._fail(self._describe_silence())
            self._receive(timeout=left)
            self._raise_failures()

    def _receive(self, *, timeout: float | None) -> None:
        """Take in what workers say, waiting for the first word up to `timeout` seconds."""
        speakers: dict[Connection | int, WorkerProcess] = {}
        for worker in self._workers:
            if worker.rank not in self._failures:
                speakers |= {worker.connection: worker, worker.sentinel: worker}
        for source in wait(list(speakers), timeout):
            worker = speakers[source]  # type: ignore[index]
            try:
                while worker.connection.poll():
                    self._hear(worker.rank, worker.connection.recv())
            except (EOFError, OSError):
                self._failures.setdefault(worker.rank, Failed(worker.describe_death()))

    def _hear(self, rank: int, message: Message) -> None:
        match message:
            case Ready():
                self._capacities[rank] = message.capacity
            case Landed():
                self._results[message.result.plan_id] = message.result
            case Answer():
                self._answers[rank] = message.value
            case Failed():
                self._failures[rank] = message

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

    def _describe_silence(self) -> str:
        """Who is furthest behind: the others wait for it."""
        least = min(worker.progress.value for worker in self._workers)
        late = [worker for worker in self._workers if worker.progress.value == least]
        named = "; ".join(f"worker {worker.rank}, {worker.progress}" for worker in late)
        return (
            f"no result for {self._timeout:g} s, waiting for {named}; "
            "raise --worker-timeout if steps may take as long"
        )

    def _fail(self, message: str, *, is_users: bool = False) -> None:
        logger.error("%s", message)
        self._ended_because = message
        self._end(seconds=0)
        raise ValueError(message) if is_users else RuntimeError(message)
