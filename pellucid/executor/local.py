"""The worker in this very process: for one device, and for reading the engine with a debugger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pellucid.executor.base import WORKER, Capacity, HasFileno, Hear, MeetAt, Pending, Seat, Ticket, alone
from pellucid.nodes.place import addresses, arrange
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

    def start(self, resolved: Resolved, meet: MeetAt = alone) -> Capacity:
        parallel = resolved.user.parallel
        place = next(place for place in arrange(parallel) if place.dp == resolved.replica)
        address, first = addresses(parallel, resolved.nodes, place)
        seat = Seat(
            device=parallel.first_gpu(resolved.replica),
            node=place.node,
            address=address,
            first=first,
            meet=meet,
            say=lambda name, said: self._hear(0, name, said),
        )
        self.worker = load_object(WORKER)(resolved, seat)
        return self.worker.start()

    def listen(self, hear: Hear) -> None:
        self._hear = hear

    @property
    def lines(self) -> Sequence[HasFileno]:
        return self.worker.pace.lines

    def submit(self, plan: StepPlan) -> LocalTicket:
        return LocalTicket(self.worker.execute(plan))

    def call(self, name: str, *args: object) -> object:
        return getattr(self.worker, name)(*args)

    def check(self) -> None:
        """A failure in this process has already raised; but other engines may wait for a step."""
        self.worker.pace.attend()

    def shutdown(self) -> None:
        self.worker.shutdown()
