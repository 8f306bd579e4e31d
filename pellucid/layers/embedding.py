"""The table of token embeddings.  A head tied to it is a `Linear` over the same weight: `Builder.head`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pellucid.dist.collectives import Group
from pellucid.forward import ForwardInput
from pellucid.kernels.embedding import embed_share, embed_share_ref
from pellucid.kernels.language import has_triton
from pellucid.layers.addend import Addend
from pellucid.layers.weight import Weight
from pellucid.lora.bank import EmbeddingBank


class VocabEmbedding(nn.Module):
    """Rows of a table [V, D], times a factor."""

    def __init__(self, weight: Weight, scale: float = 1.0, lora: EmbeddingBank | None = None) -> None:
        """lora: what tokens' adapters add; None: there are never any."""
        super().__init__()
        self.weight = weight
        self.scale = scale
        self.lora = lora

    def finish(self) -> None:
        if self.lora is not None:
            self.lora.make_room()

    def table(self) -> Weight:
        """What a tied head multiplies with."""
        return self.weight

    def forward(self, input_ids: Tensor, fwd: ForwardInput | None = None) -> Tensor | Addend:
        """input_ids [T] -> [T, D], for a norm.  Ids must lie in the vocabulary."""
        return self._finished(F.embedding(input_ids, self.weight), input_ids, fwd)

    def _finished(self, rows: Tensor, input_ids: Tensor, fwd: ForwardInput | None) -> Tensor:
        if self.lora is not None and fwd is not None and fwd.adapters is not None:
            self.lora.add(rows, input_ids, fwd.adapters)
        return rows if self.scale == 1.0 else rows * self.scale


class SplitVocabEmbedding(VocabEmbedding):
    """Rows of a table that ranks share: each looks up the ids that are its own, and the sum is whole."""

    def __init__(
        self, weight: Weight, group: Group, scale: float = 1.0, lora: EmbeddingBank | None = None
    ) -> None:
        super().__init__(weight, scale, lora)
        self.group = group
        self.first = group.rank * weight.shape[0]
        self.embed = embed_share if weight.device.type == "cuda" and has_triton() else embed_share_ref

    def forward(self, input_ids: Tensor, fwd: ForwardInput | None = None) -> Addend:
        # Of each row one rank has all and the others have zeros: what is scaled here is not rounded again.
        rows = self.embed(input_ids, self.weight, self.first)
        return Addend(self._finished(rows, input_ids, fwd), self.group)
