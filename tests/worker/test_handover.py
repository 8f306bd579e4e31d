"""What one stage does with what it is told, and with what it has sent."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from pellucid.dist.collectives import Channels
from pellucid.dist.mesh import Stage
from pellucid.kv.kinds import Full
from pellucid.kv.layout import LayerCache, lay_out
from pellucid.sample.output import SampleOutput
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Admission, ints
from pellucid.spec.base import DraftShape
from pellucid.worker.feedback import Feedback
from pellucid.worker.handover import EarlyStage, NoSource, Outbox
from pellucid.worker.inputs import InputBuilder, StepCounts
from pellucid.worker.layout import ChainLayout
from pellucid.worker.slots import Slots
from tests.worker.pipeline import Mail, MailChannel

LAYOUT = lay_out((Full(16),), [LayerCache(1024, None)])
SHAPE = DraftShape(3, tree_depth=2)


class Settled(ChainLayout):
    """Notes how many tokens of each row were settled, and where the rows' text ended before."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []

    def move_accepted(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        assert output.path is not None and output.path.tolist() == [[0, 2, 0], [0, 1, 3]]
        self.seen.append((roots.tolist(), output.num_new.tolist()))


@pytest.fixture
def slots() -> Slots:
    """Two, with five known tokens each."""
    slots = Slots(2, 64, LAYOUT, 16, torch.device("cpu"), SHAPE)
    admitted = [
        Admission(
            seq_id=slot, slot=slot, token_ids=ints([1, 2, 3, 4, 5]), prompt_len=5, num_computed=4,
            limit=60, seed=0, sampling=SamplingParams(), pages=ints([slot + 1]),
        )
        for slot in (0, 1)
    ]  # fmt: skip
    slots.admit(admitted)
    return slots


def test_feedback_writes_tokens_and_drafts_and_moves_no_kv_of_a_slot_that_has_died(slots: Slots) -> None:
    layout, mail = Settled(), Mail()
    channels = Channels(MailChannel({}, 0), MailChannel(mail, 0))
    inputs = InputBuilder(slots, layout)
    stage = EarlyStage(channels, Stage(0, (1,)), NoSource(), inputs, depth=2)
    stage.deliver(7, StepCounts.uniform(np.array([0, 1]), 4), torch.zeros(8, 4))
    feedback = Feedback(
        slots=torch.tensor([0, 1]),
        roots=torch.tensor([4, 4]),
        output=SampleOutput(
            tokens=torch.tensor([[11, 12, 0], [21, 22, 23]]),
            num_new=torch.tensor([2, 3]),
            path=torch.tensor([[0, 2, 0], [0, 1, 3]]),
        ),
        drafts=torch.tensor([[31, 32, 33], [41, 42, 43]]),
        parents=torch.tensor([[0, 0, 2], [0, 1, 1]]),
    )
    MailChannel(mail, 1).send(feedback.pack(), 0)
    stage.apply_feedback(6)
    assert not layout.seen, "it came too early"
    slots.retire([1])
    stage.apply_feedback(7)
    assert layout.seen == [([4, 4], [2, 0])]
    assert slots.token_ids[0, :10].tolist() == [1, 2, 3, 4, 5, 11, 12, 31, 32, 33]
    assert slots.num_computed[0] == 6
    trees = slots.trees(torch.tensor([0, 1]))
    assert trees is not None and trees.parents[:2].tolist() == [[0, 0, 2], [0, 1, 1]]


class Told:
    """A message that notes when it is waited for."""

    def __init__(self, waited: list[int], number: int) -> None:
        self.waited, self.number = waited, number

    def wait(self) -> None:
        self.waited.append(self.number)


class Notes:
    """A channel that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.waited: list[int] = []

    def send(self, x: Tensor, to: int) -> Told:
        self.sent.append(x)
        return Told(self.waited, len(self.sent))

    def receive(self, x: Tensor, source: int) -> Told:
        raise NotImplementedError


def test_an_outbox_keeps_copies_and_waits_only_for_what_has_surely_arrived() -> None:
    notes = Notes()
    outbox = Outbox(notes, most=2)
    buffer = torch.zeros(3, 5)
    for value in (1, 2, 3):
        outbox.send(buffer.fill_(value), range(1))
    assert [int(x[0, 0]) for x in notes.sent] == [1, 2, 3]
    assert notes.waited == [1]
    assert outbox.reserve == buffer.nbytes, "one more beside the one that a step shows"
    outbox.drain()
    assert notes.waited == [1, 2, 3]
