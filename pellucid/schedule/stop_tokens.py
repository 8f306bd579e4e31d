"""The tokens that may end a text of those that run.  Most steps yield none of them."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pellucid.schedule.plan import NOBODY, Column

FEW = 4  # distinct stop tokens that are looked for one by one


class StopTokens:
    """Those of all sequences in slots."""

    def __init__(self) -> None:
        self._counts: dict[frozenset[int], int] = {}  # slots, by what ends their texts
        self._ids: Column = NOBODY  # all of them, ascending

    def add(self, stops: frozenset[int]) -> None:
        if stops:
            self._counts[stops] = self._counts.get(stops, 0) + 1
            if self._counts[stops] == 1:
                self._note()

    def remove(self, stops: frozenset[int]) -> None:
        if stops:
            self._counts[stops] -= 1
            if not self._counts[stops]:
                del self._counts[stops]
                self._note()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def are_in(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which rows of tokens [B, w] have one; what is nobody's token may count as one."""
        if len(self._ids) > FEW:
            nearest = self._ids.take(np.searchsorted(self._ids, tokens), mode="clip")
            return np.any(nearest == tokens, axis=1)
        found = np.zeros(len(tokens), dtype=bool)
        for stop in self._ids.tolist():
            for column in tokens.T:
                found |= column == stop
        return found

    def _note(self) -> None:
        self._ids = np.array(sorted(set(chain.from_iterable(self._counts))), dtype=np.int64)
