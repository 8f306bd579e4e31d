"""RMSNorm (Zhang & Sennrich 2019), joined with the addition of the residual before it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pellucid.layers.weight import Weight


class RMSNorm(nn.Module):
    """x / rms(x) in float32, rounded to x's dtype, and only then times the weight, as transformers rounds."""

    def __init__(self, weight: Weight, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add x [T, D] to the residual stream and normalize it.  Returns (normalized, residual stream)."""
        residual = x if residual is None else x + residual
        return rms_norm(residual, self.weight, self.eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize over the last axis; `weight` broadcasts over the others."""
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
