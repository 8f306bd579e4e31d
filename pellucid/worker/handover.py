"""Before and behind a step's launch: what stages of a pipeline pass on, and what comes back to them.

A stage receives the residual stream, runs its layers and sends the stream on; the last one samples, and tells
all others what each row yielded.  A stage never waits for another to receive: messages that it sends wait by
themselves, and feedback is received into memory that stands ready before it is sent.  None of it is part of a
CUDA graph.  A model in one piece has `NoHandover`, so no step asks whether there is a pipeline.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pellucid.dist.collectives import Channel, Channels, Message
from pellucid.dist.mesh import Stage
from pellucid.executor.base import Pending
from pellucid.layers.stage import Inlet
from pellucid.transfer import upload
from pellucid.worker.feedback import Feedback
from pellucid.worker.inputs import InputBuilder, StepCounts
from pellucid.worker.results import EmptyResult, Packed, Reader

# What launching a step yields: where it samples Packed, before that a residual stream [T, D].
Y_contra = TypeVar("Y_contra", contravariant=True)


class Handover(Protocol[Y_contra]):
    """One stage's dealings with the others."""

    @property
    def reserve(self) -> int:
        """Bytes of device memory that messages under way may take, beside those of one step."""
        ...

    def apply_feedback(self, newest: int) -> None:
        """Bring the slots up to what was sampled in plans up to number `newest`."""
        ...

    def receive(self, counts: StepCounts) -> None:
        """Get what the stage before has made of this step."""
        ...

    def deliver(self, plan_id: int, counts: StepCounts, yielded: Y_contra) -> Pending:
        """Pass on what this stage has made of it; valid until the next step, so it is copied if need be."""
        ...

    def close(self) -> None:
        """Wait until all is sent."""
        ...


class NoHandover:
    """Of a model in one piece."""

    reserve = 0

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def apply_feedback(self, newest: int) -> None:
        """The step itself has written it into the slots."""

    def receive(self, counts: StepCounts) -> None:
        """The model begins with the embedding."""

    def deliver(self, plan_id: int, counts: StepCounts, yielded: Packed) -> Pending:
        return self.reader.begin(plan_id, counts, yielded)

    def close(self) -> None:
        """Nothing was sent."""


class Source(Protocol):
    """Where a stage's input comes from."""

    def receive(self, num_tokens: int) -> None: ...


class NoSource:
    """The first stage begins with the embedding."""

    def receive(self, num_tokens: int) -> None:
        pass


class StageBefore:
    """The stage that sends us the residual stream."""

    def __init__(self, channel: Channel, stage: int, inlet: Inlet) -> None:
        self.channel, self.stage, self.inlet = channel, stage, inlet

    def receive(self, num_tokens: int) -> None:
        self.channel.receive(self.inlet.stream[:num_tokens], self.stage).wait()


class Outbox:
    """Messages under way, each a copy.

    most: so many steps later a message has surely arrived, for no more plans are under way at once.
    """

    def __init__(self, channel: Channel, most: int) -> None:
        self.channel, self.most = channel, most
        self._sent: deque[list[Message]] = deque()
        self._largest = 0  # bytes of a step's message

    @property
    def reserve(self) -> int:
        """Bytes that further messages take if all are as large as the largest so far."""
        return (self.most - 1) * self._largest

    def send(self, x: Tensor, stages: range) -> None:
        """Send a step's message to each of the stages."""
        if len(self._sent) == self.most:
            self._wait_for_oldest()
        copy = x.clone()
        self._largest = max(self._largest, copy.nbytes)
        self._sent.append([self.channel.send(copy, stage) for stage in stages])

    def drain(self) -> None:
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for message in self._sent.popleft():
            message.wait()


class EarlyStage:
    """Any stage but the last: sends the stream on, and learns later what came of it.

    depth: plans under way at once.
    """

    def __init__(
        self, channels: Channels, stage: Stage, source: Source, inputs: InputBuilder, *, depth: int
    ) -> None:
        self.source, self.slots, self.layout = source, inputs.slots, inputs.layout
        self._feedback, self._last = channels.feedback, len(stage.cuts)
        self._next = range(stage.index + 1, stage.index + 2)
        self._outbox = Outbox(channels.streams, most=depth)
        self._due: deque[Due] = deque()

    @property
    def reserve(self) -> int:
        return self._outbox.reserve

    def apply_feedback(self, newest: int) -> None:
        while self._due and self._due[0].plan_id <= newest:
            due = self._due.popleft()
            due.message.wait()
            self._apply(Feedback.unpack(due.packed, self.slots.shape), due.slots)

    def _apply(self, feedback: Feedback, host_slots: np.ndarray) -> None:
        alive = self.slots.are_alive(host_slots)
        if not alive.all():  # the blocks of a dead slot are another's by now
            num_new = feedback.output.num_new * upload(alive, self.slots.device)
            feedback = replace(feedback, output=replace(feedback.output, num_new=num_new))
        tables = tuple(table[feedback.slots] for table in self.slots.block_tables)
        self.layout.move_accepted(tables, feedback.roots, feedback.output)
        self.slots.apply(feedback)

    def receive(self, counts: StepCounts) -> None:
        self.source.receive(counts.num_tokens)

    def deliver(self, plan_id: int, counts: StepCounts, yielded: Tensor) -> Pending:
        self._outbox.send(yielded[: counts.num_tokens], self._next)
        if counts.any_samples:
            self._due.append(self._expect(plan_id, counts))
        return EmptyResult(plan_id)

    def _expect(self, plan_id: int, counts: StepCounts) -> Due:
        """Make room for the feedback on a step; its message may come from now on."""
        shape = (counts.num_rows, Feedback.width(self.slots.shape))
        packed = torch.empty(shape, dtype=torch.int32, device=self.slots.device)
        message = self._feedback.receive(packed, self._last)
        return Due(plan_id, counts.slots, packed, message)

    def close(self) -> None:
        self._outbox.drain()


@dataclass(frozen=True, slots=True)
class Due:
    """Feedback on its way here."""

    plan_id: int
    slots: np.ndarray  # [B], of the plan's rows
    packed: Tensor
    message: Message


class LastStage:
    """The stage that samples, and tells the others."""

    def __init__(
        self, channels: Channels, stage: Stage, source: Source, reader: Reader, *, depth: int
    ) -> None:
        self.source, self.reader = source, reader
        self._outbox, self._others = Outbox(channels.feedback, most=depth), range(stage.index)

    @property
    def reserve(self) -> int:
        return self._outbox.reserve

    def apply_feedback(self, newest: int) -> None:
        """The step itself has written it into the slots."""

    def receive(self, counts: StepCounts) -> None:
        self.source.receive(counts.num_tokens)

    def deliver(self, plan_id: int, counts: StepCounts, yielded: Packed) -> Pending:
        if counts.any_samples:
            assert yielded.feedback is not None, "the step tells nobody"
            self._outbox.send(yielded.feedback[: counts.num_rows], self._others)
        return self.reader.begin(plan_id, counts, yielded)

    def close(self) -> None:
        self._outbox.drain()


def make_handover(
    channels: Channels | None, stage: Stage, inlet: Inlet | None, inputs: InputBuilder, reader: Reader, *,
    depth: int,
) -> Handover[Any]:  # fmt: skip
    """This stage's.  inlet: its `stream` is in place.  depth: plans under way at once."""
    if channels is None:
        return NoHandover(reader)
    source = NoSource() if inlet is None else StageBefore(channels.streams, stage.index - 1, inlet)
    if stage.is_last:
        return LastStage(channels, stage, source, reader, depth=depth)
    return EarlyStage(channels, stage, source, inputs, depth=depth)
