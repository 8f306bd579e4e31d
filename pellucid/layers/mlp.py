"""The gated feed-forward network (Shazeer 2020): down(act(gate(x)) * up(x)), gate and up merged."""

from __future__ import annotations

from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.kernels.products.round_rows import Rounded
from pellucid.layers.activation import Act
from pellucid.layers.addend import Addend, Adding
from pellucid.layers.leaf import Leaf
from pellucid.layers.linear import Linear, Unmerged


class GatedMLP(nn.Module):
    """x [T, D] -> [T, D], for a norm."""

    def __init__(
        self,
        gate_up: Linear | Unmerged,
        down: Linear | Adding | Unmerged,
        act: Act,
        leaf: Leaf,
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.act = act.kernel
        self.leaf = leaf
        self.rounding = down.rounding

    def forward(self, x: Tensor | Rounded, fwd: ForwardInput) -> Tensor | Addend:
        hidden = self.gate_up.gated(x, self.act, fwd)
        if hidden is None:
            hidden = self._gate(self.gate_up(x, fwd))
        return self.down(hidden, fwd)

    def _gate(self, gate_up: Tensor) -> Tensor | Rounded:
        if self.rounding is None:
            return self.leaf.gated(gate_up, self.act)
        return self.leaf.gated_rounded(gate_up, self.act, self.rounding())
