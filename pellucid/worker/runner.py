"""One step on the device, plan in, result out.  `ModelRunner.execute` is where the whole of it is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from pellucid.executor.base import Pending
from pellucid.features.worker import WorkerFeatures
from pellucid.graphs.launch import Launcher
from pellucid.sample.state import SamplingState
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.worker.admission import Admitter
from pellucid.worker.handover import Handover
from pellucid.worker.inputs import InputBuilder, StepCounts
from pellucid.worker.results import EmptyResult
from pellucid.worker.slots import Slots

Y = TypeVar("Y")


class ModelRunner(Generic[Y]):
    """Runs plans in the order they come; every arrow of a step is one call on one object."""

    def __init__(
        self, slots: Slots, state: SamplingState, inputs: InputBuilder, launcher: Launcher[Y],
        handover: Handover[Y], features: WorkerFeatures, *, num_stages: int = 1,
        proposer: object = None,
    ) -> None:  # fmt: skip
        self.slots, self.state, self.inputs, self.launcher = slots, state, inputs, launcher
        self.handover, self.features, self.num_stages = handover, features, num_stages
        self.admitter = Admitter(slots, state, proposer)
        self._inference = torch.inference_mode()  # to be entered again and again: a decorator makes it anew

    def execute(self, plan: StepPlan) -> Pending:
        """Launch one step.  Nothing in it waits for the device; the result is read one plan later."""
        with self._inference:
            newest = max(plan.id - self.num_stages, plan.committed)
            self.handover.apply_feedback(newest)  # law 6: before what follows
            self.admitter.retire(plan.retired)
            self.features.retire(plan.retired)
            self.admitter.admit(plan.admitted)
            self.admitter.fail(self.features.admit(plan.admitted))
            self.slots.grow(plan.grown)
            self.features.ahead(plan)
            if not plan.rows:
                self.features.behind(plan)
                return EmptyResult(plan.id)
            counts = self.inputs.count(plan.rows, plan.num_propose, self.features.riders(plan))
            for name, feature in counts.riders.before:
                feature.before(counts, plan.ride.get(name))
            self.handover.receive(counts)
            if plan.is_open:
                finish = self.launcher.begin(counts)
                return OpenStep(counts, lambda: self._deliver(plan, counts, finish()))
            yielded = self.launcher(counts)  # forward, sampling, slots and drafts: device_step.py
            return self._deliver(plan, counts, yielded)

    def _deliver(self, plan: StepPlan, counts: StepCounts, yielded: Y) -> Pending:
        pending = self.admitter.tell(counts, self.handover.deliver(plan.id, counts, yielded))
        self.features.behind(plan)
        return pending


class OpenStep:
    """A step whose forward is under way; its second half waits for what features need."""

    def __init__(self, counts: StepCounts, finish: Callable[[], Pending]) -> None:
        self._counts, self._finish = counts, finish
        self._pending: Pending | None = None

    @torch.inference_mode()
    def provide(self, late: Mapping[str, object]) -> None:
        """Launch the rest.  No other step may have been launched meanwhile."""
        for name, feature in self._counts.riders.fill:
            feature.fill(self._counts, late[name])
        self._pending = self._finish()

    def wait(self) -> None:
        self._launched.wait()

    def result(self) -> StepResult:
        return self._launched.result()

    @property
    def _launched(self) -> Pending:
        assert self._pending is not None, "what the step waits for has not come"
        return self._pending
