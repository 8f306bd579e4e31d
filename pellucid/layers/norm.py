"""RMSNorm (Zhang & Sennrich 2019), joined with the addition of the residual before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from pellucid.kernels.all_reduce import sum_add_rms_norm
from pellucid.kernels.quantize_fp8 import Rounded, Rounding
from pellucid.layers.leaf import Leaf
from pellucid.layers.linear import Linear, Unmerged, Unsummed
from pellucid.layers.weight import Weight


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How a model normalizes, wherever it does."""

    eps: float


class RMSNorm(nn.Module):
    """x / rms(x) in float32, rounded to x's dtype, and only then times the weight, as transformers rounds."""

    def __init__(self, weight: Weight, spec: NormSpec, leaf: Leaf) -> None:
        super().__init__()
        self.weight = weight
        self.eps = spec.eps
        self.leaf = leaf
        self.rounding: Callable[[], Rounding] | None = None
        self.served: tuple[Linear | Unmerged, ...] = ()  # in a tuple it is no part of this module

    def serve(self, layer: Linear | Unmerged) -> None:
        """Nobody but `layer` takes what is normalized: it may be as that one would round it."""
        self.rounding = layer.rounding
        self.served = (layer,)

    def forward(
        self, x: Tensor | Unsummed, residual: Tensor | None = None
    ) -> tuple[Tensor | Rounded, Tensor]:
        """Add x [T, D] to the residual stream and normalize it.  Returns (normalized, residual stream).

        The stream is added to in place: who wants to keep what it was copies it.
        """
        if isinstance(x, Unsummed):
            mailbox = x.group.mailbox
            if mailbox is not None and mailbox.can_sum(x.part):
                return sum_add_rms_norm(x.part, residual, self.weight, self.eps, mailbox)
            x = x.sum()
        if self.rounding is None:
            return self.leaf.add_norm(x, residual, self.weight, self.eps)
        return self.leaf.add_norm_fp8(x, residual, self.weight, self.eps, self.rounding())
