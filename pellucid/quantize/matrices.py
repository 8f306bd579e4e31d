"""The matrices of one decoder layer: which there are, and their codes as the tensors of a checkpoint.

Matrices that the model keeps as one (q, k, v; gate and up) get their codes together, where groups are of
single rows: they have the same inputs, so whatever follows from these is made once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pellucid.layers.embedding import VocabEmbedding
from pellucid.layers.linear import Linear
from pellucid.layers.stage import Layers
from pellucid.layers.weight import Weight
from pellucid.quant.base import Sliced
from pellucid.quant.codes import Codes, Scales
from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import LayerFormat, Writes
from pellucid.quant.schemes.base import Kind


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of the checkpoint's: rows of a parameter [N, K] that may hold several."""

    name: str  # with ".weight"
    rows: slice
    layer: nn.Module
    kind: Kind

    @property
    def path(self) -> str:
        return self.name.removesuffix(".weight")

    def weight(self) -> Tensor:
        """float32 [N, K], a view."""
        parameter = self.layer.param("weight") if isinstance(self.layer, Linear) else self.layer.weight
        assert isinstance(parameter, Tensor)
        return parameter.detach()[self.rows]


def matrices_of(model: nn.Module) -> list[Matrix]:
    """All that may be quantized, each once."""
    inside = {part for layers in model.modules() if isinstance(layers, Layers) for part in layers.modules()}
    found: dict[str, Matrix] = {}
    for layer in model.modules():
        if not isinstance(layer, Linear | VocabEmbedding):
            continue
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if not isinstance(weight, Weight):
            continue
        kind: Kind = (
            "embedding" if isinstance(layer, VocabEmbedding) else "linear" if layer in inside else "head"
        )
        for name, rows in rows_by_name(weight).items():
            found.setdefault(name, Matrix(name, rows, layer, kind))
    return list(found.values())


def rows_by_name(weight: Weight) -> dict[str, slice]:
    """Where in a parameter each of the checkpoint's tensors is; one tensor may fill neighbouring parts."""
    if len(weight.sources) == 1:
        return {weight.sources[0]: slice(0, len(weight))}
    assert isinstance(weight.spec.place, Sliced) and weight.spec.place.part_axis == 0, weight.sources
    found, first = dict[str, slice](), 0
    for name, size in zip(weight.sources, weight.spec.place.sizes, strict=True):
        found[name] = slice(found[name].start if name in found else first, first + size)
        first += size
    return found


class Stored(NamedTuple):
    """A matrix and how it is to be stored."""

    matrix: Matrix
    format: LayerFormat


def together(stored: Sequence[Stored]) -> Iterator[list[Stored]]:
    """Those whose codes are made as one: of the same layer and format, if groups are of single rows."""
    runs: list[list[Stored]] = []
    for each in stored:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.matrix.layer is each.matrix.layer
            and last.format == each.format
            and each.format.group.rows == 1
        ):
            runs[-1].append(each)
        else:
            runs.append([each])
    yield from runs


def rows_of(codes: Codes, first: int, last: int) -> Codes:
    """Some outputs of a matrix whose groups are of single rows."""
    if (first, last) == (0, len(codes.q)):
        return codes

    def cut(scales: Scales | None) -> Scales | None:
        if scales is None:
            return None
        parts = (None if part is None else part if len(part) == 1 else part[first:last] for part in scales)
        return Scales(*parts)  # type: ignore[arg-type]

    return Codes(
        q=codes.q[first:last],
        code=codes.code,
        group=codes.group,
        scale=cut(codes.scale),
        zero=cut(codes.zero),
        offset=cut(codes.offset),
        index=codes.index,
        table=codes.table,
    )


def tensors_of(codes: Codes, format: LayerFormat, path: str) -> dict[str, Tensor]:
    """A matrix' tensors as its layout writes them, on the host, none in the memory of others."""
    layout = layout_of(format)
    if not isinstance(layout, Writes):
        raise ValueError(f"{format.layout} is read here, and not written; use another method")
    with codes.q.device:
        raw = layout.encode(codes, format)
    return {
        f"{path}{layout.joint}{suffix}": tensor.cpu().contiguous().clone() for suffix, tensor in raw.items()
    }


@torch.no_grad()
def numbers_of(codes: Codes) -> Tensor:
    """float32 [N, K]."""
    with codes.q.device:
        return codes.dequantized()
