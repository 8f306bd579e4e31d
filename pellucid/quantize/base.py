"""The door for methods: how a layer's matrices become codes.  One file a method, and a line in METHODS.

A method says how matrices will be stored, may scale what layers hand each other, and makes codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pellucid.layers.linear import Linear
from pellucid.models.checkpoint import Checkpoint
from pellucid.quant.codes import S8, U2, U3, U4, U5, U6, Codes, Group
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.rounding import rounded
from pellucid.quant.schemes.base import EVERYTHING, LINEAR, Rule
from pellucid.quantize.folds import Fold
from pellucid.quantize.inputs import Statistics
from pellucid.registry import Registry

ActOrder = Literal["static", "group", "none"]
INTEGERS = {2: U2, 3: U3, 4: U4, 5: U5, 6: U6, 7: S8, 8: S8}
COMPRESSED = "compressed-tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is asked for.  bits, group_size, symmetric and act_order are for methods of integers.

    group_size: inputs that share a scale; 0 is all of a row.  symmetric: no zeros; None: the method's custom.
    act_order: GPTQ takes inputs by their size, groups staying where they are (static) or following (group).
    dialect: of the config and the files; None: the method's custom.  ignore: layers that stay plain, by name,
    or by a regular expression behind `re:`.
    """

    method: str
    bits: int = 4
    group_size: int = 128
    symmetric: bool | None = None
    act_order: ActOrder = "static"
    dialect: str | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        METHODS.check(self.kind)
        if self.bits not in INTEGERS:
            raise ValueError(f"bits is {self.bits}, must be 2 to 8")
        if self.group_size < 0 or self.group_size % 8:
            raise ValueError(f"group_size is {self.group_size}, must be a multiple of 8; 0 is a whole row")

    @property
    def kind(self) -> str:
        """The method's name in METHODS; behind a colon there may be more."""
        return self.method.partition(":")[0]

    @property
    def group(self) -> Group:
        return Group(1, self.group_size)


class Method:
    """One way to make codes.  squares: whether it asks for the products of all pairs of inputs."""

    squares = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def formats(self) -> tuple[str, LayerFormat]:
        """The dialect of the config, and how matrices are stored.  Raises ValueError for what it has not."""
        raise NotImplementedError

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError for a model that this is not made of."""

    def rules(self, format: LayerFormat, checkpoint: Checkpoint) -> tuple[Rule, ...]:
        """How each matrix is stored that is not ignored."""
        return (Rule(EVERYTHING, format, LINEAR),)

    def prepare(self, folds: list[Fold], seen: dict[Linear, Statistics], format: LayerFormat) -> None:
        """Scale a layer's weights, still plain, such that the layer computes the same; `seen` follows."""

    def codes(self, weight: Tensor, format: LayerFormat, inputs: Statistics | None) -> Codes:
        """weight: float32 [N, K].  inputs: None where nothing was run, as for the head."""
        return rounded(weight, format)

    def beside(self, format: LayerFormat, inputs: Statistics) -> Mapping[str, Tensor]:
        """Further tensors of a matrix, by suffix."""
        return {}


METHODS: Registry[type[Method]] = Registry(
    "method of quantization",
    {
        "fp8": f"{__package__}.rounding:Fp8",
        "fp8-block": f"{__package__}.rounding:Fp8Blocks",
        "fp8-static": f"{__package__}.rounding:Fp8Static",
        "int8": f"{__package__}.rounding:Int8",
        "int4": f"{__package__}.rounding:Integers",
        "nf4": f"{__package__}.rounding:Nf4",
        "mxfp4": f"{__package__}.rounding:Mxfp4",
        "nvfp4": f"{__package__}.rounding:Nvfp4",
        "smoothquant": f"{__package__}.smoothquant:SmoothQuant",
        "awq": f"{__package__}.awq:Awq",
        "gptq": f"{__package__}.gptq:Gptq",
        "gguf": f"{__package__}.gguf:Gguf",
    },
)


def packed_format(recipe: Recipe, *, symmetric: bool = True) -> LayerFormat:
    """compressed-tensors' integers of 2 to 8 bits.  symmetric: the method's custom."""
    options = {"7_bits"} if recipe.bits == 7 else set[str]()
    if not (symmetric if recipe.symmetric is None else recipe.symmetric):
        options.add("asym")
    code = INTEGERS[recipe.bits]
    return LayerFormat(layout="ct-pack", code=code, group=recipe.group, options=frozenset(options))
