"""The attention layer: packed projection in, attended heads out.  How to attend is the backend's to know."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pellucid.attention.base import AttentionBackend, AttentionSpec, QKNorm
from pellucid.forward import ForwardInput
from pellucid.kernels.attention.fp8_cache import is_fp8, kv_scale
from pellucid.layers.norm import RMSNorm
from pellucid.layers.weight import Weight


class Attention(nn.Module):
    """Holds what a backend must know to get from a packed projection to attended heads, and lets it do so."""

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        name: str,
        kv_scales: tuple[Weight, Weight] | None = None,
        scale: float,
        rope: Tensor | None = None,
        interleaved: bool = False,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.name = name  # the checkpoint's path of this layer
        self.scale = scale
        self.window, self.chunk, self.softcap = spec.window, spec.chunk, spec.softcap
        self.table = 0  # the worker's choice
        self.k_scale, self.v_scale = 1.0, 1.0
        self.k_scale_weight, self.v_scale_weight = kv_scales or (None, None)
        self.rope, self.interleaved = rope, interleaved
        self.q_norm, self.k_norm = qk_norm or (None, None)
        self.qk_norm: QKNorm | None = None  # both in one, once their weights are loaded
        self.sinks: Tensor | None = None  # a parameter, where there are any
        self.is_last = is_last
        self.kv_cache = torch.empty(0)  # the worker's
        self.backend: AttentionBackend | None = None  # bound once the whole model's needs are known

    def finish(self) -> None:
        """Lay the weights of both norms side by side, so that one multiplication serves q and k.

        The scales of the cache become plain numbers if the cache is FP8, and otherwise are let go.
        """
        if self.k_scale_weight is not None and self.v_scale_weight is not None:
            if is_fp8(self.spec.kv_dtype):
                self.k_scale, self.v_scale = kv_scale(self.k_scale_weight), kv_scale(self.v_scale_weight)
            self.k_scale_weight, self.v_scale_weight = None, None
        if self.q_norm is not None and self.k_norm is not None:
            q_weight = self.q_norm.weight.expand(self.spec.num_heads, -1)
            k_weight = self.k_norm.weight.expand(self.spec.num_kv_heads, -1)
            self.qk_norm = QKNorm(torch.cat((q_weight, k_weight)).detach(), self.q_norm.spec.eps)

    def forward(self, qkv: Tensor, fwd: ForwardInput) -> Tensor:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads * head_dim]."""
        assert self.backend is not None, "no attention backend is bound"
        assert (self.q_norm is None) == (self.qk_norm is None), "finish() was not called after loading"
        return self.backend.forward(qkv, self, fwd)

    def keep(self, kv: Tensor, fwd: ForwardInput) -> None:
        """Write keys and values [T, 2 * num_kv_heads * head_dim] of tokens that do not attend."""
        assert self.backend is not None, "no attention backend is bound"
        self.backend.write(kv, self, fwd)
