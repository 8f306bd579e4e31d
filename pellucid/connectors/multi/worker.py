"""Several connectors in a worker: each has its part of a job, which is over when all parts are."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from pellucid.connectors.base import KV_CONNECTORS, Job, WorkerConnector, WorkerDoor
from pellucid.connectors.multi.options import each_resolved
from pellucid.registry import load_object
from pellucid.schedule.plan import ints

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity


@dataclass(slots=True)
class Parts:
    """Of a job."""

    number: int
    num_left: int
    ok: bool = True
    seconds: float = 0.0  # of the part that took longest


class Multi:
    """See `WorkerConnector`."""

    def __init__(self, door: WorkerDoor, options: Mapping[str, object]) -> None:
        self._door, self._lock = door, threading.Lock()
        self._next = 0
        self._parts: dict[int, Parts] = {}  # by the number that a part's connector knows
        self._each: list[WorkerConnector] = []
        for own in each_resolved(door.resolved):
            config = own.kv_transfer
            assert config is not None
            made = load_object(KV_CONNECTORS.load(config.kv_connector).worker)
            one = replace(door, resolved=own, done=self._done)
            self._each.append(made(one, config.kv_connector_extra_config))

    def register(self, pages: Tensor, capacity: Capacity) -> None:
        for each in self._each:
            each.register(pages, capacity)

    def release(self) -> None:
        for each in self._each:
            each.release()

    def start(self, jobs: Sequence[Job]) -> None:
        of_each: list[list[Job]] = [[] for _ in self._each]
        for job in jobs:
            parts = Parts(job.number, len(job.what))
            for index, what, pages in job.what:
                with self._lock:
                    number, self._next = self._next, self._next + 1
                    self._parts[number] = parts
                own = job.pages if pages is None else ints(pages)
                of_each[index].append(Job(number=number, is_load=job.is_load, pages=own, what=what))
        for each, own_jobs in zip(self._each, of_each, strict=True):
            if own_jobs:
                each.start(own_jobs)

    def _done(self, number: int, ok: bool, seconds: float = 0.0) -> None:
        """From any thread."""
        with self._lock:
            parts = self._parts.pop(number)
            parts.num_left -= 1
            parts.ok &= ok
            parts.seconds = max(parts.seconds, seconds)
            is_over = not parts.num_left
        if is_over:
            self._door.done(parts.number, parts.ok, parts.seconds)

    def close(self) -> None:
        for each in self._each:
            each.close()
