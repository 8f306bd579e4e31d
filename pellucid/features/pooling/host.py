"""Who asks for hidden states, and how they get into the answer: as float32 bytes in `extras`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pellucid.features.base import HostFeature, RowKind
from pellucid.resolve import Resolved
from pellucid.schedule.news import News
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.sequence import Sequence
from pellucid.types import Request

NAME = "pooling"  # in a request's extra_args, and in its answer's extras
LAST, MEAN = "last", "mean"  # the last token's hidden state; the mean of all
MEAN_NAME = "mean_pooling"  # the feature's


@dataclass(frozen=True, slots=True)
class Vectors:
    """By row of the plan, float32 [D] as bytes."""

    rows: dict[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass(frozen=True, slots=True)
class Sums:
    """By row of the plan, the sum of some of its hidden states as such bytes, and of how many."""

    rows: dict[int, tuple[bytes, int]] = field(default_factory=dict[int, tuple[bytes, int]])


def wish_of(request: Request) -> object:
    """LAST, MEAN, or None for neither."""
    wish = (request.sampling.extra_args or {}).get(NAME)
    if wish not in (None, LAST, MEAN):
        raise ValueError(f"extra_args[{NAME!r}] is {wish!r}, must be {LAST!r} or {MEAN!r}")
    return wish


class Pooling(HostFeature):
    """Of the last token of a prompt, from the row that samples behind it."""

    rows = RowKind.SAMPLING
    is_watched = True

    def asks(self, request: Request) -> bool:
        return wish_of(request) == LAST

    def land(self, told: Vectors, news: News, scheduler: Scheduler) -> None:
        for index, vector in told.rows.items():
            if landed := news.landed.get(index):
                landed.update.extras = {NAME: vector}


class MeanPooling(HostFeature):
    """Of all tokens of a prompt, chunk by chunk; so none of them is hit in the prefix cache."""

    rows = RowKind.PROMPT
    is_watched = True

    def __init__(self, resolved: Resolved) -> None:
        self._sums: dict[str, NDArray[np.float32]] = {}  # by request, of what has come home

    def asks(self, request: Request) -> bool:
        sampling = request.sampling
        if wish_of(request) != MEAN:
            return False
        if sampling.prompt_logprobs is not None or sampling.max_tokens != 1:
            raise ValueError(f"extra_args[{NAME!r}] is {MEAN!r}: set max_tokens=1, and no prompt_logprobs")
        return True

    def enter(self, seq: Sequence) -> None:
        seq.scored_end = seq.prompt_len - 1

    def land(self, told: Sums, news: News, scheduler: Scheduler) -> None:
        for index, (part, num) in told.rows.items():
            if not (landed := news.landed.get(index)):
                continue
            name, vector = landed.seq.request.id, np.frombuffer(part, dtype=np.float32)
            so_far = self._sums.get(name)
            self._sums[name] = vector if so_far is None else so_far + vector
            landed.seq.num_scored += num
            if landed.num_new:
                mean = self._sums.pop(name) / np.float32(landed.seq.prompt_len)
                landed.update.extras = {NAME: mean.tobytes()}

    def leave(self, request_id: str) -> None:
        self._sums.pop(request_id, None)
