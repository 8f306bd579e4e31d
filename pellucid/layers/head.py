"""A head whose logits are scaled or softly capped."""

from __future__ import annotations

from torch import Tensor, nn

from pellucid.layers.leaf import Leaf
from pellucid.layers.linear import Linear, Unmerged


class ScaledHead(nn.Module):
    """cap * tanh(scale * head(x) / cap), or no more than scaled if there is no cap."""

    def __init__(self, head: Linear | Unmerged, scale: float, cap: float | None, leaf: Leaf) -> None:
        super().__init__()
        self.head, self.scale, self.cap, self.leaf = head, scale, cap, leaf

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] -> [S, this rank's share of V]."""
        return self.leaf.cap_logits(self.head(hidden), self.scale, self.cap)

    def adapted(self, hidden: Tensor, adapters: Tensor) -> Tensor:
        """The same, with what adapters add to the head."""
        return self.leaf.cap_logits(self.head.adapted(hidden, adapters), self.scale, self.cap)
