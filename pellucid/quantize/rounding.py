"""To the nearest code: nothing is learned of a layer's inputs, but for the scales of static activations."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pellucid.quant.codes import E2M1, E4M3, LUT4, S8, WHOLE_MATRIX, Group
from pellucid.quant.layouts.base import ActFormat, LayerFormat
from pellucid.quant.rounding import FP8_MAX
from pellucid.quantize.base import COMPRESSED, Method, packed_format
from pellucid.quantize.inputs import Statistics


class Rounding(Method):
    """One format whatever is asked for."""

    stored: tuple[str, LayerFormat]

    def formats(self) -> tuple[str, LayerFormat]:
        return self.stored


class Fp8(Rounding):
    """A scale for each output; activations are rounded as they come."""

    stored = COMPRESSED, LayerFormat(layout="scaled", code=E4M3, act=ActFormat(type="e4m3"))


class Fp8Blocks(Rounding):
    """A scale for each block of 128 x 128 (DeepSeek-V3 2024)."""

    stored = (
        "fp8",
        LayerFormat(
            layout="fp8-blocks", code=E4M3, group=Group(128, 128), act=ActFormat(type="e4m3", group=128)
        ),
    )


class Fp8Static(Rounding):
    """One scale for a matrix and one for all its activations, by the largest that samples have."""

    stored = (
        COMPRESSED,
        LayerFormat(layout="scaled", code=E4M3, group=WHOLE_MATRIX, act=ActFormat(type="e4m3", static=True)),
    )

    def beside(self, format: LayerFormat, inputs: Statistics) -> Mapping[str, Tensor]:
        return {"input_scale": (inputs.max_abs.max() / FP8_MAX).reshape(1)}


class Int8(Rounding):
    """A scale for each output; activations are rounded as they come."""

    stored = COMPRESSED, LayerFormat(layout="scaled", code=S8, act=ActFormat(type="s8"))


class Nf4(Rounding):
    """bitsandbytes' table of 16 numbers (Dettmers et al. 2023)."""

    stored = (
        "bitsandbytes",
        LayerFormat(layout="bnb4", code=LUT4, group=Group(1, 64), options=frozenset({"nf4"})),
    )


class Mxfp4(Rounding):
    """Floats of 4 bits, a power of two for each 32 inputs."""

    stored = COMPRESSED, LayerFormat(layout="mxfp4", code=E2M1, group=Group(1, 32))


class Nvfp4(Rounding):
    """Floats of 4 bits, an e4m3 for each 16 inputs."""

    stored = COMPRESSED, LayerFormat(layout="nvfp4", code=E2M1, group=Group(1, 16))


class Integers(Rounding):
    """2 to 8 bits; each group is clipped where its squared error is least."""

    def formats(self) -> tuple[str, LayerFormat]:
        return COMPRESSED, packed_format(self.recipe)
