"""The device's part of a step, from slots to slots: gather, forward, sample, advance, propose, pack.

A function of a step's rows, in two halves, for what features need may come when the forward is under way.  It
reads nothing back and waits for nothing, so it can be recorded as a CUDA graph (graphs/launch.py), whole or
by halves, and it is the same function when it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from pellucid.attention.base import AnyBackend
from pellucid.features.base import Yielded
from pellucid.forward import ForwardInput, TileMaps
from pellucid.rows import SlotRows, StepRows
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, Known, Needs, Proposer
from pellucid.spec.verify import Verifier, VerifyRows
from pellucid.taps import Taps
from pellucid.worker.inputs import InputBuilder, StepCounts, StepInput
from pellucid.worker.results import Packed, pack


class StepModel(Protocol):
    """What a model file offers."""

    def __call__(self, fwd: ForwardInput) -> Tensor:
        """Hidden states [T, D], or of the tokens that are wanted."""
        ...

    def logits(self, hidden: Tensor, *of_head: Tensor) -> Tensor:
        """[S, D] -> [S, this rank's share of V].  of_head: what `fwd` has for it, if there is anything."""
        ...


Begun = tuple[StepInput, Tensor]  # a step whose forward has run: its input, and the hidden states wanted


class Forward:
    """The model on what the slots hold."""

    def __init__(self, model: StepModel, backend: AnyBackend, inputs: InputBuilder, *, needs: Needs) -> None:
        """needs: what the proposer wants to see of it."""
        self.model, self.backend, self.inputs, self.slots = model, backend, inputs, inputs.slots
        self.needs = needs

    def __call__(self, rows: StepRows, tiles: TileMaps | None = None) -> Begun:
        step = self.gather(rows, tiles)
        return step, self.model(step.fwd)

    def gather(self, rows: StepRows, tiles: TileMaps | None = None) -> StepInput:
        """What the model is to see.  tiles: of a forward that is recorded for any rows."""
        step = self.inputs.gather(rows)
        fwd = step.fwd
        needs = self.needs if rows.counts.num_propose else Needs()
        fwd.tiles, fwd.taps = tiles, Taps(needs.taps)
        are_read = needs.hidden or bool(needs.taps)
        fwd.all_wanted = are_read or bool(rows.counts.num_scores.any())
        for _, feature in rows.counts.riders.extend:
            feature.extend(rows, fwd)
        fwd.attn = tuple(self.backend.metadata(fwd, table) for table in range(len(fwd.block_tables)))
        return step


class StageStep:
    """On a pipeline stage before the last: the forward, and no more."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def begin(self, rows: StepRows, tiles: TileMaps | None = None) -> Tensor:
        """Run the step; the residual stream [T, D], with which the next stage goes on."""
        step, stream = self.forward(rows, tiles)
        self.forward.slots.advance_chunks(step.rows)
        return stream

    def among(self, yielded: Tensor, places: np.ndarray) -> Tensor:
        return yielded

    def alone(self, rows: StepRows, begun: Tensor) -> Tensor:
        return begun[: rows.num_tokens]

    def num_bytes(self, begun: Tensor) -> int:
        return begun.nbytes

    def finish(self, rows: StepRows, begun: Tensor) -> Tensor:
        """There is nothing left to do: another stage samples."""
        return begun


# From a step's rows, what they yielded and their drafts: what other pipeline stages must be told.
Tell = Callable[[SlotRows, SampleOutput, Drafts], Tensor | None]


def tell_nobody(rows: SlotRows, output: SampleOutput, drafts: Drafts) -> None:
    """There are no other stages."""


class DeviceStep:
    """Every arrow of it is one call on one object."""

    def __init__(
        self, forward: Forward, sampler: Sampler, proposer: Proposer, verifier: Verifier,
        tell: Tell = tell_nobody,
    ) -> None:  # fmt: skip
        self.forward, self.model, self.slots = forward, forward.model, forward.slots
        self.sampler, self.proposer, self.verifier, self.tell = sampler, proposer, verifier, tell

    def begin(self, rows: StepRows, tiles: TileMaps | None = None) -> Begun:
        """Gather and run the forward."""
        return self.forward(rows, tiles)

    def among(self, yielded: Packed, places: np.ndarray) -> Packed:
        """What rows at these places have yielded, between padding."""
        return replace(yielded, places=places)

    def alone(self, rows: StepRows, begun: Begun) -> Begun:
        """What these rows have begun, without the padding behind them."""
        step = self.forward.gather(rows)
        step.fwd.all_wanted = begun[0].fwd.all_wanted
        num = rows.num_tokens if step.fwd.all_wanted else rows.counts.num_logits
        step.fwd.taps = begun[0].fwd.taps.first(rows.num_tokens)
        return step, begun[1][:num]

    def num_bytes(self, begun: Begun) -> int:
        step, hidden = begun
        tables = sum(table.nbytes for table in step.fwd.block_tables)
        return hidden.nbytes + step.fwd.taps.nbytes + tables

    def finish(self, rows: StepRows, begun: Begun) -> Packed:
        """Sample, and all that follows; what the host will want of the step, in one tensor."""
        step, hidden = begun
        fwd, riders = step.fwd, rows.counts.riders
        logits = self.model.logits(fwd.sampled(hidden), *map(fwd.sampled, fwd.of_head))
        for _, feature in riders.between:
            feature.between(rows, logits)
        output = self._sample(rows, step, logits)
        self.forward.inputs.layout.move_accepted(fwd.block_tables, step.rows.roots, output)
        newest = self.slots.advance(step.rows, output)
        known = self._known(rows.counts, step.rows, newest)
        drafts = Drafts(output.tokens[:, :0])
        if known.num_wanted:
            drafts = self.proposer.propose(fwd, output, known, hidden, fwd.taps.states(hidden))
        self.slots.write_drafts(step.rows, newest, drafts)
        self.verifier.keep(step.rows.slots, drafts)
        told = self.tell(step.rows, output, drafts)
        yielded = Yielded(step, hidden, output, drafts.tokens)
        return pack(output, {name: each.after(rows, yielded) for name, each in riders.after}, told)

    def _sample(self, rows: StepRows, step: StepInput, logits: Tensor) -> SampleOutput:
        """A token at every wanted place, and of those what each row may keep."""
        counts, texts = rows.counts, step.texts
        host_slots, slots = counts.slots.repeat(counts.num_sampled), step.rows.logit_slots
        batch = self.sampler.state.batch(host_slots, slots, texts.logit_positions, texts.branches)
        verify_rows = VerifyRows(
            cu_logits=rows.cu_logits,
            inputs=step.rows.logit_inputs,
            room=step.rows.room,
            samples=step.rows.samples,
            max_drafts=counts.max_drafts,
            trees=self.slots.trees(step.rows.slots),
        )
        return self.verifier(logits, batch, verify_rows, self.slots.token_ids)

    def _known(self, counts: StepCounts, rows: SlotRows, newest: Tensor) -> Known:
        """What the slots now hold of the rows' texts, for the proposer."""
        return Known(
            token_ids=self.slots.token_ids,
            newest=newest,
            samples=rows.samples,
            host_slots=counts.slots,
            has_chunks=counts.has_chunks,
            num_wanted=counts.num_propose,
        )
