"""The door for layouts: how a checkpoint's files hold one quantized matrix.

A layout says which tensors there are and how they become `Codes`, of which ranks then take their slices; some
write codes back.
Knows nothing of config files (that is `quant/schemes/`), of layers, and of how a device holds codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pellucid.quant.codes import PLAIN, ROW, Code, Codes, Group

Raw = Mapping[str, Tensor]  # a matrix' tensors by the checkpoint's suffix, such as "qweight"
ActType = Literal["plain", "e4m3", "s8", "e2m3", "e2m1"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class MatrixShape(NamedTuple):
    """W [out, inn], or [experts, out, inn]."""

    out: int
    inn: int
    experts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActFormat:
    """How a checkpoint wants activations rounded.

    group: inputs that share a scale, 0 is a row.  static: one scale for all, which the checkpoint has.
    symmetric: without a zero point.
    """

    type: ActType = "plain"
    group: int = 0
    static: bool = False
    symmetric: bool = True


PLAIN_ACT = ActFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormat:
    """All that a config says of one layer.  layout: a name in LAYOUTS, whose file lists the options."""

    layout: str
    code: Code = PLAIN
    group: Group = ROW
    act: ActFormat = PLAIN_ACT
    options: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of a layout.  shape: (-1,) is any.  dtypes: those that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    required: bool = True


class Layout(Protocol):
    """How files hold a matrix.  joint: what stands between its name and the suffixes of its tensors."""

    joint: str = "."

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        """Its tensors, by the checkpoint's suffix.  Raises ValueError for a shape that it cannot hold."""
        ...

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        """The codes in its tensors.  Raises ValueError if these are not what `params` says."""
        ...


@runtime_checkable
class Writes(Protocol):
    """A layout that can also be written."""

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        """`decode` backwards: the tensors that hold these codes."""
        ...


def checked(raw: Raw, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """The tensors of a layout, with the shapes of `specs`; axes of length 1 may be missing or too many.

    Raises ValueError for one that is missing, misshapen or of another dtype, and says what was expected.
    """
    found: dict[str, Tensor] = {}
    for name, spec in specs.items():
        tensor = raw.get(name)
        if tensor is None:
            if spec.required:
                raise ValueError(f"{name} is missing; this layout has {', '.join(specs)}")
            continue
        if -1 not in spec.shape and [n for n in tensor.shape if n != 1] != [n for n in spec.shape if n != 1]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(spec.shape)}")
        if tensor.dtype not in spec.dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
            raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected {known}")
        found[name] = tensor.reshape(spec.shape)
    return found


def groups_by_input(index: Tensor, groups: int) -> Tensor:
    """The group of each input, int64 [K].  Raises ValueError for one that there is not."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise ValueError(f"g_idx names groups {int(index.min())} to {int(index.max())} of {groups}")
    return index.long()


def divided(features: int, per: int, what: str) -> int:
    """features / per.  Raises ValueError if that is no whole number: such a matrix cannot be stored so."""
    if per < 1 or features % per:
        raise ValueError(f"{features} {what} are not whole units of {per}, which this layout needs")
    return features // per
