"""FP8 weights (E4M3) and FP8 activations: quantized while plain weights load, or stored so by other tools.

A product is (x / s_x) (w / s_w)^T in FP8 with float32 sums, times s_x s_w: one scale for each output, and one
for each token or, if the checkpoint brings it, one for all tokens.  GPUs from Hopper on multiply in FP8; all
other machines multiply the same rounded numbers in float32, exact but slow: there it is for checking results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.quant.base import (
    Kind,
    LinearLayer,
    LinearMethod,
    LinearShape,
    ParamSpec,
    Place,
    ScalarPerPart,
    matrix,
    stored_as,
    vector,
)
from pellucid.quant.unquantized import Unquantized

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

WeightScale = Literal["tensor", "channel"]
Activations = Literal["dynamic", "static"]


class Fp8Scheme:
    """Native FP8 checkpoints (quant_method "fp8"), and plain ones quantized as they load.

    The head is never quantized, nor are the layers that the checkpoint names as left out.
    """

    def __init__(self, activations: Activations | None = None, ignored: tuple[str, ...] = ()) -> None:
        self.activations: Activations | None = activations  # None: the checkpoint is plain
        self.ignored = ignored

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, object]) -> Self | None:
        if stored_as(config) != "fp8":
            return None
        quantization = config["quantization_config"]
        assert isinstance(quantization, dict), quantization
        block = quantization.get("weight_block_size")
        if block is not None:
            raise ValueError(
                f"weight_block_size in config.json is {block}, and scales of blocks are not supported; use a "
                "checkpoint with a scale for each tensor, or plain weights with quantization='fp8'"
            )
        said = quantization.get("activation_scheme", "dynamic")
        if said not in ("dynamic", "static"):
            raise ValueError(f"activation_scheme in config.json is {said!r}, must be dynamic or static")
        activations: Activations = "static" if said == "static" else "dynamic"
        ignored = quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or ()
        return cls(activations, tuple(ignored))

    @classmethod
    def online(cls) -> Self | None:
        return cls()

    def method(self, prefixes: tuple[str, ...], kind: Kind) -> LinearMethod | None:
        ignored = {any(covers(entry, prefix) for entry in self.ignored) for prefix in prefixes}
        if len(ignored) > 1:
            return None
        if kind == "head" or ignored == {True}:
            return Unquantized()
        return QuantizedWhenLoaded() if self.activations is None else Fp8("tensor", self.activations)


def covers(entry: str, prefix: str) -> bool:
    """Whether a list's entry means this layer: its path, the path of what it is part of, or its last name."""
    return prefix == entry or prefix.startswith(entry + ".") or prefix.endswith("." + entry)


class Fp8:
    """FP8 weights from a checkpoint."""

    def __init__(self, weight_scale: WeightScale, activations: Activations) -> None:
        self.weight_scale: WeightScale = weight_scale
        self.activations: Activations = activations
        self._product: Fp8Product | None = None

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        parts = len(shape.out_partitions)
        params = {
            "weight": ParamSpec(
                shape=(shape.out_features, shape.in_features), dtype=FP8, place=matrix(shape)
            ),
            "weight_scale": self._scale((parts,), ScalarPerPart())
            if self.weight_scale == "tensor"
            else self._scale((shape.out_features, 1), vector(shape)),
        }
        if self.activations == "static":
            params["input_scale"] = self._scale((parts,), ScalarPerPart())
        return params

    def finish(self, layer: LinearLayer) -> None:
        """Merged parts keep their own scales: there is one for each output."""
        scale = layer.param("weight_scale")
        if self.weight_scale == "tensor":
            sizes = torch.tensor(layer.shape.out_partitions, device=scale.device)
            scale = scale.repeat_interleave(sizes)
        # The parts see the same inputs; the largest of their scales loses none of them.
        static = layer.param("input_scale").max() if self.activations == "static" else None
        self._product = Fp8Product(layer, layer.param("weight"), scale.view(-1), static)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        assert self._product is not None, "finish() was not called after loading"
        return self._product(layer, x)

    @staticmethod
    def _scale(shape: tuple[int, ...], place: Place) -> ParamSpec:
        return ParamSpec(shape=shape, dtype=torch.float32, place=place, fill="near_one")


class QuantizedWhenLoaded:
    """Plain weights that become FP8 once they are loaded, with a scale for each output."""

    def __init__(self) -> None:
        self._product: Fp8Product | None = None

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        return Unquantized().params(shape)

    def finish(self, layer: LinearLayer) -> None:
        weight, scale = quantize_rows(layer.param("weight"))
        self._product = Fp8Product(layer, weight, scale.view(-1), None)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        assert self._product is not None, "finish() was not called after loading"
        return self._product(layer, x)


class Fp8Product:
    """The product with an FP8 matrix [N, K], which becomes the layer's "weight".

    scale: [N] of the outputs.  static: of all inputs; None gives each token its own.
    """

    def __init__(self, layer: LinearLayer, weight: Tensor, scale: Tensor, static: Tensor | None) -> None:
        layer.replace("weight", weight.detach())
        layer.replace("weight_scale", scale.float()[None].contiguous())
        if static is not None:
            layer.replace("input_scale", static.float().detach())
        self.is_static = static is not None
        self.in_hardware = can_multiply(weight)

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        if self.is_static:
            scale = layer.param("input_scale")
            quantized, scale = round_to_fp8(tokens.float() / scale), scale.expand(len(tokens), 1)
        else:
            quantized, scale = quantize_rows(tokens)
        # Hardware products round to bfloat16, which would cost other dtypes their precision.
        if self.in_hardware and x.dtype == torch.bfloat16 and len(tokens):
            weight, weight_scale = layer.param("weight").t(), layer.param("weight_scale")
            y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                quantized, weight, scale_a=scale.contiguous(), scale_b=weight_scale, out_dtype=x.dtype
            )
        else:
            y = F.linear(quantized.float(), layer.param("weight").float())
            y = (y * scale * layer.param("weight_scale")).to(x.dtype)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if layer.bias is None else y + layer.bias


def can_multiply(weight: Tensor) -> bool:
    """Whether this device multiplies such FP8 matrices with a scale for each row and column."""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    return all(size % 16 == 0 for size in weight.shape)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (FP8 [T, K], float32 scales [T, 1]), with x about their product."""
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return round_to_fp8(x / scale), scale


def round_to_fp8(x: Tensor) -> Tensor:
    """The nearest FP8 number, 448 at most."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
