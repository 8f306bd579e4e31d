"""A plan in the making, and the limits that it keeps.  Becomes a StepPlan when nothing more is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pellucid.kv.manager import NewPages
from pellucid.schedule.plan import (
    FEATURE_BITS,
    NOBODY,
    NOTHING,
    Admission,
    Column,
    Growth,
    Row,
    Rows,
    StepPlan,
    ints,
)
from pellucid.spec.drafter import UNTIMED, Drafter, Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """The limits of a step and of a request."""

    max_model_len: int  # tokens of a request, answer included
    num_slots: int  # sequences on the device at once
    max_num_batched_tokens: int  # of a step, drafts included
    pp: int = 1  # pipeline stages: what plan t samples is there for plan t + pp
    num_spec: int = 0  # most drafts a row may carry
    tree_depth: int = 0  # of the deepest of them, if they are trees
    num_extra: int = 0  # places beyond those of the drafts behind a row, written to make them
    policy: str = "fcfs"  # or "priority": lower first
    watermark: float = 0.01  # share of the pages that an admission leaves free while others run
    # So many tokens take a step as long again as none would; 0: every row always wants num_spec drafts.
    cheap_tokens: int = 0
    drafter: Drafter = Drafter.STATELESS
    timings: Timings = UNTIMED

    @property
    def max_len(self) -> int:
        """Most tokens with KV of a request, drafts included."""
        return self.max_model_len + self.num_spec

    @property
    def max_chunk(self) -> int:
        """Most places of a row, and of the drafts behind it."""
        return self.max_num_batched_tokens + self.num_behind

    @property
    def num_behind(self) -> int:
        """Most places of the drafts behind a row."""
        return self.num_spec + self.num_extra

    @property
    def reach(self) -> int:
        """Most places that a decode writes behind its token: of drafts to verify, and of those made next."""
        return self.num_spec + self.num_behind

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 2:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least 2: "
                "each step keeps room for an answer's token and for a prompt's"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy is {self.policy!r}, must be 'fcfs' or 'priority'")


A_DECODE = np.array([[1], [0], [1]])  # query, drafts, logits


class Flight(NamedTuple):
    """A plan that has not come home: its rows, and whose they were when it was made, [B] each."""

    plan_id: int
    rows: Rows
    epochs: Column
    ids: Column  # of sequences


class Step:
    """What has been planned so far.  Decodes are a column of slots, chunks are added one by one."""

    def __init__(self, id: int, max_tokens: int) -> None:
        self.id, self.max_tokens = id, max_tokens
        self.num_propose = 0  # drafts made behind each row that samples
        self.decodes = NOBODY  # slots
        self.draft: Column | None = None  # of each decode, the drafts that it verifies; None: there are none
        self.chunks: list[Row] = []
        self.joining: list[int] = []  # slots whose last chunk this is: they decode from the next step on
        self.num_chunked = self.num_drafts = 0  # tokens
        self.admitted: list[Admission] = []
        self.asked = 0  # bits of what its rows ask for
        self._grown: list[NewPages] = []
        self._taken_back: dict[int, int] = {}  # of the growths, by slot: so many first ones are void
        self.has_preempted = False
        self.is_short = False  # may a decode, with its drafts, lack a block?

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens planned, drafts included."""
        return len(self.decodes) + self.num_drafts + self.num_chunked

    @property
    def budget(self) -> int:
        """Tokens left."""
        return self.max_tokens - self.num_tokens

    def add_chunk(self, row: Row) -> None:
        self.chunks.append(row)
        self.num_chunked += row.num_query

    def add_drafts(self, draft: Column) -> None:
        """Have each decode verify so many drafts."""
        self.draft, self.num_drafts = draft, int(draft.sum())

    def grow(self, new: NewPages) -> None:
        """Note what slots got."""
        self._grown.append(new)

    def take_back_decode(self, slot: int) -> bool:
        """Remove a slot's decode and the blocks that it got for it, if it has one."""
        self._taken_back[slot] = len(self._grown)
        kept = self.decodes[self.decodes != slot]
        assert self.draft is None, "drafts are dealt when nobody is preempted any more"
        is_there, self.decodes = len(kept) < len(self.decodes), kept
        return is_there

    def has_chunk(self, slot: int) -> bool:
        return any(row.slot == slot for row in self.chunks)

    def rows(self) -> Rows:
        """All rows; of a step that only decodes the same column as of the step before."""
        decodes, draft = self.decodes, self.draft
        if not self.chunks:
            if draft is None:
                return Rows(slots=decodes)
            return Rows(slots=decodes, num_query=1 + draft, num_draft=draft)
        num = len(decodes)
        columns = np.empty((4, num + len(self.chunks)), dtype=np.int64)
        columns[0, :num], columns[1:, :num], columns[:, num:] = decodes, A_DECODE, np.array(self.chunks).T
        slots, num_query, num_draft, num_logits = columns
        if draft is None:
            return Rows(slots=slots, num_query=num_query, num_logits=num_logits)
        num_draft[:num] = draft
        num_query[:num] += draft
        num_logits[:num] += draft
        return Rows(slots=slots, num_query=num_query, num_draft=num_draft, num_logits=num_logits)

    def _grown_once(self) -> Growth:
        """All growths in one, a slot's blocks side by side: a row may have grown again for its drafts."""
        if not self._grown:
            return NOTHING
        slots, pages = self._grown[0]
        if len(self._grown) > 1 or self._taken_back:
            slots = np.concatenate([new.slots for new in self._grown])
            order = np.argsort(slots, kind="stable")  # a slot's blocks stay in their order
            if self._taken_back:
                places = np.repeat(np.arange(len(self._grown)), [len(new.slots) for new in self._grown])
                for slot, first in self._taken_back.items():
                    order = order[(slots[order] != slot) | (places[order] >= first)]
            slots, pages = slots[order], np.concatenate([new.pages for new in self._grown])[order]
        return Growth(ints(slots.astype(np.int32).tobytes()), ints(pages.tobytes()))

    def to_plan(
        self, rows: Rows, committed: int, retired: list[int], ride: dict[str, object], *, is_open: bool
    ) -> StepPlan:
        return StepPlan(
            id=self.id,
            committed=committed,
            num_propose=self.num_propose,
            rows=rows,
            num_tokens=self.num_tokens,
            admitted=self.admitted,
            grown=self._grown_once(),
            retired=retired,
            asked=self.asked & FEATURE_BITS,
            ride=ride,
            is_open=is_open,
        )


def deal(wanted: Column, left: int) -> Column:
    """Share `left` drafts among rows that want so many each: in rounds, in each one more for who wants it."""
    if int(wanted.sum()) <= left:
        return wanted
    dealt = np.zeros_like(wanted)
    for num in range(1, int(wanted.max()) + 1):
        who = np.flatnonzero(wanted >= num)[:left]
        dealt[who] += 1
        left -= len(who)
    return dealt
