"""Plain weights that become codes of 4 bits once they are loaded, and stay packed (`packed.py`).

Rounded to the nearest, integers with the clip of each group that loses least (`rounding.py`): what
`pellucid quantize` makes with methods that learn from a model's inputs is better, and takes a calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pellucid.kernels.packed.packed_weight import GroupCodes
from pellucid.platform import Platform
from pellucid.quant.base import LinearLayer, LinearShape, ParamSpec
from pellucid.quant.codes import E2M1, LUT4, U4, Group
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.packed import Packed, group_codes, kept_bits
from pellucid.quant.products import Product
from pellucid.quant.rounding import rounded, slices_of
from pellucid.quant.unquantized import Unquantized

LEAST_GROUP = 16


class WhenLoaded(Packed):
    """A layer whose matrix is rounded to a format with groups of up to `group` inputs."""

    layout: str
    code = U4
    group: int
    options: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__(self.format_for(self.group))

    def format_for(self, num_in: int) -> LayerFormat:
        """With groups that rows of `num_in` are whole ones of.  Raises ValueError if they are of none."""
        size = math.gcd(num_in, self.group)
        if size < LEAST_GROUP or (self.code == E2M1 and size < self.group):
            raise ValueError(
                f"a row of {num_in} inputs is not made of whole groups of {self.group}, which this needs; "
                "leave such layers out, as quantization={'linear': ..., 'ignore': [...]}, or use 'int8'"
            )
        return LayerFormat(layout=self.layout, code=self.code, group=Group(1, size), options=self.options)

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        self.format = self.format_for(shape.in_features)
        return super().choose(shape, platform)

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        spec = Unquantized().params(shape)["weight"]
        bits = kept_bits(self.format_for(shape.in_features), shape.in_features)
        return {"weight": ParamSpec(shape=spec.shape, dtype=spec.dtype, place=spec.place, kept_bits=bits)}

    def finish(self, layer: LinearLayer) -> None:
        weight = layer.param("weight").detach()
        layer.replace("weight", None)
        with weight.device:
            parts = [slices_of(part) for part in weight.split(list(layer.shape.out_partitions))]
            self.keep(layer, [below([self._rounded(rows) for rows in part]) for part in parts])

    def _rounded(self, rows: Tensor) -> GroupCodes:
        return group_codes(rounded(rows, self.format))


def below(parts: Sequence[GroupCodes]) -> GroupCodes:
    """Some outputs of a matrix below others, all with the same middle and table."""
    if len(parts) == 1:
        return parts[0]
    assert len({(part.middle, part.zero is None, part.offset is None) for part in parts}) == 1

    def joined(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    q, scale = joined("q"), joined("scale")
    assert q is not None and scale is not None
    return replace(parts[0], q=q, scale=scale, zero=joined("zero"), offset=joined("offset"))


class Int4(WhenLoaded):
    """A scale for each 128 inputs, around 0."""

    layout, code, group = "ct-pack", U4, 128


class Nf4(WhenLoaded):
    """bitsandbytes' table of 16 numbers, a scale for each 64 inputs (Dettmers et al. 2023)."""

    layout, code, group, options = "bnb4", LUT4, 64, frozenset({"nf4"})


class Mxfp4(WhenLoaded):
    """Floats of 4 bits, a power of two for each 32 inputs."""

    layout, code, group = "mxfp4", E2M1, 32
