"""A merged linear layer of random weights, to test how methods store and multiply it."""

from __future__ import annotations

import torch

from pellucid.layers.linear import Linear
from pellucid.layers.weight import Weight
from pellucid.quant.base import WHOLE, LinearMethod, LinearShape, ParamSpec, vector


def make_linear(
    method: LinearMethod, dtype: torch.dtype, *, bias: bool = False, device: str = "cpu"
) -> Linear:
    """A layer of 96 inputs and 48 + 32 outputs, its weights random and not finished."""
    shape = LinearShape(in_features=96, out_partitions=(48, 32), split="out", dtype=dtype)
    specs = method.params(shape)
    specs["bias"] = ParamSpec(shape=(80,), dtype=dtype, place=vector(shape))
    weights = {
        name: Weight.of(spec, ("a", "b"), (WHOLE, WHOLE), torch.device(device))
        for name, spec in specs.items()
    }
    generator = torch.Generator(device).manual_seed(1)
    for weight in weights.values():
        weight.allocate()
        weight.fill(generator)
    added = weights.pop("bias")
    return Linear(shape, method, weights, added if bias else None)
