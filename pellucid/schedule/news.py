"""What a commit has changed, for whoever waits for it: objects for the few, arrays for the many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.schedule.sequence import Sequence
from pellucid.types import SeqUpdate


class Landed(NamedTuple):
    """A row that was looked at when it came home."""

    seq: Sequence
    update: SeqUpdate
    num_new: int  # of the row's new tokens, those that count: none behind a stop


@dataclass(frozen=True, slots=True)
class Going:
    """Requests of which there is nothing to tell but new tokens; of hundreds at once."""

    request_ids: NDArray[np.object_] = field(default_factory=lambda: np.empty(0, object))  # [B]
    num_new: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # [B]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))  # [B, w]

    def __len__(self) -> int:
        return len(self.request_ids)

    def one_by_one(self) -> list[SeqUpdate]:
        """An update a request."""
        if not len(self):
            return []
        names, tokens = self.request_ids.tolist(), self.tokens.tolist()
        if np.count_nonzero(self.num_new < self.tokens.shape[1]):
            tokens = [row[:num_new] for row, num_new in zip(tokens, self.num_new.tolist(), strict=True)]
            names = [name for name, row in zip(names, tokens, strict=True) if row]
            tokens = [row for row in tokens if row]
        return [*map(SeqUpdate, names, tokens)]


NOBODY_GOES_ON = Going()


@dataclass(frozen=True, slots=True)
class News:
    """What a plan has changed."""

    landed: dict[int, Landed] = field(default_factory=dict[int, Landed])  # by index in the plan
    going: Going = NOBODY_GOES_ON
    # Of which a worker has said what is wrong.
    failed: list[SeqUpdate] = field(default_factory=list[SeqUpdate])

    @property
    def updates(self) -> list[SeqUpdate]:
        """Of requests that begin, end, or have more to tell than tokens; once features have added to them."""
        landed = [each.update for each in self.landed.values() if each.update.says_anything]
        return [*self.failed, *landed]

    def one_by_one(self) -> list[SeqUpdate]:
        """An update a request."""
        return [*self.updates, *self.going.one_by_one()]


NO_NEWS = News()
