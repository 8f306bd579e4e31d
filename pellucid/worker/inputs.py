"""From a plan's counts to a forward's tensors: prompt chunk, decode and verification in one way.

The host adds up counts (`count`) and ships one small array (`ship`); the device gathers ids, positions and
block tables from the slots (`gather`), which a CUDA graph can do again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pellucid.features.worker import NO_RIDERS, Riders
from pellucid.forward import ForwardInput
from pellucid.graphs.shapes import StepShape
from pellucid.kernels.slots.gather_rows import gather_rows, gather_rows_ref
from pellucid.platform import has_triton
from pellucid.rows import SlotRows, SlotViews, StepRows
from pellucid.schedule.plan import Rows
from pellucid.transfer import upload
from pellucid.worker.layout import Arranged, DraftLayout
from pellucid.worker.slots import Slots


class Common(NamedTuple):
    """What engines in step have agreed on."""

    num_tokens: int  # the most of any of them, with padding
    shape: StepShape | None  # the recording that all replay; None: none does


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """A step as the host knows it; numbers of B rows each.  Steps that are alike share one."""

    slots: np.ndarray
    num_query: np.ndarray  # tokens to compute
    num_drafts: np.ndarray  # of these, drafts at the end
    num_sampled: np.ndarray  # logits to sample: 1 + num_drafts, or 0
    num_scores: np.ndarray  # prompt positions to score, before the sampled ones
    max_keys: np.ndarray | None = None  # no row has more tokens with KV; None: it is not known
    num_propose: int = 0  # drafts made behind each row that samples
    riders: Riders = NO_RIDERS  # what its rows ask for beside tokens
    common: Common | None = None  # None: no other engine takes part

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.num_query.sum())

    @cached_property
    def num_logits(self) -> int:
        """Those that are sampled."""
        return int(self.num_sampled.sum())

    @cached_property
    def max_query(self) -> int:
        """Most tokens of any row."""
        return int(self.num_query.max(initial=0))

    @cached_property
    def max_drafts(self) -> int:
        """Most drafts of any row."""
        return int(self.num_drafts.max())

    @property
    def any_samples(self) -> bool:
        return self.num_logits > 0

    @cached_property
    def any_scores(self) -> bool:
        return bool(self.num_scores.any())

    @cached_property
    def sampled_slots(self) -> np.ndarray:
        """Of the rows that sample."""
        return self.slots[self.num_sampled > 0]

    @cached_property
    def has_chunks(self) -> bool:
        """Whether some row computes more than its last known token and the drafts behind it."""
        return bool((self.num_query > self.num_sampled).any())

    def num_leading(self, max_query: int) -> int:
        """How many of the first rows have at most so many tokens."""
        if self.max_query <= max_query:
            return self.num_rows
        is_longer = self.num_query > max_query
        return int(is_longer.argmax())

    def num_keys(self, first: int) -> float:
        """The most keys that rows have together, from the first-th on."""
        return float("inf") if self.max_keys is None else int(self.max_keys[first:].sum())

    @classmethod
    def uniform(cls, slots: np.ndarray, num_query: int) -> StepCounts:
        """Rows of one committed token and num_query - 1 drafts, which want as many again."""
        queries = np.full(len(slots), num_query)
        return cls(
            slots=slots,
            num_query=queries,
            num_drafts=queries - 1,
            num_sampled=queries,
            num_scores=np.zeros_like(queries),
            num_propose=num_query - 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A step, ready to run."""

    fwd: ForwardInput  # what the model sees
    rows: SlotRows  # where each row stands
    texts: Arranged  # where tokens and logits are in their texts


class InputBuilder:
    """Builds each step's input from the slots."""

    def __init__(self, slots: Slots, layout: DraftLayout) -> None:
        self.slots, self.device = slots, slots.device
        self.layout = layout
        on_gpu = self.device.type == "cuda" and has_triton()
        self._gather = gather_rows if on_gpu else gather_rows_ref
        self._views = SlotViews(
            token_ids=slots.token_ids,
            num_computed=slots.num_computed,
            limits=slots.limits,
            block_tables=slots.block_tables,
            block_size=slots.block_size,
        )
        # Of the last step, if it had nothing but decodes; and what had been admitted by then.
        self._last: tuple[StepCounts, int] | None = None

    def count(self, rows: Rows, num_propose: int, riders: Riders = NO_RIDERS) -> StepCounts:
        """What the plan asks for.  Tells the slots that it was planned, so call it once a step."""
        if self._last is not None and rows.num_query is None and rows.num_logits is None:
            counts, generation = self._last
            is_same = counts.num_propose == num_propose and generation == self.slots.generation
            is_same &= counts.riders.bits == riders.bits
            if is_same and (rows.slots is counts.slots or np.array_equal(rows.slots, counts.slots)):
                # Decodes all, the same as before: the slots have nothing to be told.  `max_keys` may be
                # of fewer blocks: it is asked of chunks alone.
                return counts
        counts = self._count(rows, num_propose, riders)
        is_steady = rows.num_query is None and (counts.num_sampled == 1).all()
        self._last = (counts, self.slots.generation) if is_steady else None
        return counts

    def _count(self, rows: Rows, num_propose: int, riders: Riders) -> StepCounts:
        num_query = np.ones_like(rows.slots) if rows.num_query is None else rows.num_query
        num_draft = np.zeros_like(rows.slots) if rows.num_draft is None else rows.num_draft
        num_logits = 1 + num_draft if rows.num_logits is None else rows.num_logits
        samples = self.slots.samples(rows.slots, num_query) & (num_logits > 0)
        num_sampled = np.where(samples, 1 + num_draft, 0)
        return StepCounts(
            slots=rows.slots,
            num_query=num_query,
            num_drafts=num_draft,
            num_sampled=num_sampled,
            num_scores=num_logits - num_sampled,
            max_keys=self.slots.most_keys(rows.slots),
            num_propose=num_propose,
            riders=riders,
        )

    def ship(self, counts: StepCounts) -> StepRows:
        """Bring the counts to the device, in one copy."""
        ends = np.cumsum(counts.num_query)
        packed, places = side_by_side(
            slots=counts.slots,
            num_query=counts.num_query,
            num_drafts=counts.num_drafts,
            num_sampled=counts.num_sampled,
            cu_query=np.append(0, ends),
            cu_logits=np.append(0, np.cumsum(counts.num_sampled)),
            logits_index=trailing(ends, counts.num_sampled),
            score_index=trailing(ends - counts.num_sampled, counts.num_scores),
            score_slots=np.repeat(counts.slots, counts.num_scores),
        )
        there = upload(packed, self.device)
        parts = {name: there[place] for name, place in places.items()}
        return StepRows(counts=counts, num_tokens=counts.num_tokens, **parts)

    def gather(self, rows: StepRows) -> StepInput:
        """What the slots hold of these rows now.  On the device alone."""
        slot_rows = self._gather(rows, self._views)
        texts = self.layout.arrange(slot_rows, rows)
        fwd = ForwardInput(
            input_ids=slot_rows.input_ids,
            positions=texts.positions,
            slots=rows.slots,
            cu_seqlens_q=slot_rows.cu_seqlens_q,
            seq_lens=slot_rows.seq_lens,
            block_tables=slot_rows.block_tables,
            slot_mappings=slot_rows.slot_mappings,
            logits_index=rows.logits_index,
            tree=texts.tree,
            query_lens=rows.counts.num_query.tolist(),
            num_sampled=rows.counts.num_sampled.tolist(),
            max_keys=[] if rows.counts.max_keys is None else rows.counts.max_keys.tolist(),
            max_query=rows.counts.max_query,
            num_common=0 if rows.counts.common is None else rows.counts.common.num_tokens,
            block_size=self.slots.block_size,
        )
        return StepInput(fwd=fwd, rows=slot_rows, texts=texts)


def side_by_side(**columns: np.ndarray) -> tuple[np.ndarray, dict[str, slice]]:
    """Integers in one array of int64, and where each column lies in it.

    Each begins at a multiple of 16 bytes: kernels have other variants for those that do not.
    """
    starts = np.cumsum([0, *(len(column) + len(column) % 2 for column in columns.values())]).tolist()
    packed = np.zeros(starts[-1], dtype=np.int64)
    places = {
        name: slice(start, start + len(column))
        for start, (name, column) in zip(starts, columns.items(), strict=False)
    }
    for name, column in columns.items():
        packed[places[name]] = column
    return packed, places


def trailing(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The `counts[i]` indices before `ends[i]`, for each row in order."""
    total = int(counts.sum())
    first = ends - np.cumsum(counts)  # index of row i's first one, less how many came before it
    return np.repeat(first, counts) + np.arange(total)
