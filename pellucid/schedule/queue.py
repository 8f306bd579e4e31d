"""Sequences in the order of age: those that wait, and those whose prompts are computed.

Knows nothing of blocks or slots.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from pellucid.schedule.sequence import Key, Sequence


def _key(seq: Sequence) -> Key:
    return seq.key


class AgeQueue:
    """Oldest first by (priority, arrival, id); a sequence that returns takes its old place."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        """Over a copy, so that the loop's body may add and remove."""
        return iter(self._seqs.copy())

    @property
    def oldest(self) -> Sequence:
        return self._seqs[0]

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._seqs, seq, key=_key)

    def remove(self, seq: Sequence) -> None:
        index = bisect.bisect_left(self._seqs, seq.key, key=_key)
        assert self._seqs[index] is seq, f"sequence {seq.id} is not in the queue"
        del self._seqs[index]
