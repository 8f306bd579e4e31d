"""RMSNorm (Zhang & Sennrich 2019), joined with the addition of the residual before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from pellucid.kernels.experts.experts import Pairs
from pellucid.kernels.experts.sum_norm import sum_norm
from pellucid.kernels.pointwise.rms_norm import NO_POST
from pellucid.kernels.products.round_rows import Rounded, Rounding
from pellucid.kernels.ranks.all_reduce import sum_add_rms_norm
from pellucid.layers.addend import Addend
from pellucid.layers.leaf import Leaf
from pellucid.layers.linear import Linear, Unmerged
from pellucid.layers.weight import Weight


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How a model normalizes, wherever it does.

    wide: the weight is multiplied in float32 and the product rounded, not x / rms(x) before it.
    offset: what is added to the checkpoint's weights.
    """

    eps: float
    wide: bool = False
    offset: float = 0.0


class RMSNorm(nn.Module):
    """x / rms(x) in float32, rounded to x's dtype, and only then times the weight, unless it is wide."""

    weight: nn.Parameter

    def __init__(self, weight: Weight, spec: NormSpec, leaf: Leaf) -> None:
        super().__init__()
        self.weight = weight
        self.spec = spec
        self.leaf = leaf
        self.rounding: Callable[[], Rounding] | None = None
        self.served: tuple[Linear | Unmerged, ...] = ()  # in a tuple it is no part of this module

    def finish(self) -> None:
        """A wide weight is kept in float32, which tells the kernels that it is."""
        if self.spec.wide:
            self.weight = nn.Parameter(self.weight.float() + self.spec.offset, requires_grad=False)
        elif self.spec.offset:
            self.weight.add_(self.spec.offset)

    def serve(self, layer: Linear | Unmerged) -> None:
        """Nobody but `layer` takes what is normalized: it may be as that one would round it."""
        self.rounding = layer.rounding
        self.served = (layer,)

    def forward(self, x: Tensor | Addend, residual: Tensor | None = None) -> tuple[Tensor | Rounded, Tensor]:
        """Add x [T, D] to the residual stream and normalize it.  Returns (normalized, residual stream).

        The stream is added to in place: who wants to keep what it was copies it.
        """
        return add_norm(x, residual, self.weight, self.spec.eps, self.leaf, self.rounding)


class Add(nn.Module):
    """Adds as a norm does, and hands out the sum: where a family has no norm, or a pipeline a cut."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf

    def serve(self, layer: Linear | Unmerged) -> None:
        """The stream is read again: nobody may round it."""

    def forward(self, x: Tensor | Addend, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Called like a norm: (x + residual, the same)."""
        added, stream = add_norm(x, residual, None, 0.0, self.leaf)
        assert isinstance(added, Tensor)
        return added, stream


def add_norm(
    x: Tensor | Addend,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    leaf: Leaf,
    rounding: Callable[[], Rounding] | None = None,
) -> tuple[Tensor | Rounded, Tensor]:
    """What is left to do to x, the addition, and the norm if there is a weight, in one pass or few."""
    post = NO_POST
    if isinstance(x, Addend):
        part, post, mailbox = x.part, x.post, x.group.mailbox
        if isinstance(part, Pairs) and residual is not None and weight is not None and rounding is None:
            return sum_norm(part, residual, weight, eps)
        if isinstance(part, Tensor) and mailbox is not None and mailbox.can_sum(part):
            return sum_add_rms_norm(part, residual, weight, eps, mailbox, post)
        x = x.sum()
    if rounding is None or weight is None:
        return leaf.add_norm(x, residual, weight, eps, post)
    return leaf.add_norm_rounded(x, residual, weight, eps, rounding(), post)
