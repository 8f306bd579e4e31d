"""A drafter's own, smaller vocabulary: which of the target's tokens it can name.

Legend: S logits, V the target's vocabulary, W the drafter's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pellucid.dist.vocab_share import vocab_share
from pellucid.layers.weight import Weight
from pellucid.models.head import Lender


class OwnVocabulary(nn.Module):
    """Spreads logits of W tokens over the target's; what the drafter cannot name is impossible."""

    def __init__(self, listed: Weight, lender: Lender, *, are_offsets: bool) -> None:
        """listed: [W] int64, the target's ids; as offsets (`d2t`) each less its place in the list."""
        super().__init__()
        self.listed, self.are_offsets = listed, are_offsets
        self.vocab_size = lender.vocab_size
        self.share = vocab_share(lender.vocab_size, lender.group.size)
        self.first, self.width = lender.group.rank * self.share, self.share * lender.group.size
        self.ids = torch.empty(0)

    def finish(self) -> None:
        """Read the list.  Raises ValueError for a token that the target does not have."""
        places = torch.arange(len(self.listed), device=self.listed.device) if self.are_offsets else 0
        self.ids = self.listed.detach() + places
        least, most = int(self.ids.min()), int(self.ids.max())
        if least < 0 or most >= self.vocab_size:
            raise ValueError(
                f"the draft head names tokens {least:,} to {most:,}, but the model's vocabulary has "
                f"{self.vocab_size:,}; take the head that was trained for this model"
            )

    def forward(self, logits: Tensor) -> Tensor:
        """[S, W], the same on every rank -> [S, this rank's share of V]."""
        wide = logits.new_full((len(logits), self.width), -float("inf"))
        return wide.index_copy_(1, self.ids, logits)[:, self.first : self.first + self.share]
