"""The table of token embeddings.  A head tied to it is a `Linear` over the same weight: `Builder.head`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pellucid.dist.collectives import Group
from pellucid.kernels.embedding import embed_share, embed_share_ref
from pellucid.kernels.language import has_triton
from pellucid.layers.addend import Addend
from pellucid.layers.weight import Weight


class VocabEmbedding(nn.Module):
    """Rows of a table [V, D], times a factor."""

    def __init__(self, weight: Weight, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.scale = scale

    def table(self) -> Weight:
        """What a tied head multiplies with."""
        return self.weight

    def forward(self, input_ids: Tensor) -> Tensor | Addend:
        """input_ids [T] -> [T, D], for a norm.  Ids must lie in the vocabulary."""
        return self._scaled(F.embedding(input_ids, self.weight))

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self.scale == 1.0 else rows * self.scale


class SplitVocabEmbedding(VocabEmbedding):
    """Rows of a table that ranks share: each looks up the ids that are its own, and the sum is whole."""

    def __init__(self, weight: Weight, group: Group, scale: float = 1.0) -> None:
        super().__init__(weight, scale)
        self.group = group
        self.first = group.rank * weight.shape[0]
        self.embed = embed_share if weight.device.type == "cuda" and has_triton() else embed_share_ref

    def forward(self, input_ids: Tensor) -> Addend:
        # Of each row one rank has all and the others have zeros: what is scaled here is not rounded again.
        return Addend(self._scaled(self.embed(input_ids, self.weight, self.first)), self.group)
