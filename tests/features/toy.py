"""A feature from outside, in one file: a request names a token, and gets it at every other place.

    FEATURES.register("toy", "tests.features.toy:TOY")
    SamplingParams(extra_args={"toy": 17})

The plan carries by how much the token's logit is raised, and behind it, while the forward runs, comes where;
what was sampled comes home once more, and the answer has it in `extras`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pellucid.features.base import (
    AskingRow,
    Feature,
    Halves,
    Home,
    HostFeature,
    RowKind,
    WorkerFacts,
    WorkerFeature,
    Yielded,
)
from pellucid.rows import StepRows
from pellucid.schedule.news import News
from pellucid.schedule.plan import Admission
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.sequence import Sequence as Seq
from pellucid.types import Request
from pellucid.worker.inputs import StepCounts

TOY = Feature("tests.features.toy:Host", "tests.features.toy:Worker")
BIAS = 1000.0


@dataclass(frozen=True, slots=True)
class Biases:
    """By row of the plan."""

    rows: dict[int, float]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens before each row's next one."""

    rows: dict[int, int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What each row has yielded."""

    rows: dict[int, list[int]]


class Host(HostFeature):
    """Beside the scheduler.  Host-bound, so that it knows how long each text is."""

    rows, is_watched, is_host_bound = RowKind.SAMPLING, True, True

    def __init__(self, resolved: object) -> None:
        self.sampled: dict[str, list[int]] = {}

    def asks(self, request: Request) -> bool:
        token = (request.sampling.extra_args or {}).get("toy")
        if token is not None and not isinstance(token, int):
            raise ValueError(f"extra_args['toy'] is {token!r}, must be a token id")
        return token is not None

    def enter(self, seq: Seq) -> int:
        self.sampled[seq.request.id] = []
        assert seq.request.sampling.extra_args is not None
        return seq.request.sampling.extra_args["toy"]

    def ride(self, rows: Sequence[AskingRow]) -> Biases:
        return Biases({row.index: BIAS for row in rows})

    def late(self, rows: Sequence[AskingRow]) -> Lengths:
        return Lengths({row.index: len(row.token_ids) for row in rows})

    def land(self, told: Sampled, news: News, scheduler: Scheduler) -> None:
        for index, tokens in told.rows.items():
            if landed := news.landed.get(index):
                mine = self.sampled[landed.seq.request.id]
                mine += tokens[: landed.num_new]
                landed.update.extras = {"toy": list(mine)}

    def leave(self, request_id: str) -> None:
        self.sampled.pop(request_id, None)


class Worker(WorkerFeature):
    """In a worker."""

    halves = Halves.SPLIT

    def __init__(self, facts: WorkerFacts) -> None:
        self._tokens = np.zeros(facts.slots.num_slots + 1, dtype=np.int64)
        self._device, self._first = facts.device, facts.sampler.vocabulary.first
        self._biases: dict[int, float] = {}
        self.make_room(0)

    def make_room(self, most: int) -> None:
        """What is added to which token's logit, for each logit of a step."""
        self._room = torch.zeros(most, device=self._device), torch.zeros(most, device=self._device).long()
        self._now = self._room

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._tokens[admission.slot] = admission.ride["toy"]

    def before(self, counts: StepCounts, ride: Biases | None) -> None:
        """Between it and `fill` no other step begins."""
        self._biases = {} if ride is None else ride.rows

    def fill(self, counts: StepCounts, late: Lengths) -> None:
        ends = np.cumsum(counts.num_sampled)
        bias, token = np.zeros(ends[-1], dtype=np.float32), np.zeros(ends[-1], dtype=np.int64)
        for row, length in late.rows.items():
            for place in range(counts.num_sampled[row]):
                at = ends[row] - counts.num_sampled[row] + place
                token[at] = self._tokens[counts.slots[row]]
                bias[at] = self._biases[row] * ((length + place) % 2)
        self._now = torch.from_numpy(bias).to(self._device), torch.from_numpy(token).to(self._device)
        if len(bias) <= len(self._room[0]):
            for there, here in zip(self._room, self._now, strict=True):
                there[: len(bias)].copy_(here)
            self._now = self._room

    def clear(self, counts: StepCounts) -> None:
        self._room[0].zero_()
        self._now = self._room

    def between(self, rows: StepRows, logits: Tensor) -> None:
        bias, token = (values[: len(logits)] for values in self._now)
        column = token - self._first
        is_here = (column >= 0) & (column < logits.shape[1])  # a rank has its share of the vocabulary
        added = torch.where(is_here, bias, 0.0)[:, None].to(logits.dtype)
        logits.scatter_add_(1, column.clamp(0, logits.shape[1] - 1)[:, None], added)

    def after(self, rows: StepRows, yielded: Yielded) -> Home:
        return Home([yielded.output.tokens], read)


def read(
    counts: StepCounts, num_new: np.ndarray, arrays: list[np.ndarray], failed: dict[int, str]
) -> Sampled:
    rows = counts.riders.rows_of("toy").tolist()
    return Sampled({row: arrays[0][row, : num_new[row]].tolist() for row in rows if num_new[row]})
