"""SmoothQuant (Xiao et al. 2022): outliers of activations move into weights before both become INT8.

Inputs are divided by s = max|x|^a / max|w|^(1 - a), weights multiplied by it; `a` is searched for, by the
error of outputs whose activations are rounded, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.layers.linear import Linear
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.rounding import rounded
from pellucid.quantize.folds import Fold
from pellucid.quantize.inputs import Statistics
from pellucid.quantize.rounding import Int8

NUM_EXPONENTS = 20
INT8_MAX = 127
LEAST = 1e-5


class SmoothQuant(Int8):
    def prepare(self, folds: list[Fold], seen: dict[Linear, Statistics], format: LayerFormat) -> None:
        for fold in folds:
            readers = [reader for reader in fold.readers if reader in seen]
            if not readers:
                continue
            scale = fold.apply(best_scale(fold, seen[readers[0]], format))
            for reader in readers:
                seen[reader] = seen[reader].divided(scale)


@torch.no_grad()
def best_scale(fold: Fold, inputs: Statistics, format: LayerFormat) -> Tensor:
    """[K]: by the exponent under which outputs change least; ones, if none is better than that."""
    weight = torch.cat([reader.param("weight") for reader in fold.readers])
    of_x, of_w = (fold.tie(size).clamp_min(LEAST) for size in (inputs.max_abs, weight.abs().amax(0)))
    wanted = inputs.rows @ weight.T

    def lost(scale: Tensor) -> float:
        x, w = int8_rows(inputs.rows / scale), rounded(weight * scale, format).dequantized()
        return float((x @ w.T - wanted).square().sum())

    best = torch.ones_like(of_x)
    least = lost(best)
    for i in range(NUM_EXPONENTS + 1):
        a = i / NUM_EXPONENTS
        scale = of_x**a / of_w ** (1 - a)
        scale = scale / (scale.max() * scale.min()).sqrt()
        loss = lost(scale)
        if loss < least:
            best, least = scale, loss
    return best


def int8_rows(x: Tensor) -> Tensor:
    """Rows as a product of INT8 takes them, with a scale of their own."""
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / INT8_MAX
    return (x / step).round() * step
