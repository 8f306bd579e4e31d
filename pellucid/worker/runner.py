"""One step on the device, plan in, result out.  `ModelRunner.execute` is where the whole of it is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import torch

from pellucid.executor.base import Pending
from pellucid.sample.grammar import Masks
from pellucid.sample.state import SamplingState
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.worker.admission import Admitter
from pellucid.worker.graphs import Launcher
from pellucid.worker.handover import Handover
from pellucid.worker.inputs import InputBuilder, StepCounts
from pellucid.worker.results import EmptyResult
from pellucid.worker.slots import Slots

Y = TypeVar("Y")


class ModelRunner(Generic[Y]):
    """Runs plans in the order they come; every arrow of a step is one call on one object."""

    def __init__(
        self, slots: Slots, state: SamplingState, inputs: InputBuilder, launcher: Launcher[Y],
        handover: Handover[Y], *, num_stages: int = 1,
    ) -> None:  # fmt: skip
        self.slots, self.state, self.inputs, self.launcher = slots, state, inputs, launcher
        self.handover, self.num_stages = handover, num_stages
        self.admitter = Admitter(slots, state)
        self._inference = torch.inference_mode()  # to be entered again and again: a decorator makes it anew

    def execute(self, plan: StepPlan) -> Pending:
        """Launch one step.  Nothing in it waits for the device; the result is read one plan later."""
        with self._inference:
            self.handover.learn(max(plan.id - self.num_stages, plan.committed))  # law 6: before what follows
            self.admitter.retire(plan.retired)
            self.admitter.admit(plan.admitted)
            self.slots.grow(plan.grown)
            if not plan.rows:
                return EmptyResult(plan.id)
            counts = self.inputs.count(plan.rows, plan.num_propose)
            self.handover.receive(counts)
            if plan.has_grammar:
                deliver = partial(self._deliver, plan.id)
                return OpenStep(counts, self.launcher.begin(counts), deliver)
            yielded = self.launcher(counts)  # forward, sampling, slots and drafts: device_step.py
            return self._deliver(plan.id, counts, yielded)

    def _deliver(self, plan_id: int, counts: StepCounts, yielded: Y) -> Pending:
        return self.admitter.tell(counts, self.handover.deliver(plan_id, counts, yielded))


class OpenStep(Generic[Y]):
    """A step whose forward is under way; what follows waits for a grammar's masks."""

    def __init__(
        self, counts: StepCounts, finish: Callable[[Masks], Y], deliver: Callable[[StepCounts, Y], Pending]
    ) -> None:
        self._counts, self._finish, self._deliver = counts, finish, deliver
        self._pending: Pending | None = None

    @torch.inference_mode()
    def provide(self, masks: Masks) -> None:
        """Launch the rest.  No other step may have been launched meanwhile."""
        counts = replace(self._counts, host_bound=tuple(masks))
        self._pending = self._deliver(counts, self._finish(masks))

    def wait(self) -> None:
        assert self._pending is not None, "the grammar's masks have not come"
        self._pending.wait()

    def result(self) -> StepResult:
        assert self._pending is not None, "the grammar's masks have not come"
        return self._pending.result()
