"""The sequences in slots, as columns: one number a slot and column, so that a step counts for all at once.

Hundreds of sequences decode in every step, and next to nothing happens to each: its counts go up.  Columns do
that in a few calls of numpy; Python looks at single sequences only where a column says that one is due.

Counts have a time dimension.  `computed` is exact at the last commit, `planned` the most that may be computed
once all rows in flight have come home.  So planned - computed tokens are in flight; drafts among them may not
stand, and then the next row begins as many places before `planned`: `first_queries`.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
from numpy.typing import NDArray

from pellucid.kv.sparse import sparse_memory
from pellucid.schedule.plan import STREAMED, Column
from pellucid.schedule.sequence import Sequence

NEVER = sys.maxsize
ITEM = 4  # bytes of a token's id
LONG_STAY = 1 << 20  # bytes of tokens whose memory is given back at once


class Table:
    """A number for each slot, and for a spare one, which takes what is nobody's.  Counts are tokens."""

    def __init__(self, num_slots: int, max_len: int, most_new: int, watched: int = 0) -> None:
        """max_len: tokens of a sequence.  most_new: of a row, w.  watched: whose rows are all looked at."""
        self.spare, self.watched = num_slots, watched

        def column() -> Column:
            return np.zeros(num_slots + 1, dtype=np.int64)

        self.planned, self.computed = column(), column()
        self.known = column()  # at entry: computed in chunks, the last of which samples
        self.limit = column()  # most tokens, prompt included; 0: nobody is there
        self.ready_at = column()  # first plan that may carry the next row; NEVER while it is held back
        self.ready_at[:] = NEVER
        # Planned beyond it, a decode or its drafts may need a block, or rows in flight may finish its text.
        self.due = column()
        # Computed from here on, a row that lands is looked at: it begins or ends a text, or brings more.
        self.end = column()
        self.drafts = column()  # that the next row may verify: of those in its slot on the device, if not all
        self.drafted = column()  # drafts in rows that have been planned
        # Of rows that have come home: those with drafts, their drafts, and of these those that stood.
        self.verified = np.zeros((3, num_slots + 1), dtype=np.int64)
        self.want = column()  # drafts behind the next row: spec/wants.py
        self.epoch = column()  # of the stay in the slot; a row with an older one is stale
        self.ids = column()  # of sequences
        self.asked = column()  # bits: plan.py
        # Is each token reported when it has landed?  Else only the first ones and, at the end, all others.
        self.is_reported: NDArray[np.bool_] = np.zeros(num_slots + 1, dtype=bool)
        self.names: NDArray[np.object_] = np.empty(num_slots + 1, dtype=object)  # of requests
        self.seqs: list[Sequence | None] = [None] * num_slots
        # The tokens of each, as far as they have landed: what the device has, too.
        self.width = max_len + most_new
        self._memory = sparse_memory((num_slots + 1) * self.width * ITEM)
        flat = np.frombuffer(self._memory, dtype=np.int32)[: (num_slots + 1) * self.width]
        self.token_ids: NDArray[np.int32] = flat.reshape(num_slots + 1, self.width)
        self._runs: dict[int, NDArray[np.void]] = {}

    def enter(self, slot: int, seq: Sequence, num_cached: int, plan_id: int) -> None:
        """A stay begins, with the KV of `num_cached` tokens already there."""
        num_known = len(seq.tokens)
        self.seqs[slot], self.names[slot], self.ids[slot] = seq, seq.request.id, seq.id
        self.token_ids[slot, :num_known] = seq.tokens
        self.planned[slot] = self.computed[slot] = num_cached
        self.known[slot] = num_known
        self.asked[slot] = asked = STREAMED * seq.request.is_streamed | seq.asked
        self.end[slot] = 0 if asked & self.watched else num_known
        self.limit[slot], self.ready_at[slot], self.drafts[slot] = seq.limit, plan_id, 0
        self.drafted[slot] = self.verified[:, slot] = 0
        self.is_reported[slot] = not seq.request.is_quiet

    def leave(self, slot: int) -> None:
        """It ends: rows in flight are stale from now on, and no plan may carry another."""
        self._give_back(slot * self.width * ITEM, (slot * self.width + len(self.tokens(slot))) * ITEM)
        self.seqs[slot], self.names[slot] = None, None
        self.epoch[slot] += 1
        self.limit[slot], self.ready_at[slot] = 0, NEVER

    def _give_back(self, start: int, end: int) -> None:
        """Let go of the memory of many tokens; start, end: bytes."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last - first >= LONG_STAY and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def occupants(self, slots: Column) -> list[Sequence]:
        """Who is in these slots."""
        indices: list[int] = slots.tolist()
        return [seq for slot in indices if (seq := self.seqs[slot]) is not None]

    def in_use(self, slots: Column) -> Column:
        """Those of these slots that somebody is in."""
        return slots[self.limit[slots] > 0]

    def is_watched(self, slot: int) -> bool:
        """Do its rows bring more than tokens?"""
        return bool(self.asked[slot] & self.watched)

    def is_decoding(self, slot: int) -> bool:
        """Has every known token been planned, so that the next row samples?"""
        return bool(self.planned[slot] >= self.known[slot])

    def tokens(self, slot: int) -> NDArray[np.int32]:
        """Those that have landed, the prompt included; a view."""
        computed, known = self.computed[slot], self.known[slot]
        return self.token_ids[slot, : known if computed < known else computed + 1]

    def first_queries(self, slots: Column) -> Column:
        """The least position that a row of each slot may compute if it is planned from now on."""
        return (self.planned - self.drafted + self.verified[1])[slots]

    def land(self, slots: Column, starts: Column, tokens: NDArray[np.int32]) -> None:
        """Write a row of tokens [B, w] at its place for each; what is nobody's is written over later."""
        width = tokens.shape[1]
        runs = self._runs.get(width)
        if runs is None:
            # Every `width` neighbours as one item, overlapping: one store a row instead of one a token.
            last = self.token_ids.size - width + 1
            runs = np.ndarray(last, f"V{4 * width}", self.token_ids, strides=(4,))
            self._runs[width] = runs
        runs[slots * self.width + starts] = tokens.view(runs.dtype)[:, 0]
