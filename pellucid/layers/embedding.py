"""The table of token embeddings.  A head tied to it is a `Linear` over the same weight: `Builder.head`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pellucid.layers.weight import Weight


class VocabEmbedding(nn.Module):
    """Rows of a table [V, D]."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, D].  Ids must lie in the vocabulary."""
        return F.embedding(input_ids, self.weight)
