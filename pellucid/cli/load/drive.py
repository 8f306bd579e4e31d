"""Sends a load's requests when they are due and keeps what comes back: one event loop, one process."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pellucid.cli.load.answer import Record, StreamAnswer
from pellucid.cli.load.http import BrokenResponseError, ConnectionPool, Target
from pellucid.cli.load.workloads import Lane, Order
from pellucid.registry import load_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What clients have seen.  cpu_seconds: of each client process, from the start to its
    last answer."""

    records: list[Record]
    cpu_seconds: list[float]

    @property
    def began(self) -> float:
        return min(record.sent for record in self.records)

    @property
    def seconds(self) -> float:
        """From the first request to the last answer's end."""
        return max(record.ended for record in self.records) - self.began

    @property
    def busiest(self) -> float:
        """The busiest client process's share of a core; near 1, the figures are the client's own."""
        return max(self.cpu_seconds) / self.seconds


def drive(target: Target, lanes: list[Lane], *, start: float | None = None, timeout: float) -> Observed:
    """Run all lanes at once and return what became of every request that was sent.

    start: when, in seconds of the monotonic clock; None as soon as all is ready.  timeout: seconds a request
    may take.
    """
    with _without_collections(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Drive(target, lanes, start=start, timeout=timeout).run())


@contextmanager
def _without_collections() -> Iterator[None]:
    """A collection of garbage would be measured as the server's delay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        return load_object("uvloop:new_event_loop")
    except ImportError:
        return None


class _Drive:
    def __init__(self, target: Target, lanes: list[Lane], *, start: float | None, timeout: float) -> None:
        self._target, self._lanes = target, lanes
        self._start, self._timeout = time.monotonic() if start is None else start, timeout
        self._pool = ConnectionPool(target)
        self._records: list[Record] = []
        self._is_over = asyncio.Event()  # background lanes send nothing more

    async def run(self) -> Observed:
        await asyncio.sleep(self._start - time.monotonic())
        began = time.process_time()
        async with asyncio.TaskGroup() as everything:
            for lane in self._lanes:
                if lane.is_background:
                    everything.create_task(self._lane(lane))
            async with asyncio.TaskGroup() as foreground:
                for lane in self._lanes:
                    if not lane.is_background:
                        foreground.create_task(self._lane(lane))
            self._is_over.set()
        cpu_seconds = time.process_time() - began
        self._pool.close()
        records = sorted(self._records, key=lambda record: record.sent)
        return Observed(records=records, cpu_seconds=[cpu_seconds])

    async def _lane(self, lane: Lane) -> None:
        orders = iter(lane.orders)
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(lane.limit or len(lane.orders), len(lane.orders))):
                workers.create_task(self._work(lane, orders))

    async def _work(self, lane: Lane, orders: Iterator[Order]) -> None:
        """Send order after order, each when the one before is answered and its time has come."""
        for order in orders:
            due = None if order.at is None else self._start + order.at
            if due is not None and not await self._comes(due, lane):
                return
            self._records.append(await self._send(lane, order, due))

    async def _comes(self, due: float, lane: Lane) -> bool:
        """Wait until `due`; False if the lane is over before."""
        seconds = due - time.monotonic()
        if lane.is_background:
            try:
                await asyncio.wait_for(self._is_over.wait(), max(0.0, seconds))
            except TimeoutError:
                return True
            return False
        if seconds > 0:
            await asyncio.sleep(seconds)
        return True

    async def _send(self, lane: Lane, order: Order, due: float | None) -> Record:
        request = self._target.post(order.route, order.body)
        record = Record(lane=lane.name, due=due, sent=time.monotonic())
        answer = StreamAnswer(record)
        try:
            async with asyncio.timeout(self._timeout):
                await self._pool.exchange(request, answer)
        except TimeoutError:
            answer.fail(f"no end after {self._timeout:g} s")
        except BrokenResponseError as error:
            answer.fail(str(error))
        except OSError as error:
            answer.fail(f"cannot connect: {error.strerror or error}")
        return answer.finish(time.monotonic())
