"""Experts of a layer that several engines divide: tokens go to all of them, and what comes back is theirs.

Legend: T tokens of this engine, C of each engine, padded, R engines, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.dist.collectives import Group
from pellucid.kernels.experts.routing import Chosen, Share
from pellucid.kernels.slots.spread import pack, pack_ref, unpack, unpack_ref, words_of


@dataclass(frozen=True, slots=True)
class Spread:
    """Between the engines.  group: the same ranks of all of them.  share: the experts that are here."""

    group: Group
    share: Share
    num_experts: int  # everywhere
    top_k: int
    dim: int
    dtype: torch.dtype  # of tokens
    device: torch.device
    is_fused: bool  # there are kernels for packing

    def over(
        self, x: Tensor, chosen: Chosen, num_common: int, mix: Callable[[Tensor, Chosen], Tensor]
    ) -> Tensor:
        """x [T, D] -> [T, D], the sum over all engines' experts of what `mix` makes with those that are here.

        chosen: numbers among all experts.  num_common: C.
        """
        num_tokens = len(x)
        everywhere = self._gather(x, chosen, max(num_common, num_tokens))
        return self.group.scatter_sum(mix(*everywhere))[:num_tokens]

    def lend(self, num_tokens: int, mix: Callable[[Tensor, Chosen], Tensor]) -> None:
        """The same without tokens of this engine.  num_tokens: C."""
        ids = torch.empty((0, self.top_k), dtype=torch.int32, device=self.device)
        nobody = Chosen(ids, ids.float())
        self.over(torch.empty((0, self.dim), dtype=self.dtype, device=self.device), nobody, num_tokens, mix)

    def _gather(self, x: Tensor, chosen: Chosen, num_common: int) -> tuple[Tensor, Chosen]:
        words = words_of(self.dim * x.itemsize, self.top_k)
        packed, unpacked = (pack, unpack) if self.is_fused else (pack_ref, unpack_ref)
        message = packed(x, chosen, num_common, words, self.num_experts)
        return unpacked(self.group.gather(message).view(-1, words), x.dtype, self.dim, self.top_k, self.share)
