"""Latent attention (DeepSeek-AI 2024, arXiv 2405.04434): of a token one row is cached, whatever the heads.

From x to queries, perhaps by way of a latent of their own, and to the latent of keys and values; from there
to attended heads.  How to attend is the backend's to know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.attention.base import LatentBackend, LatentSpec, QKNorm
from pellucid.forward import ForwardInput
from pellucid.kernels.attention.fp8_cache import is_fp8, kv_scale
from pellucid.kernels.products.round_rows import Rounded
from pellucid.layers.linear import Linear, Unmerged
from pellucid.layers.norm import RMSNorm
from pellucid.layers.weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """The heads of a layer with latent attention."""

    num: int
    nope: int  # features of queries and keys that do not turn
    rope: int  # and that do
    value: int  # features of values
    rank: int  # of the latent of keys and values
    q_rank: int | None  # of the latent of queries; None: there is none


class LatentProjection(nn.Module):
    """From x to queries [T, N * (nope + rope)] and to latents, with what turns of keys [T, rank + rope]."""

    def __init__(
        self, first: Linear | Unmerged, sizes: tuple[int, int], q_norm: RMSNorm | None, q_b: nn.Module | None
    ) -> None:
        """first: to queries or their latents, and to latents, of such sizes.  q_b: from the first of them."""
        super().__init__()
        self.first, self.sizes = first, sizes
        self.q_norm, self.q_b = q_norm, q_b

    def forward(self, x: Tensor | Rounded, fwd: ForwardInput) -> tuple[Tensor, Tensor]:
        """x [T, D]"""
        q, latent = self.first(x, fwd).split(self.sizes, dim=-1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_norm(q)[0], fwd)
        return q, latent


class LatentAttention(nn.Module):
    """Holds what a backend must know to get from queries and latents to attended heads, and lets it do so."""

    def __init__(  # noqa: PLR0913 what a backend must know
        self,
        spec: LatentSpec,
        *,
        name: str,
        scale: float,
        kv_norm: RMSNorm,
        kv_b: Weight,
        kv_scales: tuple[Weight, Weight] | None = None,
        rope: Tensor,
        interleaved: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.name = name  # the checkpoint's path of this layer
        self.scale = scale
        self.table = 0  # the worker's choice
        self.kv_norm, self.kv_b = kv_norm, kv_b
        self.row_scale = 1.0
        self.k_scale_weight, self.v_scale_weight = kv_scales or (None, None)
        self.norm = QKNorm(
            kv_norm.weight, kv_norm.spec.eps
        )  # both, as a backend reads them, once they are loaded
        self.up = torch.empty(0)
        self.rope, self.interleaved = rope, interleaved
        self.is_last = is_last
        self.kv_cache = torch.empty(0)  # the worker's
        self.backend: LatentBackend | None = None  # bound once the whole model's needs are known

    def finish(self) -> None:
        """See the matrix that makes keys and values as each head's.

        A checkpoint's scale of keys is that of rows, which are values, too.
        """
        spec = self.spec
        if self.k_scale_weight is not None and is_fp8(spec.kv_dtype):
            self.row_scale = kv_scale(self.k_scale_weight)
        self.k_scale_weight = self.v_scale_weight = None
        self.norm = QKNorm(self.kv_norm.weight.detach(), self.kv_norm.spec.eps)
        self.up = self.kv_b.detach().view(spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank)

    def forward(self, q: Tensor, latent: Tensor, fwd: ForwardInput) -> Tensor:
        """q [T, N * (nope + rope)], latent [T, rank + rope] -> [T, N * value]."""
        assert self.backend is not None, "no attention backend is bound"
        return self.backend.forward(q, latent, self, fwd)
