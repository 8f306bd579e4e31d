"""Sequences that decode in step: planned and committed as one, for as long as none of them starts or ends.

A sequence in a chorus has one row of one token in every plan.  The chorus counts for all of them at once and
keeps what has landed as it came, so a step touches few of the sequences: those whose turn it is to read what
has landed for them, and at plans known in advance those that need blocks.  `settle` brings all up to date.
Whatever a step touches has left the processor's caches while the device was at work, so it is to be little:
what lands becomes objects only when it is read, and neighbours, who share cache lines, read at one turn.
"""

from __future__ import annotations

from itertools import chain
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pellucid.kv.manager import KVManager
from pellucid.schedule.plan import Ints, Row
from pellucid.schedule.sequence import NEVER, Sequence
from pellucid.schedule.step import SchedulerOptions, Step
from pellucid.types import SeqUpdate

NEIGHBOURS = 16  # sequences that read at one turn, at least
AHEAD = 16  # plans for which blocks are taken at once: a plan with new blocks costs a copy of its own


class Chorus:
    """What all its sequences have in common; the scheduler breaks it up before it changes any of them."""

    def __init__(self, seqs: list[Sequence], rows: list[Row], num_plans: int, most_unread: int) -> None:
        self.seqs, self.rows = seqs, rows
        self._most_unread = most_unread
        self._num_plans = num_plans  # before the first one ends
        self._are_quiet = all(seq.is_quiet for seq in seqs)
        stop_token_ids = set(chain.from_iterable({seq.stop_token_ids for seq in seqs}))
        self._stop_token_ids = np.array([[token] for token in stop_token_ids], dtype=np.intc)  # [S, 1]
        self._num_planned = self._num_landed = 0
        self._settled_planned = self._settled_landed = 0  # of these, counted in the sequences
        # A ring of the last landings, each a token for all.  Once a round it is each one's turn to read.
        self._landings = np.empty((most_unread, len(seqs)), dtype=np.intc)
        self._num_per_turn = max(NEIGHBOURS, -(-len(seqs) // most_unread))
        num_turns = -(-len(seqs) // self._num_per_turn)
        self._turn_every = most_unread // num_turns  # landings
        self._num_read = [0] * num_turns  # landings that the tokens of those of each turn hold
        self._starts = np.array([seq.num_planned for seq in seqs])  # before the first plan
        self._limits = np.array([seq.limit for seq in seqs])
        self._short_at = np.zeros_like(self._starts)  # the plan at which each gets blocks
        self._next_short = 0  # the first of these
        self._note_short(np.arange(len(seqs)), seqs)

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
        if self._num_planned == self._next_short and not self._grow(step, kv):
            return False
        step.rows, step.seqs = self.rows, self.seqs
        self._num_planned += 1
        return True

    def _grow(self, step: Step, kv: KVManager) -> bool:
        """Blocks for all whose plan this is; False if there are too few."""
        short = np.flatnonzero(self._short_at == self._num_planned)
        seqs = [self.seqs[i] for i in short.tolist()]
        tables = [seq.table for seq in seqs]
        # Nobody is to be preempted for blocks that are not needed yet.
        ahead = AHEAD if min(pool.num_free for pool in kv.pools) >= len(self.seqs) else 1
        for num_plans in (ahead, 1):
            end = self._num_planned + num_plans
            num_tokens = np.minimum(self._starts[short] + end, self._limits[short]).tolist()
            if (grown := kv.grow(tables, num_tokens)) is not None:
                step.grow(seqs, grown)
                self._note_short(short, seqs)
                return True
        return False

    def _note_short(self, indices: NDArray[np.intp], seqs: list[Sequence]) -> None:
        """Note at which plan these get further blocks: with others, a little before they have none left."""
        capacity = np.array([seq.table.capacity for seq in seqs])
        last = capacity - self._starts[indices]
        together = last - last % AHEAD
        at = np.where(together > self._num_planned, together, last)
        self._short_at[indices] = np.where(capacity < self._limits[indices], at, NEVER)
        self._next_short = int(self._short_at.min())

    def land(self, tokens: Ints, kv: KVManager) -> list[SeqUpdate] | None:
        """Take in a token for each; None if one of them may end a text."""
        landing = np.frombuffer(tokens, dtype=np.intc)
        if len(self._stop_token_ids) and (landing == self._stop_token_ids).any():
            return None
        assert len(tokens) == len(self.seqs), f"{len(tokens)} tokens for {len(self.seqs)} sequences"
        self._landings[self._num_landed % self._most_unread] = landing
        self._num_landed += 1
        turn, rest = divmod(self._num_landed % self._most_unread, self._turn_every)
        if not rest and turn < len(self._num_read):  # by turns, so that no step has much to do
            self._read(turn, kv)
        if self._are_quiet:
            return []
        news = zip(self.seqs, tokens, strict=True)
        return [seq.update([token]) for seq, token in news if not seq.is_quiet]

    def _read(self, turn: int, kv: KVManager | None) -> None:
        """Give those of a turn the tokens that have landed for them, and publish the blocks thus filled."""
        first = turn * self._num_per_turn
        seqs = self.seqs[first : first + self._num_per_turn]
        unread = np.arange(self._num_read[turn], self._num_landed)
        self._num_read[turn] = self._num_landed
        columns = self._landings[:, first : first + len(seqs)].take(unread, axis=0, mode="wrap").T
        for seq, tokens in zip(seqs, columns, strict=True):
            seq.tokens.frombytes(tokens.tobytes())
        if kv is None:
            return
        num_new = self._num_landed - self._settled_landed
        for seq in seqs:
            num_computed = seq.num_computed + num_new
            if num_computed >= seq.table.publish_at:  # law 8: sampled tokens' at commit
                kv.publish(seq.table, seq.tokens, num_computed)

    @property
    def unsettled(self) -> tuple[int, int]:
        """How many plans and landings the sequences do not count yet."""
        return self._num_planned - self._settled_planned, self._num_landed - self._settled_landed

    def settle(self, kv: KVManager | None) -> None:
        """Bring the sequences up to date.  kv: where they publish blocks; None: nowhere."""
        for turn in range(len(self._num_read)):
            self._read(turn, kv)
        num_planned, num_landed = self.unsettled
        self._settled_planned, self._settled_landed = self._num_planned, self._num_landed
        for seq in self.seqs:
            seq.num_planned += num_planned
            seq.num_inflight += num_planned - num_landed
            seq.num_computed += num_landed
