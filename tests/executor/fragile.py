"""An executor that serves until it is given a certain prompt: then its engine fails."""

from __future__ import annotations

from pellucid.executor.base import EXECUTORS
from pellucid.executor.local import LocalExecutor, LocalTicket
from pellucid.schedule.plan import StepPlan

FATAL = [7, 7, 7, 7, 7]  # a prompt


class FragileExecutor(LocalExecutor):
    """The worker in this process; one prompt is too much for it."""

    def submit(self, plan: StepPlan) -> LocalTicket:
        if any(admission.token_ids.tolist() == FATAL for admission in plan.admitted):
            raise ArithmeticError("a prompt was too much")
        return super().submit(plan)


EXECUTORS.register("fragile", "tests.executor.fragile:FragileExecutor")
