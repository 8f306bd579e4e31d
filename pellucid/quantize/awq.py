"""AWQ (Lin et al. 2023): inputs that are large get finer codes, by scaling their weights up before rounding.

What is scaled up, whoever makes the inputs divides by (`folds`).  How much is searched for: powers of the
inputs' mean size, by the error of the layer's outputs.  Then each group is clipped where that error is least.

Legend: N outputs, K inputs, G groups of g inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.layers.linear import Linear
from pellucid.quant.codes import U4, Codes
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.rounding import Lost, grid_of, in_groups, rounded
from pellucid.quantize.base import COMPRESSED, Method, packed_format
from pellucid.quantize.folds import Fold
from pellucid.quantize.inputs import Statistics

NUM_EXPONENTS = 20
LEAST = 1e-4  # of inputs' size, of the largest


class Awq(Method):
    squares = True

    def formats(self) -> tuple[str, LayerFormat]:
        recipe = self.recipe
        if recipe.dialect == COMPRESSED or recipe.bits != 4 or recipe.symmetric:
            return COMPRESSED, packed_format(recipe, symmetric=False)
        return "awq", LayerFormat(layout="awq", code=U4, group=recipe.group)

    def prepare(self, folds: list[Fold], seen: dict[Linear, Statistics], format: LayerFormat) -> None:
        for fold in folds:
            readers = [reader for reader in fold.readers if reader in seen]
            if not readers:
                continue
            scale = fold.apply(best_scale(fold, [seen[reader] for reader in readers], format))
            for reader in readers:
                seen[reader] = seen[reader].divided(scale)

    def codes(self, weight: Tensor, format: LayerFormat, inputs: Statistics | None) -> Codes:
        if inputs is None:
            return rounded(weight, format)
        return rounded(weight, format, lost=of_outputs(inputs.hessian, format))


@torch.no_grad()
def best_scale(fold: Fold, inputs: list[Statistics], format: LayerFormat) -> Tensor:
    """[K]: of 20 powers of the inputs' mean size, from 0 on, the one under which outputs change least."""
    weights = [reader.param("weight") for reader in fold.readers]
    size = fold.tie(inputs[0].mean_abs)
    size = size.clamp_min(float(size.max()) * LEAST)
    hessian = inputs[0].hessian
    wanted = [energy(weight, hessian) for weight in weights]
    best, least = torch.ones_like(size), float("inf")
    for i in range(NUM_EXPONENTS):
        scale = size ** (i / NUM_EXPONENTS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        lost = sum(
            float(energy(nearest(weight * scale, format) / scale - weight, hessian) / whole)
            for weight, whole in zip(weights, wanted, strict=True)
        )
        if lost < least:
            best, least = scale, lost
    return best


def energy(weight: Tensor, hessian: Tensor) -> Tensor:
    """The mean square of what weights [N, K] make of the inputs, summed over outputs."""
    return (weight @ hessian).mul_(weight).sum()


def nearest(weight: Tensor, format: LayerFormat) -> Tensor:
    """Weights [N, K] as the format would round them, not clipped."""
    groups = in_groups(weight, format.group)
    grid = grid_of(groups, format)
    return grid.numbers(grid.round(groups)).flatten(1)[:, : weight.shape[1]]


def of_outputs(hessian: Tensor, format: LayerFormat) -> Lost:
    """What errors [N, G, g] cost in outputs, as if each group were alone."""
    size = format.group.inputs or len(hessian)
    padding = -len(hessian) % size
    padded = torch.nn.functional.pad(hessian, (0, padding, 0, padding))
    blocks = torch.stack(
        [padded[i : i + size, i : i + size] for i in range(0, len(padded), size)]
    )  # [G, g, g]

    def lost(errors: Tensor) -> Tensor:
        by_group = errors.transpose(0, 1)  # [G, N, g]
        return torch.bmm(by_group, blocks).mul_(by_group).sum(-1).T

    return lost
