"""Sequences that decode in step: planned and committed as one, for as long as none of them starts or ends.

A sequence in a chorus has one row of one token in every plan.  Its counts are those from when it joined, and
what the chorus has counted since, for all of them at once; `settle` makes them exact.  A sequence is seen
by itself only when it needs a block or has filled one, and these moments are known in advance.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Self

from pellucid.kv.manager import NEVER, KVManager
from pellucid.schedule.plan import Growth, Row
from pellucid.schedule.sequence import Sequence
from pellucid.schedule.step import Step
from pellucid.types import SeqUpdate

Calendar = defaultdict[int, list[Sequence]]


class Chorus:
    """What all its sequences have in common; the scheduler breaks it up before it changes any of them."""

    def __init__(self, seqs: list[Sequence], rows: list[Row], num_plans: int) -> None:
        self.seqs, self.rows = seqs, rows
        self._num_plans = num_plans  # before the first one ends
        self._texts = [seq.tokens for seq in seqs]
        self._are_quiet = all(seq.is_quiet for seq in seqs)
        self._stop_token_ids = frozenset(chain.from_iterable({seq.stop_token_ids for seq in seqs}))
        self._num_planned = self._num_landed = 0
        self._settled_planned = self._settled_landed = 0  # of these, counted in the sequences
        self._short: Calendar = defaultdict(list)  # who needs a block, by number of the plan
        self._full: Calendar = defaultdict(list)  # who has filled one, by number of the landing
        for seq in seqs:
            self._short[seq.table.capacity - seq.num_planned].append(seq)
            if seq.table.publish_at < NEVER:
                self._full[seq.table.publish_at - seq.num_planned].append(seq)

    @classmethod
    def form(cls, seqs: list[Sequence], rows: list[Row], shortest: int) -> Self | None:
        """A chorus of all these, which the last plan had in these rows; None if it would not last."""
        if any(seq.host_bound for seq in seqs):
            return None
        num_plans = min(seq.limit - 2 - seq.num_planned for seq in seqs)
        return cls(seqs.copy(), rows.copy(), num_plans) if num_plans >= shortest else None

    def plan(self, step: Step, kv: KVManager) -> bool:
        """A row for each; False if there is no block for one, or one of them ends."""
        if self._num_planned == self._num_plans:
            return False
        for seq in self._short.pop(self._num_planned, ()):
            old = seq.table.capacity
            if not kv.can_grow(seq.table, old + 1):
                return False
            step.grown += [Growth(seq.slot, group, blocks) for group, blocks in kv.grow(seq.table, old + 1)]
            self._short[self._num_planned + seq.table.capacity - old].append(seq)
        step.rows, step.seqs = self.rows, self.seqs
        self._num_planned += 1
        return True

    def land(self, tokens: list[list[int]], kv: KVManager) -> list[SeqUpdate] | None:
        """Take in a token for each; None if one of them may end a text."""
        if not self._stop_token_ids.isdisjoint(chain.from_iterable(tokens)):
            return None
        for text, new in zip(self._texts, tokens, strict=True):
            text += new
        self._num_landed += 1
        for seq in self._full.pop(self._num_landed, ()):
            num_computed = seq.num_computed + self._num_landed - self._settled_landed
            if num_computed >= seq.table.publish_at:  # law 8: blocks of sampled tokens at commit
                kv.publish(seq.table, seq.tokens, num_computed)
            self._full[self._num_landed + seq.table.publish_at - num_computed].append(seq)
        if self._are_quiet:
            return []
        return [seq.update(new) for seq, new in zip(self.seqs, tokens, strict=True) if not seq.is_quiet]

    def settle(self) -> None:
        """Make the sequences' own counts exact."""
        planned = self._num_planned - self._settled_planned
        landed = self._num_landed - self._settled_landed
        for seq in self.seqs:
            seq.num_planned += planned
            seq.num_inflight += planned - landed
            seq.num_computed += landed
        self._settled_planned, self._settled_landed = self._num_planned, self._num_landed
