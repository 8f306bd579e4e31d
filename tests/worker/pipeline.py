"""A pipeline in one process: real workers, and between them channels that deliver as late as they may.

Whatever stage can run next may do so, in random order and often no sooner than somebody waits for a result.
What is sent is read only when it is received, so a sender that changes it too early is seen.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from unittest.mock import patch

from torch import Tensor

from pellucid.dist.collectives import ALONE, Channels, Links
from pellucid.dist.mesh import Mesh
from pellucid.executor.base import EXECUTORS, Capacity, Hear, Pending, Seat
from pellucid.executor.local import LocalTicket
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.worker.worker import Worker

Mail = dict[tuple[int, int], deque[Tensor]]  # (from, to): messages in their order


@dataclass
class Letter:
    """A message of which nothing has happened yet, until somebody waits for it."""

    box: deque[Tensor]
    x: Tensor

    def wait(self) -> None:
        assert self.box, "the stage waits for what nobody has sent"
        self.x.copy_(self.box.popleft())


class Sent:
    def wait(self) -> None:
        """Whoever waits does so when it has been received."""


class MailChannel:
    """One kind of message, as one stage sees it."""

    def __init__(self, mail: Mail, stage: int) -> None:
        self.mail, self.stage = mail, stage

    def send(self, x: Tensor, to: int) -> Sent:
        self.mail.setdefault((self.stage, to), deque()).append(x)
        return Sent()

    def receive(self, x: Tensor, source: int) -> Letter:
        return Letter(self.mail.setdefault((source, self.stage), deque()), x)


class LazyPipeline:
    """An executor whose stages have each their own idea of time."""

    def start(self, resolved: Resolved) -> Capacity:
        self.pp, self.rng = resolved.num_pipeline_stages, random.Random(resolved.user.model.seed)
        self.workers = [Worker(resolved, Seat(rank=rank)) for rank in range(self.pp)]
        self.plans: list[StepPlan] = []
        self.num_run = [0] * self.pp
        self.results: dict[int, Pending] = {}
        streams, feedback = Mail(), Mail()
        capacities = []
        for rank, worker in enumerate(self.workers):
            channels = Channels(MailChannel(streams, rank), MailChannel(feedback, rank))
            links = Links(mesh=Mesh(pp=self.pp, rank=rank), world=ALONE, tp=ALONE, channels=channels)
            with patch("pellucid.worker.worker.connect", lambda *_, links=links, **__: links):
                capacities.append(worker.start())
        assert len({capacity.num_pages for capacity in capacities}) == 1, "give num_gpu_blocks_override"
        return capacities[0]

    def submit(self, plan: StepPlan) -> LocalTicket:
        self.plans.append(plan)
        while self.rng.random() < 0.7 and self.advance():
            pass
        return LocalTicket(LazyResult(self, plan))

    def advance(self) -> bool:
        """One stage, any that can, runs its next plan."""
        able = [stage for stage in range(self.pp) if self.can_run(stage)]
        if able:
            stage = self.rng.choice(able)
            plan = self.plans[self.num_run[stage]]
            pending = self.workers[stage].execute(plan)
            self.num_run[stage] += 1
            if self.workers[stage].reports:
                self.results[plan.id] = pending
        return bool(able)

    def can_run(self, stage: int) -> bool:
        """Has the stage before run the plan, and the last one all whose feedback is due?"""
        index = self.num_run[stage]
        if index == (self.num_run[stage - 1] if stage else len(self.plans)):
            return False
        plan, num_sampled = self.plans[index], self.num_run[-1]
        newest = max(plan.id - self.pp, plan.committed)
        return num_sampled == len(self.plans) or self.plans[num_sampled].id > newest

    def call(self, name: str, *args: object) -> object:
        return [getattr(worker, name)(*args) for worker in self.workers][0]

    def check(self) -> None:
        pass

    def listen(self, hear: Hear) -> None:
        """Nobody says anything out of turn."""

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()


@dataclass
class LazyResult:
    pipeline: LazyPipeline
    plan: StepPlan

    def wait(self) -> None:
        while self.plan.id not in self.pipeline.results:
            assert self.pipeline.advance(), "the pipeline is stuck"

    def result(self) -> StepResult:
        return self.pipeline.results.pop(self.plan.id).result()


EXECUTORS.register("lazy", "tests.worker.pipeline:LazyPipeline")
