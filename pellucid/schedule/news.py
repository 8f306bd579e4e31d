"""What a commit has changed, for whoever waits for it."""

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
class News:
    """Updates of requests that begin, end, or have more to tell; of those that merely go on, their tokens."""

    landed: dict[int, Landed] = field(default_factory=dict[int, Landed])  # by index in the plan
    request_ids: NDArray[np.object_] = field(default_factory=lambda: np.empty(0, object))  # [B], that go on
    num_new: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # [B]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))  # [B, w]

    def one_by_one(self) -> list[SeqUpdate]:
        """An update a request."""
        updates = [each.update for each in self.landed.values() if each.update.says_anything]
        if not len(self.request_ids):
            return updates
        names, tokens = self.request_ids.tolist(), self.tokens.tolist()
        if np.count_nonzero(self.num_new < self.tokens.shape[1]):
            tokens = [row[:num_new] for row, num_new in zip(tokens, self.num_new.tolist(), strict=True)]
            names = [name for name, row in zip(names, tokens, strict=True) if row]
            tokens = [row for row in tokens if row]
        return [*updates, *map(SeqUpdate, names, tokens)]


NO_NEWS = News()
