"""What a commit has changed, for whoever waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pellucid.types import SeqUpdate


@dataclass(frozen=True, slots=True)
class News:
    """Updates of requests that begin, end, or have more to tell; of those that merely go on, their tokens."""

    updates: list[SeqUpdate]
    request_ids: NDArray[np.object_] = field(default_factory=lambda: np.empty(0, object))  # [B], that go on
    num_new: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # [B]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))  # [B, w]

    def one_by_one(self) -> list[SeqUpdate]:
        """An update a request."""
        if not len(self.request_ids):
            return self.updates
        names, tokens = self.request_ids.tolist(), self.tokens.tolist()
        if np.count_nonzero(self.num_new < self.tokens.shape[1]):
            tokens = [row[:num_new] for row, num_new in zip(tokens, self.num_new.tolist(), strict=True)]
            names = [name for name, row in zip(names, tokens, strict=True) if row]
            tokens = [row for row in tokens if row]
        return [*self.updates, *map(SeqUpdate, names, tokens)]


NO_NEWS = News([])
