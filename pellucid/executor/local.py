"""The worker in this very process: for one device, and for reading the engine with a debugger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pellucid.executor.base import WORKER, Capacity, HasFileno, Hear, Pending, Seat, Ticket
from pellucid.registry import load_object
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, StepResult


class LocalTicket:
    """A plan that the device is working on."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def provide(self, late: Mapping[str, object]) -> None:
        cast(Ticket, self._pending).provide(late)

    def wait(self) -> None:
        self._pending.wait()

    def result(self) -> StepResult:
        return self._pending.result()


class LocalExecutor:
    """Runs plans as they come; on a GPU `submit` returns once the step is launched."""

    def start(self, resolved: Resolved) -> Capacity:
        device = resolved.user.parallel.first_gpu(resolved.replica)
        seat = Seat(device=device, say=lambda name, said: self._hear(0, name, said))
        self.worker = load_object(WORKER)(resolved, seat)
        return self.worker.start()

    def listen(self, hear: Hear) -> None:
        self._hear = hear

    @property
    def lines(self) -> Sequence[HasFileno]:
        return ()

    def submit(self, plan: StepPlan) -> LocalTicket:
        return LocalTicket(self.worker.execute(plan))

    def call(self, name: str, *args: object) -> object:
        return getattr(self.worker, name)(*args)

    def check(self) -> None:
        """Nothing to ask: a failure in this process has already raised."""

    def shutdown(self) -> None:
        self.worker.shutdown()
