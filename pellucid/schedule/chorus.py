"""Sequences that decode in step: planned and committed as one, for as long as none of them starts or ends.

A sequence in a chorus has one row of one token in every plan.  The chorus counts for all of them at once and
keeps what has landed as it came, so a step touches few of the sequences: those whose turn it is to read what
has landed for them, and at plans known in advance those that need blocks.  `settle` brings all up to date.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import chain, islice
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
        self._num_planned = self._num_landed = 0
        self._settled_planned = self._settled_landed = 0  # of these, counted in the sequences
        self._landings: deque[list[int]] = deque(maxlen=most_unread)  # the last ones: a token for each
        self._num_read = [0] * len(seqs)  # landings that each one's tokens hold
        self._short: defaultdict[int, list[Sequence]] = defaultdict(list)  # who gets blocks, by plan
        for seq in seqs:
            self._enter(seq)

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
        short = self._short.pop(self._num_planned, ())
        # Nobody is to be preempted for blocks that are not needed yet.
        ahead = AHEAD if short and min(pool.num_free for pool in kv.pools) >= len(self.seqs) else 1
        for seq in short:
            if not (self._grow(seq, ahead, step, kv) or self._grow(seq, 1, step, kv)):
                return False
            self._enter(seq)
        step.rows, step.seqs = self.rows, self.seqs
        self._num_planned += 1
        return True

    def _grow(self, seq: Sequence, ahead: int, step: Step, kv: KVManager) -> bool:
        """Blocks for so many plans from this one on; False if there are none."""
        num_tokens = min(self._planned(seq) + ahead, seq.limit)
        if not kv.can_grow(seq.table, num_tokens):
            return False
        step.grown += [Growth(seq.slot, group, blocks) for group, blocks in kv.grow(seq.table, num_tokens)]
        return True

    def _planned(self, seq: Sequence) -> int:
        """Its `num_planned`, up to date."""
        return seq.num_planned + self._num_planned - self._settled_planned

    def _enter(self, seq: Sequence) -> None:
        """Note at which plan it gets further blocks: with others, a little before it has none left."""
        if seq.table.capacity < seq.limit:
            last = self._num_planned + seq.table.capacity - self._planned(seq)
            together = last - last % AHEAD
            self._short[together if together > self._num_planned else last].append(seq)

    def land(self, tokens: list[int], kv: KVManager) -> list[SeqUpdate] | None:
        """Take in a token for each; None if one of them may end a text."""
        if not self._stop_token_ids.isdisjoint(tokens):
            return None
        assert len(tokens) == len(self.seqs), f"{len(tokens)} tokens for {len(self.seqs)} sequences"
        self._landings.append(tokens)
        self._num_landed += 1
        # By turns, so that no step has much to do.
        for index in range(self._num_landed % self._most_unread, len(tokens), self._most_unread):
            self._read(index, kv)
        if self._are_quiet:
            return []
        return [seq.update([token]) for seq, token in zip(self.seqs, tokens, strict=True) if not seq.is_quiet]

    def _read(self, index: int, kv: KVManager | None) -> None:
        """Give a sequence the tokens that have landed for it, and publish the blocks that it has filled."""
        seq, num_unread = self.seqs[index], self._num_landed - self._num_read[index]
        self._num_read[index] = self._num_landed
        seq.tokens += [tokens[index] for tokens in islice(reversed(self._landings), num_unread)][::-1]
        num_computed = seq.num_computed + self._num_landed - self._settled_landed
        if kv is not None and num_computed >= seq.table.publish_at:  # law 8: sampled tokens' at commit
            kv.publish(seq.table, seq.tokens, num_computed)

    @property
    def unsettled(self) -> tuple[int, int]:
        """How many plans and landings the sequences do not count yet."""
        return self._num_planned - self._settled_planned, self._num_landed - self._settled_landed

    def settle(self, kv: KVManager | None) -> None:
        """Bring the sequences up to date.  kv: where they publish blocks; None: nowhere."""
        for index in range(len(self.seqs)):
            self._read(index, kv)
        num_planned, num_landed = self.unsettled
        self._settled_planned, self._settled_landed = self._num_planned, self._num_landed
        for seq in self.seqs:
            seq.num_planned += num_planned
            seq.num_inflight += num_planned - num_landed
            seq.num_computed += num_landed
