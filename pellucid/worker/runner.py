"""One step on the device.  `ModelRunner.execute` is the only function that sees the whole of it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pellucid.sample.logprobs import LogprobTensors, score
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.spec.base import Known, Proposer
from pellucid.spec.verify import VerifyRows, verify
from pellucid.worker.graphs import Forward
from pellucid.worker.inputs import InputBuilder, StepInput
from pellucid.worker.results import PendingResult
from pellucid.worker.slots import Slots


class Model(Protocol):
    """What a model file offers."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, this rank's share of V]."""
        ...


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

    def __init__(
        self, model: Model, forward: Forward, slots: Slots, inputs: InputBuilder, sampler: Sampler,
        proposer: Proposer,
    ) -> None:  # fmt: skip
        self.model, self.forward, self.slots, self.inputs = model, forward, slots, inputs
        self.sampler, self.proposer = sampler, proposer

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        """Launch one step.  Nothing in it waits for the device; the result is read one plan later."""
        self.slots.retire(plan.retired)
        self.slots.admit(plan.admitted)
        self.sampler.state.admit(plan.admitted)
        self.slots.grow(plan.grown)
        if not plan.rows:
            return EmptyResult(plan.id)
        step = self.inputs.build(plan.rows)
        hidden = self.forward(step.fwd)
        output = self._sample(step, hidden)
        self.slots.advance(step.rows, output)
        known = Known(self.slots.token_ids, self.slots.num_computed[step.rows.slots] + 1)
        drafts = self.proposer.propose(step.fwd, output, known, hidden, step.fwd.taps)
        self.slots.write_drafts(step.rows, drafts.tokens)
        return PendingResult(plan.id, step, output, self._score(step, hidden))

    def _sample(self, step: StepInput, hidden: Tensor) -> SampleOutput:
        """The target's own token at every wanted place, and of those what each row may keep."""
        fwd, rows = step.fwd, step.rows
        at = fwd.logits_index
        host_slots = np.repeat(step.host_slots, step.num_sampled)
        batch = self.sampler.state.batch(host_slots, step.logit_slots, fwd.positions[at] + 1)
        sampled = self.sampler(self.model.logits(hidden[at]), batch, self.slots.token_ids)
        return verify(
            sampled,
            VerifyRows(
                cu_logits=step.cu_logits,
                inputs=fwd.input_ids[at],
                room=self.slots.room(rows),
                samples=rows.samples,
                max_drafts=int(step.num_drafts.max()),
                parents=self.proposer.shape.parents,
            ),
        )

    def _score(self, step: StepInput, hidden: Tensor) -> LogprobTensors | None:
        """Prompt logprobs: of each known token that follows a wanted place."""
        if not step.num_scores.any():
            return None
        at = step.score_index
        known = self.slots.token_ids[step.score_slots, step.fwd.positions[at] + 1]
        wanted = int(self.slots.num_prompt_logprobs[step.host_slots[step.num_scores > 0]].max())
        return score(hidden[at], self._whole_logits, known, wanted, vocab_size=self.sampler.state.vocab_size)

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        return self.sampler.vocabulary.whole(self.model.logits(hidden))
