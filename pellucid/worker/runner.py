"""One step on the device, plan in, result out.  `ModelRunner.execute` is where the whole of it is seen."""

from __future__ import annotations

from typing import Protocol

import torch

from pellucid.sample.state import SamplingState
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.worker.graphs import Launcher
from pellucid.worker.inputs import InputBuilder
from pellucid.worker.results import ResultReader
from pellucid.worker.slots import Slots


class Pending(Protocol):
    """A result on its way to the host."""

    def result(self) -> StepResult: ...


class EmptyResult:
    """Of a plan without rows, which only retires, grows or moves KV."""

    def __init__(self, plan_id: int) -> None:
        self.plan_id = plan_id

    def result(self) -> StepResult:
        return StepResult(plan_id=self.plan_id, tokens=[])


class ModelRunner:
    """Runs plans in the order they come; every arrow of a step is one call on one object."""

    def __init__(self, slots: Slots, state: SamplingState, inputs: InputBuilder, launcher: Launcher) -> None:
        self.slots, self.state, self.inputs, self.launcher = slots, state, inputs, launcher
        self.results = ResultReader()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        """Launch one step.  Nothing in it waits for the device; the result is read one plan later."""
        self.slots.retire(plan.retired)
        self.slots.admit(plan.admitted)
        self.state.admit(plan.admitted)
        self.slots.grow(plan.grown)
        if not plan.rows:
            return EmptyResult(plan.id)
        counts = self.inputs.count(plan.rows, plan.num_propose)
        packed = self.launcher(counts)  # forward, sampling, slots and drafts: device_step.py
        return self.results.begin(plan.id, counts, packed)
