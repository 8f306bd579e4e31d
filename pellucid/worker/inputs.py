"""From a plan's counts to a forward's tensors: prompt chunk, decode and verification in one way.

The host adds up counts (`count`) and ships one small array (`ship`); the device gathers ids, positions and
block tables from the slots (`gather`), which a CUDA graph can do again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.kernels.gather_rows import (
    gather_blocks,
    gather_blocks_ref,
    gather_tokens,
    gather_tokens_ref,
)
from pellucid.platform import has_triton
from pellucid.sample.branches import Branches
from pellucid.schedule.plan import Row
from pellucid.transfer import upload
from pellucid.worker.layout import DraftLayout
from pellucid.worker.slots import RowState, Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """A step as the host knows it; numbers of B rows each."""

    slots: np.ndarray
    num_query: np.ndarray  # tokens to compute
    num_drafts: np.ndarray  # of these, drafts at the end
    num_sampled: np.ndarray  # logits to sample: 1 + num_drafts, or 0
    num_scores: np.ndarray  # prompt positions to score, before the sampled ones
    num_propose: int = 0  # drafts wanted of each row that samples
    host_bound: tuple[int, ...] = ()  # rows whose drafts the host must see

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.num_query.sum())

    @property
    def max_drafts(self) -> int:
        """Most drafts of any row."""
        return int(self.num_drafts.max())

    @property
    def any_samples(self) -> bool:
        return bool(self.num_sampled.any())

    @property
    def uniform_query(self) -> int | None:
        """The queries of every row, if all rows have as many and sample at each: decodes, verifications."""
        num_query = int(self.num_query[0])
        is_uniform = (self.num_query == num_query).all() and (self.num_sampled == num_query).all()
        return num_query if is_uniform else None

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
class StepRows:
    """A step's counts, on the host and, int64 each, on the device.

    Legend: T tokens, B rows, S logits to sample, P prompt positions to score.
    """

    counts: StepCounts
    slots: Tensor  # [B]
    num_query: Tensor  # [B]
    num_drafts: Tensor  # [B]
    num_sampled: Tensor  # [B]
    cu_query: Tensor  # [B + 1]: row b computes tokens cu_query[b] .. cu_query[b + 1]
    cu_logits: Tensor  # [B + 1]: row b samples logits cu_logits[b] .. cu_logits[b + 1]
    logits_index: Tensor  # [S], the tokens whose logits are sampled
    score_index: Tensor  # [P], the tokens at whose places known tokens are scored
    score_slots: Tensor  # [P]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A step, ready to run: what the model sees, and where each row stands."""

    fwd: ForwardInput
    rows: RowState
    logit_slots: Tensor  # [S] int64, the slot of each logit
    branches: Branches  # to the text before each logit


class InputBuilder:
    """Builds each step's input from the slots.  block_sizes: tokens, per KV group."""

    def __init__(self, slots: Slots, block_sizes: tuple[int, ...], layout: DraftLayout) -> None:
        self.slots, self.block_sizes, self.device = slots, block_sizes, slots.device
        self.layout = layout
        on_gpu = self.device.type == "cuda" and has_triton()
        self._gather_tokens = gather_tokens if on_gpu else gather_tokens_ref
        self._gather_blocks = gather_blocks if on_gpu else gather_blocks_ref
        self._last: tuple[list[Row], StepCounts] | None = None  # of a step in which every row sampled

    def count(self, plan_rows: list[Row], num_propose: int) -> StepCounts:
        """What the plan asks for.  Tells the slots that it was planned, so call it once a step."""
        if self._last is not None and self._last[0] == plan_rows and self._last[1].num_propose == num_propose:
            return self._last[1]  # decodes all, the same as before: the slots have nothing to be told
        counts = self._count(plan_rows, num_propose)
        self._last = (plan_rows, counts) if (counts.num_sampled > 0).all() else None
        return counts

    def _count(self, plan_rows: list[Row], num_propose: int) -> StepCounts:
        table = np.array(plan_rows, dtype=np.int64).reshape(-1, len(Row._fields))
        host_slots, num_query, num_draft, num_logits = table[:, 2], table[:, 3], table[:, 4], table[:, 5]
        samples = self.slots.samples(host_slots, num_query) & (num_logits > 0)
        num_sampled = np.where(samples, 1 + num_draft, 0)
        return StepCounts(
            slots=host_slots,
            num_query=num_query,
            num_drafts=num_draft,
            num_sampled=num_sampled,
            num_scores=num_logits - num_sampled,
            num_propose=num_propose,
        )

    def ship(self, counts: StepCounts) -> StepRows:
        """Bring the counts to the device, in one copy.

        Each column begins at a multiple of 16 bytes: kernels have other variants for those that do not.
        """
        ends = np.cumsum(counts.num_query)
        columns = {
            "slots": counts.slots,
            "num_query": counts.num_query,
            "num_drafts": counts.num_drafts,
            "num_sampled": counts.num_sampled,
            "cu_query": np.append(0, ends),
            "cu_logits": np.append(0, np.cumsum(counts.num_sampled)),
            "logits_index": _trailing(ends, counts.num_sampled),
            "score_index": _trailing(ends - counts.num_sampled, counts.num_scores),
            "score_slots": np.repeat(counts.slots, counts.num_scores),
        }
        starts = np.cumsum([0, *(len(column) + len(column) % 2 for column in columns.values())]).tolist()
        packed = np.zeros(starts[-1], dtype=np.int64)
        for start, column in zip(starts, columns.values(), strict=False):
            packed[start : start + len(column)] = column
        there = upload(packed, self.device)
        parts = {
            name: there[start : start + len(column)]
            for start, (name, column) in zip(starts, columns.items(), strict=False)
        }
        return StepRows(counts=counts, **parts)

    def gather(self, rows: StepRows) -> StepInput:
        """What the slots hold of these rows now.  On the device alone."""
        counts, slots = rows.counts, rows.slots
        where, num_tokens = (slots, rows.cu_query), counts.num_tokens
        max_query = int(counts.num_query.max(initial=0))
        tokens = self._gather_tokens(
            *where, self.slots.token_ids, self.slots.num_computed, num_tokens=num_tokens, max_query=max_query
        )
        groups = [
            self._gather_blocks(*where, tokens.positions, table, block_size=size, max_query=max_query)
            for table, size in zip(self.slots.block_tables, self.block_sizes, strict=True)
        ]
        state = RowState(
            slots=slots,
            starts=tokens.starts,
            query_lens=rows.num_query,
            num_drafts=rows.num_drafts,
            samples=rows.num_sampled > 0,
        )
        positions, tree = self.layout.arrange(tokens.positions, state)
        fwd = ForwardInput(
            input_ids=tokens.input_ids,
            positions=positions,
            slots=slots,
            cu_seqlens_q=rows.cu_query.to(torch.int32),
            seq_lens=tokens.seq_lens,
            block_tables=tuple(blocks for blocks, _ in groups),
            slot_mappings=tuple(mapping for _, mapping in groups),
            logits_index=rows.logits_index,
            tree=tree,
            query_lens=counts.num_query.tolist(),
            max_query=max_query,
            block_sizes=self.block_sizes,
        )
        num_logits = len(rows.logits_index)
        row_of_logit = torch.repeat_interleave(rows.num_sampled, output_size=num_logits)
        return StepInput(
            fwd=fwd,
            rows=state,
            logit_slots=slots[row_of_logit],
            branches=self.layout.branches(tokens.positions, rows.logits_index, row_of_logit, state),
        )


def _trailing(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The `counts[i]` indices before `ends[i]`, for each row in order."""
    total = int(counts.sum())
    first = ends - np.cumsum(counts)  # index of row i's first one, less how many came before it
    return np.repeat(first, counts) + np.arange(total)
