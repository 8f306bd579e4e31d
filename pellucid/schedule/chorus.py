"""Sequences that decode in step: planned and committed as one, for as long as none of them starts or ends.

A sequence in a chorus has one row of one token in every plan.  A step touches none of the sequences: the
chorus counts for all of them at once, and keeps what has landed as it came.  `settle` brings them up to date,
every so many landings and whenever somebody is to look at one.  Blocks are taken somewhat ahead and for many
sequences together, at plans that are known in advance.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Self

from pellucid.kv.manager import KVManager
from pellucid.schedule.plan import Growth, Row
from pellucid.schedule.sequence import Sequence
from pellucid.schedule.step import SchedulerOptions, Step
from pellucid.types import SeqUpdate

AHEAD = 16  # plans for which blocks are taken at once: a plan with new blocks costs a copy of its own


class Chorus:
    """What all its sequences have in common; the scheduler breaks it up before it changes any of them."""

    def __init__(self, seqs: list[Sequence], rows: list[Row], num_plans: int, most_unread: int) -> None:
        self.seqs, self.rows = seqs, rows
        self._most_unread = most_unread
        self._num_plans = num_plans  # before the first one ends
        self._are_quiet = all(seq.is_quiet for seq in seqs)
        self._stop_token_ids = frozenset(chain.from_iterable({seq.stop_token_ids for seq in seqs}))
        self._num_planned = 0
        self._num_settled = 0  # of these, counted in the sequences
        self._unread: list[list[int]] = []  # landings that the sequences do not know of: a token for each
        self._short: defaultdict[int, list[Sequence]] = defaultdict(list)  # who gets blocks, by plan
        for seq in seqs:
            self._short[self._due(seq)].append(seq)

    @classmethod
    def form(cls, seqs: list[Sequence], rows: list[Row], options: SchedulerOptions) -> Self | None:
        """A chorus of all these, which the last plan had in these rows; None if it would not last."""
        if any(seq.host_bound for seq in seqs):
            return None
        num_plans = min(seq.limit - 2 - seq.num_planned for seq in seqs)
        if num_plans < options.min_chorus:
            return None
        return cls(seqs.copy(), rows.copy(), num_plans, options.most_unread)

    def plan(self, step: Step, kv: KVManager) -> bool:
        """A row for each; False if there is no block for one, or one of them ends."""
        if self._num_planned == self._num_plans:
            return False
        for seq in self._short.pop(self._num_planned, ()):
            if not self._grow(seq, step, kv):
                return False
        step.rows, step.seqs = self.rows, self.seqs
        self._num_planned += 1
        return True

    def _grow(self, seq: Sequence, step: Step, kv: KVManager) -> bool:
        """Blocks for the next plans; False if there is none even for this one."""
        num_planned = self._planned(seq)
        for num_tokens in (min(num_planned + AHEAD, seq.limit), num_planned + 1):
            if kv.can_grow(seq.table, num_tokens):
                grown = kv.grow(seq.table, num_tokens)
                step.grown += [Growth(seq.slot, group, blocks) for group, blocks in grown]
                break
        if seq.table.capacity == num_planned:
            return False
        self._short[max(self._due(seq), self._num_planned + 1)].append(seq)
        return True

    @property
    def unsettled(self) -> tuple[int, int]:
        """How many plans and landings the sequences do not count yet."""
        return self._num_planned - self._num_settled, len(self._unread)

    def _planned(self, seq: Sequence) -> int:
        """Its `num_planned`, up to date."""
        return seq.num_planned + self.unsettled[0]

    def _due(self, seq: Sequence) -> int:
        """The plan at which it gets further blocks: of the last one without, and all that do so together."""
        last = self._num_planned + seq.table.capacity - self._planned(seq)
        return last - last % AHEAD

    def land(self, tokens: list[int], kv: KVManager) -> list[SeqUpdate] | None:
        """Take in a token for each; None if one of them may end a text."""
        if not self._stop_token_ids.isdisjoint(tokens):
            return None
        assert len(tokens) == len(self.seqs), f"{len(tokens)} tokens for {len(self.seqs)} sequences"
        self._unread.append(tokens)
        if len(self._unread) == self._most_unread:
            self.settle(kv)
        if self._are_quiet:
            return []
        return [seq.update([token]) for seq, token in zip(self.seqs, tokens, strict=True) if not seq.is_quiet]

    def settle(self, kv: KVManager) -> None:
        """Bring the sequences up to date, and publish the blocks that they have filled."""
        num_planned, num_landed = self.unsettled
        texts = zip(*self._unread, strict=True) if num_landed else ((),) * len(self.seqs)
        for seq, text in zip(self.seqs, texts, strict=True):
            seq.tokens += text
            seq.num_planned += num_planned
            seq.num_inflight += num_planned - num_landed
            seq.num_computed += num_landed
            if seq.num_computed >= seq.table.publish_at:  # law 8: blocks of sampled tokens at commit
                kv.publish(seq.table, seq.tokens, seq.num_computed)
        self._num_settled = self._num_planned
        self._unread = []
