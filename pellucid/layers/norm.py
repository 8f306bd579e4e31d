"""RMSNorm (Zhang & Sennrich 2019), joined with the addition of the residual before it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from pellucid.layers.weight import Weight

AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [T, D] to the residual stream in place, if there is one, and normalize the sum.

    Returns (normalized, residual stream); the latter is x itself without a residual.
    """
    stream = x if residual is None else residual.add_(x)
    return rms_norm(stream, weight, eps), stream


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize over the last axis; `weight` broadcasts over the others."""
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


class RMSNorm(nn.Module):
    """x / rms(x) in float32, rounded to x's dtype, and only then times the weight, as transformers rounds."""

    def __init__(self, weight: Weight, eps: float, add_norm: AddNorm = add_rms_norm) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.add_norm = add_norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add x [T, D] to the residual stream and normalize it.  Returns (normalized, residual stream).

        The stream is added to in place: who wants to keep what it was copies it.
        """
        return self.add_norm(x, residual, self.weight, self.eps)
