"""Sequences in the order of age: those that wait, those that run, those whose prompts are computed.

Knows nothing of blocks or slots.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from pellucid.schedule.sequence import Key, Sequence

FEW = 64  # gone sequences that may stay in the list, however short it is


def _key(seq: Sequence) -> Key:
    return seq.key


class AgeQueue:
    """Oldest first by (priority, arrival, id); a sequence that returns takes its old place.

    To remove one takes constant time on average, from whatever place: it is only noted as gone, and the list
    is cleaned when half of it is.
    """

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []  # in order, those that are gone included
        self._here: dict[int, Sequence] = {}  # the others, by id
        self._first = 0  # all before this index are gone

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[Sequence]:
        """Over a list of the moment, so that the loop's body may add and remove."""
        return iter(self.first(len(self)))

    def __reversed__(self) -> Iterator[Sequence]:
        """The youngest first; meanwhile nobody may come or go."""
        return (seq for seq in reversed(self._seqs) if seq.id in self._here)

    @property
    def oldest(self) -> Sequence:
        return self._seqs[self._first]

    def first(self, most: int) -> list[Sequence]:
        """The oldest, at most so many."""
        found: list[Sequence] = []
        for index in range(self._first, len(self._seqs)):
            if len(found) == most:
                break
            if self._seqs[index].id in self._here:
                found.append(self._seqs[index])
        return found

    def add(self, seq: Sequence) -> None:
        seqs, index = self._seqs, len(self._seqs)
        if seqs and seq.key <= seqs[-1].key:  # most come in their order
            index = bisect.bisect_left(seqs, seq.key, key=_key)
        if index == len(seqs) or seqs[index] is not seq:
            seqs.insert(index, seq)
        self._here[seq.id] = seq
        self._first = min(self._first, index)

    def remove(self, seq: Sequence) -> None:
        here = self._here
        assert here.get(seq.id) is seq, f"sequence {seq.id} is not in the queue"
        del here[seq.id]
        if not here or len(self._seqs) > 2 * len(here) + FEW:
            self._seqs, self._first = [other for other in self._seqs if other.id in here], 0
        while self._seqs and self._seqs[-1].id not in here:
            self._seqs.pop()
        while self._first < len(self._seqs) and self._seqs[self._first].id not in here:
            self._first += 1
