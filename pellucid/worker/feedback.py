"""What sampling a step has taught, as the last stage of a pipeline tells the others: one small message.

It says all that is needed to repeat it, so a stage applies it whenever it is due, whatever ran in between.
Legend: B rows, K tokens a row can yield, k drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Integers, on the device."""

    slots: Tensor  # [B]; the spare slot for rows that do not sample
    roots: Tensor  # [B] positions of the last tokens known before
    num_new: Tensor  # [B] tokens that the rows yielded
    tokens: Tensor  # [B, K], of which num_new count
    drafts: Tensor  # [B, k], to be verified next

    @staticmethod
    def width(max_new: int, num_drafts: int) -> int:
        """Columns of the message."""
        return 3 + max_new + num_drafts

    def pack(self) -> Tensor:
        """[B, width] int32."""
        columns = torch.stack([self.slots, self.roots, self.num_new], dim=1)
        return torch.cat([columns, self.tokens, self.drafts], dim=1).int()

    @classmethod
    def unpack(cls, packed: Tensor, max_new: int) -> Self:
        ints = packed.long()
        slots, roots, num_new = ints[:, :3].unbind(1)
        return cls(
            slots=slots,
            roots=roots,
            num_new=num_new,
            tokens=packed[:, 3 : 3 + max_new],
            drafts=packed[:, 3 + max_new :],
        )
