"""Who asks for a hidden state, and how it gets into the answer: as float32 bytes in `extras`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pellucid.features.base import HostFeature, RowKind
from pellucid.schedule.news import News
from pellucid.schedule.scheduler import Scheduler
from pellucid.types import Request

NAME = "pooling"  # in a request's extra_args, and in its answer's extras
LAST = "last"  # the last token's


@dataclass(frozen=True, slots=True)
class Vectors:
    """By row of the plan, float32 [D] as bytes."""

    rows: dict[int, bytes] = field(default_factory=dict[int, bytes])


class Pooling(HostFeature):
    """Of the last token of a prompt, from the row that samples behind it."""

    rows = RowKind.SAMPLING
    is_watched = True

    def asks(self, request: Request) -> bool:
        wish = (request.sampling.extra_args or {}).get(NAME)
        if wish not in (None, LAST):
            raise ValueError(f"extra_args[{NAME!r}] is {wish!r}, must be {LAST!r}")
        return wish is not None

    def land(self, told: Vectors, news: News, scheduler: Scheduler) -> None:
        for index, vector in told.rows.items():
            if landed := news.landed.get(index):
                landed.update.extras = {NAME: vector}
