"""What sampling a step has taught, as the last stage of a pipeline tells the others: one small message.

It says all that is needed to repeat it, so a stage applies it whenever it is due, whatever ran in between.
Legend: B rows, K tokens a row can yield, k drafts, N of which the parents are told: k of trees, 0 of chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pellucid.sample.output import SampleOutput
from pellucid.spec.base import DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Integers, on the device."""

    slots: Tensor  # [B]; the spare slot for rows that do not sample
    roots: Tensor  # [B], places of the last tokens known before
    output: SampleOutput  # without logprobs
    drafts: Tensor  # [B, k], to be verified next
    parents: Tensor  # [B, N]

    @staticmethod
    def width(shape: DraftShape) -> int:
        """Columns of the message."""
        return 3 + 2 * shape.max_new + shape.num_drafts + shape.num_parents

    def pack(self) -> Tensor:
        """[B, width] int32."""
        output = self.output
        path = torch.zeros_like(output.tokens) if output.path is None else output.path
        columns = torch.stack([self.slots, self.roots, output.num_new], dim=1)
        return torch.cat([columns, output.tokens, path, self.drafts, self.parents], dim=1).int()

    @classmethod
    def unpack(cls, packed: Tensor, shape: DraftShape) -> Self:
        """shape: of the drafts, as it was packed."""
        max_new = shape.max_new
        ends = [max_new, 2 * max_new, 2 * max_new + shape.num_drafts]
        slots, roots, num_new = packed[:, :3].long().unbind(1)
        tokens, path, drafts, parents = packed[:, 3:].tensor_split(ends, dim=1)
        output = SampleOutput(tokens=tokens, num_new=num_new, path=path)
        return cls(slots=slots, roots=roots, output=output, drafts=drafts, parents=parents)
