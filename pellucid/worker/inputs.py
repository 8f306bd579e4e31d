"""From a plan's counts to a forward's tensors: prompt chunk, decode and verification in one way.

The host adds up counts and ships one small array; the device gathers ids and positions from the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.schedule.plan import Row
from pellucid.worker.slots import RowState, Slots
from pellucid.worker.transfer import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A step, ready to run: what the model sees, and what sampling needs to know besides."""

    fwd: ForwardInput
    rows: RowState
    host_slots: np.ndarray  # [B]
    host_samples: np.ndarray  # [B] bool: rows that yield tokens
    num_drafts: np.ndarray  # [B]
    num_scores: np.ndarray  # [B] prompt positions whose logprobs are wanted, before the sampled ones
    scores_index: Tensor  # [P] int64, the tokens at those positions


class InputBuilder:
    """Builds each step's input from the slots.  block_sizes: tokens, per KV group."""

    def __init__(self, slots: Slots, block_sizes: tuple[int, ...]) -> None:
        self.slots, self.block_sizes, self.device = slots, block_sizes, slots.device

    def build(self, plan_rows: list[Row]) -> StepInput:
        """Everything about one step's rows.  Only this function knows how counts become tensors."""
        table = np.array(plan_rows, dtype=np.int64).reshape(-1, len(Row._fields))
        host_slots, num_query, num_draft, num_logits = table[:, 2], table[:, 3], table[:, 4], table[:, 5]
        host_samples = self.slots.samples(host_slots, num_query) & (num_logits > 0)
        num_sampled = np.where(host_samples, 1 + num_draft, 0)
        num_scores = num_logits - num_sampled
        ends = np.cumsum(num_query)
        sampled = _trailing(ends, num_sampled)
        scored = _trailing(ends - num_sampled, num_scores)
        packed, cuts = _pack(
            host_slots, num_query, num_draft, host_samples, np.append(0, ends), sampled, scored
        )
        slots, query_lens, drafts, samples, cu, sampled_at, scored_at = to_device(packed, self.device).split(
            cuts
        )
        rows = RowState(
            slots=slots,
            starts=self.slots.num_computed[slots],
            query_lens=query_lens,
            num_drafts=drafts,
            samples=samples.bool(),
        )
        fwd = self._forward_input(rows, cu, sampled_at, num_query)
        return StepInput(
            fwd=fwd,
            rows=rows,
            host_slots=host_slots,
            host_samples=host_samples,
            num_drafts=num_draft,
            num_scores=num_scores,
            scores_index=scored_at,
        )

    def _forward_input(
        self, rows: RowState, cu: Tensor, sampled: Tensor, num_query: np.ndarray
    ) -> ForwardInput:
        num_tokens = int(num_query.sum())
        row_of_token = torch.repeat_interleave(rows.query_lens, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self.device) + (rows.starts - cu[:-1])[row_of_token]
        token_slots = rows.slots[row_of_token]
        block_tables = tuple(table[rows.slots] for table in self.slots.block_tables)
        return ForwardInput(
            input_ids=self.slots.token_ids[token_slots, positions],
            positions=positions,
            slots=rows.slots,
            cu_seqlens_q=cu.to(torch.int32),
            seq_lens=(rows.starts + rows.query_lens).to(torch.int32),
            block_tables=block_tables,
            slot_mappings=tuple(
                table[row_of_token, positions // size].long() * size + positions % size
                for table, size in zip(block_tables, self.block_sizes, strict=True)
            ),
            logits_index=sampled,
            query_lens=num_query.tolist(),
            max_query=int(num_query.max(initial=0)),
        )


def _trailing(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The `counts[i]` indices before `ends[i]`, for each row in order."""
    total = int(counts.sum())
    first = ends - np.cumsum(counts)  # index of row i's first one, less how many came before it
    return np.repeat(first, counts) + np.arange(total)


def _pack(*columns: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """One int64 array for one copy, and the lengths that cut it again."""
    return np.concatenate(columns, dtype=np.int64, casting="unsafe"), [len(column) for column in columns]
