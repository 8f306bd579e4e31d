"""INT8 weights with a scale for each output, made as plain weights load; activations stay as they are.

On a CPU a few tokens take torch's product that reads INT8 directly, which halves the bytes of a decode; many
tokens, and GPUs, widen the weights first: integers up to 127 are exact in every dtype, and scales come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.quant.base import Kind, LinearLayer, LinearMethod, LinearShape, ParamSpec
from pellucid.quant.unquantized import Unquantized

INT8_MAX = 127
MAX_DIRECT_TOKENS = 8  # from about ten on, widening the weights once costs less than reading INT8 for each


class Int8Scheme:
    """Every linear layer but the head."""

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, object]) -> Self | None:
        return None

    @classmethod
    def online(cls) -> Self | None:
        return cls()

    def method(self, prefixes: tuple[str, ...], kind: Kind) -> LinearMethod | None:
        return Unquantized() if kind == "head" else Int8()


class Int8:
    """One matrix [out, in] of INT8 and a scale for each row, in the activations' dtype."""

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        return Unquantized().params(shape)

    def finish(self, layer: LinearLayer) -> None:
        weight, scale = quantize_rows(layer.param("weight"))
        layer.replace("weight", weight)
        layer.replace("weight_scale", scale)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        weight, scale = layer.param("weight"), layer.param("weight_scale")
        tokens = x.reshape(-1, x.shape[-1])
        if weight.device.type == "cpu" and 0 < len(tokens) <= MAX_DIRECT_TOKENS:
            y = torch.ops.aten._weight_int8pack_mm(tokens.contiguous(), weight, scale)
        else:
            y = F.linear(tokens, weight.to(x.dtype)) * scale
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if layer.bias is None else y + layer.bias


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (INT8 [N, K], scales [N] in the weight's dtype) with weight about their product.

    The scale is rounded first, so that the integers make up for its rounding.
    """
    wide = weight.float()
    scale = (wide.abs().amax(dim=-1) / INT8_MAX).to(weight.dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    integers = (wide / scale.float()[:, None]).round().clamp(-INT8_MAX, INT8_MAX)
    return integers.to(torch.int8), scale
