"""Which product multiplies each kind of weights on which machine: the one place that decides.

Pure: a decision follows from the layer's format and shape and from the platform alone, so that all of them
can be walked through on any machine.  What the methods of `quant/` then do is what was decided, and the log
has a line for each kind (`models/kinds.py`).  What no product serves is refused before weights are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from pellucid.platform import Platform, check_platform
from pellucid.quant.base import LinearShape

FEW_BLOCKS = (32, 64, 128)  # inputs, of which kernels for few rows take whole ones


class Multiplier(Enum):
    """What multiplies, and how the log calls it."""

    LIBRARY = "torch's product"
    NATIVE = "native code, packed once"
    PACKED = "oneDNN's product, packed once"
    TUNED = "kernels for few rows and for gates, torch's product for the rest"
    FP8_ROWS = "torch._scaled_mm in FP8, kernels for few rows"
    FP8_KERNELS = "a kernel in FP8, others for few rows"
    FP8_BLOCKS = "torch._scaled_mm in FP8 where it takes such blocks, kernels for up to 128 rows and else"
    FP8_KERNEL = "a kernel in FP8"
    INT8_KERNELS = "kernels in INT8, activations rounded to it"
    WEIGHT_ONLY = "a kernel that widens weights in registers, activations as they are"
    UNPACKED = (
        "kernels that unpack codes in registers, activations as they are; many rows by torch's product of "
        "their numbers"
    )
    SLICES = "numbers made of the codes at every call: saves memory and costs time"
    WIDENED = "weights widened at every call: saves memory and costs time"
    REFERENCE = "rounded numbers in float32, exact and slow: to check results"


@dataclass(frozen=True, slots=True)
class Product:
    """The product of a linear layer."""

    kind: str  # of its weights, such as "int8 rows"
    multiplier: Multiplier
    why: str = ""  # by nothing faster or smaller

    def __str__(self) -> str:
        return f"{self.kind}: {self.multiplier.value}{f', for {self.why}' if self.why else ''}"

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded to a byte."""
        others = Multiplier.FP8_KERNEL, Multiplier.REFERENCE
        return self.has_few_rows or self.multiplier in others

    @property
    def copies(self) -> bool:
        """Whether plain weights are laid out anew, so that whoever shares them needs the others, too."""
        return self.multiplier in (Multiplier.NATIVE, Multiplier.PACKED)

    @property
    def has_few_rows(self) -> bool:
        """Whether few rows of bytes have kernels of their own."""
        fp8 = Multiplier.FP8_ROWS, Multiplier.FP8_KERNELS, Multiplier.FP8_BLOCKS
        return self.multiplier in (*fp8, Multiplier.INT8_KERNELS)


def plain_product(dtype: torch.dtype, platform: Platform, *, packs: bool, native: bool = False) -> Product:
    """For weights in the activations' dtype.

    packs: whether this CPU multiplies packed bfloat16.  native: code was compiled for it that does, too.
    """
    check_platform(platform)
    if platform.device == "cpu":
        multiplier = Multiplier.PACKED if packs else Multiplier.LIBRARY
        multiplier = Multiplier.NATIVE if native else multiplier
        multiplier = multiplier if dtype == torch.bfloat16 else Multiplier.LIBRARY
    else:
        multiplier = Multiplier.TUNED if dtype.itemsize == 2 else Multiplier.LIBRARY
    return Product(name_of(dtype), multiplier)


def int8_product(
    platform: Platform,
    dtype: torch.dtype,
    *,
    rounds: bool = False,
    is_static: bool = False,
    packs: bool = False,
    native: bool = False,
) -> Product:
    """For INT8 with a scale for each output, and activations of `dtype`.

    rounds: GPUs round these to INT8, too; CPUs always to integers of 16 bits.  is_static: by one scale of
    all, from the checkpoint.  packs: whether this machine has a layout of its own for the weights that
    multiplies them exactly.  native: code was compiled for this CPU that does.
    """
    check_platform(platform)
    if platform.device == "cuda":
        if rounds:
            return Product(f"int8 rows{', static activations' * is_static}", Multiplier.INT8_KERNELS)
        unpacks = packs and dtype.itemsize == 2
        return Product("int8 rows", Multiplier.UNPACKED if unpacks else Multiplier.WEIGHT_ONLY)
    if native:
        return Product("int8 rows", Multiplier.NATIVE)
    return Product("int8 rows", Multiplier.PACKED if packs else Multiplier.WIDENED)


def fp8_product(shape: LinearShape, platform: Platform, *, block: int, is_static: bool = False) -> Product:
    """For FP8 with a scale for each output and `block` inputs; all of them: for whole rows.

    is_static: one scale of all activations, from the checkpoint.
    """
    check_platform(platform)
    is_rows = block == shape.in_features
    kind = f"fp8 {'rows' if is_rows else f'blocks of {block} inputs'}{', static activations' * is_static}"
    if platform.device == "cpu":
        return Product(kind, Multiplier.REFERENCE)
    if not platform.reaches(8, 9):
        return Product(kind, Multiplier.WEIGHT_ONLY)
    if is_rows and vendor_multiplies(shape, platform):
        return Product(kind, Multiplier.FP8_ROWS)
    if block == 128 and platform.is_hopper and vendor_multiplies_blocks(shape):
        return Product(kind, Multiplier.FP8_BLOCKS)
    has_few_rows = (is_rows or block in FEW_BLOCKS) and shape.dtype.itemsize == 2
    return Product(kind, Multiplier.FP8_KERNELS if has_few_rows else Multiplier.FP8_KERNEL)


def packed_product(kind: str, platform: Platform, *, native: bool = False) -> Product:
    """For codes that stay packed.  kind: of them, such as "awq u4, 4 bits".  native: see `int8_product`."""
    check_platform(platform)
    if platform.device == "cuda":
        return Product(kind, Multiplier.UNPACKED)
    return Product(kind, Multiplier.NATIVE if native else Multiplier.SLICES)


def vendor_multiplies_blocks(shape: LinearShape) -> bool:
    """Whether torch._scaled_mm takes a scale for each 128 x 128 weights: on Hopper, of whole blocks.

    Four blocks of inputs are 16 bytes of scales, of which a row must have whole ones.
    """
    are_whole = shape.in_features % 512 == 0 and not any(part % 128 for part in shape.out_partitions)
    return shape.dtype == torch.bfloat16 and are_whole


def vendor_multiplies(shape: LinearShape, platform: Platform) -> bool:
    """Whether torch._scaled_mm takes a scale for each row: it gives bfloat16 alone, in tiles of 16.

    From compute capability 12.0 on some builds of torch have it and some do not.
    """
    is_tiled = shape.in_features % 16 == 0 and shape.out_features % 16 == 0
    return shape.dtype == torch.bfloat16 and is_tiled and not platform.reaches(12)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
