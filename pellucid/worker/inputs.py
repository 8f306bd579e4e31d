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
from pellucid.transfer import upload
from pellucid.worker.slots import RowState, Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A step, ready to run: what the model sees, and what sampling needs to know besides.

    Legend: B rows, S logits to sample, P prompt positions to score.
    """

    fwd: ForwardInput
    rows: RowState
    cu_logits: Tensor  # [B + 1] int64: row b samples logits cu_logits[b] .. cu_logits[b + 1]
    logit_slots: Tensor  # [S] int64, the slot of each logit
    score_slots: Tensor  # [P] int64
    score_index: Tensor  # [P] int64, the tokens at whose places known tokens are scored
    # On the host:
    host_slots: np.ndarray  # [B]
    num_drafts: np.ndarray  # [B]
    num_sampled: np.ndarray  # [B] logits to sample: 1 + num_drafts, or 0
    num_scores: np.ndarray  # [B] prompt positions to score, before the sampled ones


class InputBuilder:
    """Builds each step's input from the slots.  block_sizes: tokens, per KV group."""

    def __init__(self, slots: Slots, block_sizes: tuple[int, ...]) -> None:
        self.slots, self.block_sizes, self.device = slots, block_sizes, slots.device

    def build(self, plan_rows: list[Row]) -> StepInput:
        """Everything about one step's rows.  Only this function knows how counts become tensors."""
        table = np.array(plan_rows, dtype=np.int64).reshape(-1, len(Row._fields))
        host_slots, num_query, num_draft, num_logits = table[:, 2], table[:, 3], table[:, 4], table[:, 5]
        samples = self.slots.samples(host_slots, num_query) & (num_logits > 0)
        num_sampled = np.where(samples, 1 + num_draft, 0)
        num_scores = num_logits - num_sampled
        ends = np.cumsum(num_query)
        columns = {
            "slots": host_slots,
            "query_lens": num_query,
            "num_drafts": num_draft,
            "samples": samples,
            "cu_query": np.append(0, ends),
            "cu_logits": np.append(0, np.cumsum(num_sampled)),
            "logits_index": _trailing(ends, num_sampled),
            "logit_slots": np.repeat(host_slots, num_sampled),
            "score_index": _trailing(ends - num_sampled, num_scores),
            "score_slots": np.repeat(host_slots, num_scores),
        }
        d = _ship(columns, self.device)
        rows = RowState(
            slots=d["slots"],
            starts=self.slots.num_computed[d["slots"]],
            query_lens=d["query_lens"],
            num_drafts=d["num_drafts"],
            samples=d["samples"].bool(),
        )
        return StepInput(
            fwd=self._forward_input(rows, d["cu_query"], d["logits_index"], num_query),
            rows=rows,
            cu_logits=d["cu_logits"],
            logit_slots=d["logit_slots"],
            score_slots=d["score_slots"],
            score_index=d["score_index"],
            host_slots=host_slots,
            num_drafts=num_draft,
            num_sampled=num_sampled,
            num_scores=num_scores,
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


def _ship(columns: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Several small host arrays to the device in one copy, as int64."""
    packed = np.concatenate(list(columns.values()), dtype=np.int64, casting="unsafe")
    parts = upload(packed, device).split([len(column) for column in columns.values()])
    return dict(zip(columns, parts, strict=True))
