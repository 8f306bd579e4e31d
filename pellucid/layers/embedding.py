"""The table of token embeddings.  A head tied to it is a `Linear` over the same weight: `Builder.head`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pellucid.dist.collectives import Group
from pellucid.forward import ForwardInput
from pellucid.kernels.lang.language import has_triton
from pellucid.kernels.pointwise.embedding import (
    CodedTable,
    embed_codes,
    embed_codes_ref,
    embed_share,
    embed_share_ref,
)
from pellucid.layers.addend import Addend
from pellucid.layers.weight import Weight
from pellucid.lora.bank import EmbeddingBank
from pellucid.quant.base import TableCodes


class VocabEmbedding(nn.Module):
    """Rows of a table [V, D], times a factor."""

    def __init__(
        self,
        weight: Weight,
        scale: float = 1.0,
        lora: EmbeddingBank | None = None,
        keep: TableCodes | None = None,
    ) -> None:
        """lora: what tokens' adapters add; None: there are never any.

        keep: what makes codes of a loaded table; None: it stays plain.
        """
        super().__init__()
        self.weight = weight
        self.scale = scale
        self.lora = lora
        self.keep = keep
        self.codes: CodedTable | None = None
        self.first = 0  # the token of row 0
        kernels = weight.device.type == "cuda" and has_triton()
        self.embed_share = embed_share if kernels else embed_share_ref
        self.embed_codes = embed_codes if kernels else embed_codes_ref

    def finish(self) -> None:
        if self.keep is not None:
            self.codes = self.keep.coded(self.weight.detach())
            self.weight.data = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        if self.lora is not None:
            self.lora.make_room()

    def table(self) -> Weight:
        """What a tied head multiplies with, or has codes of its own of."""
        return self.weight

    def forward(self, input_ids: Tensor, fwd: ForwardInput | None = None) -> Tensor | Addend:
        """input_ids [T] -> [T, D], for a norm.  Ids must lie in the vocabulary."""
        return self._embed(input_ids, fwd)

    def _embed(self, input_ids: Tensor, fwd: ForwardInput | None) -> Tensor:
        if self.codes is None:
            rows = self._plain_rows(input_ids)
        else:
            rows = self.embed_codes(input_ids, self.codes, self.first, self.weight.dtype)
        if self.lora is not None and fwd is not None and fwd.adapters is not None:
            self.lora.add(rows, input_ids, fwd.adapters)
        return rows if self.scale == 1.0 else rows * self.scale

    def _plain_rows(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class SplitVocabEmbedding(VocabEmbedding):
    """Rows of a table that ranks share: each looks up the ids that are its own, and the sum is whole."""

    def __init__(
        self,
        weight: Weight,
        group: Group,
        scale: float = 1.0,
        lora: EmbeddingBank | None = None,
        keep: TableCodes | None = None,
    ) -> None:
        super().__init__(weight, scale, lora, keep)
        self.group = group
        self.first = group.rank * weight.shape[0]

    def forward(self, input_ids: Tensor, fwd: ForwardInput | None = None) -> Addend:
        # Of each row one rank has all and the others have zeros: what is scaled here is not rounded again.
        return Addend(self._embed(input_ids, fwd), self.group)

    def _plain_rows(self, input_ids: Tensor) -> Tensor:
        return self.embed_share(input_ids, self.weight, self.first)
