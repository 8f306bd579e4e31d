"""The matrices of one decoder layer: which there are, and their codes as the tensors of a checkpoint.

Matrices that the model keeps as one (q, k, v; gate and up) get their codes together, where groups are of
single rows: they have the same inputs, so whatever follows from these is made once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pellucid.layers.embedding import VocabEmbedding
from pellucid.layers.experts import Experts
from pellucid.layers.linear import Linear
from pellucid.layers.stage import Layers
from pellucid.layers.weight import Weight
from pellucid.quant.base import ExpertMatrix, Sliced
from pellucid.quant.codes import Codes, Scales
from pellucid.quant.expert_places import OneByOne
from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import LayerFormat, Writes
from pellucid.quant.schemes.base import Kind


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of the checkpoint's: a part of a parameter that may hold several.

    part: rows of [N, K]; of experts which expert, and which of the matrices whose rows lie by turns.
    """

    name: str  # with ".weight"
    part: slice | tuple[int, int]
    layer: nn.Module
    kind: Kind
    parameter: ExpertMatrix | None = None  # of experts
    stays: bool = False  # plain, whatever the rules say: a router's

    @property
    def path(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def fed(self) -> Hashable:
        """What `watched` knows its inputs by."""
        if isinstance(self.part, slice):
            return self.layer
        return self.layer, self.part[0], self.parameter

    def weight(self) -> Tensor:
        """float32 [N, K], a view."""
        layer = self.layer
        if isinstance(layer, Experts):
            assert self.parameter is not None
            return part_of(layer.matrix(self.parameter), self.part)
        parameter = layer.param("weight") if isinstance(layer, Linear) else layer.weight
        assert isinstance(parameter, Tensor)
        return part_of(parameter, self.part)


def part_of(parameter: Tensor, part: slice | tuple[int, int]) -> Tensor:
    """A view of a matrix."""
    if isinstance(part, slice):
        return parameter.detach()[part]
    expert, matrix = part
    assert isinstance(parameter, Weight) and isinstance(parameter.spec.place, OneByOne)
    return parameter.detach()[expert].unflatten(0, (-1, parameter.spec.place.num_merged))[:, matrix]


def matrices_of(model: nn.Module) -> list[Matrix]:
    """All that may be quantized, each once."""
    inside = {part for layers in model.modules() if isinstance(layers, Layers) for part in layers.modules()}
    mixtures = [layer for layer in model.modules() if isinstance(layer, Experts)]
    staying = {part for mixture in mixtures for part in mixture.router.modules()}
    staying |= {each.shared.gate for each in mixtures if each.shared and each.shared.gate}
    found = {each.name: each for mixture in mixtures for each in matrices_of_experts(mixture)}
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
            found.setdefault(name, Matrix(name, rows, layer, kind, stays=layer in staying))
    return list(found.values())


def matrices_of_experts(mixture: Experts) -> Iterator[Matrix]:
    """Raises ValueError if all experts are one tensor, of which no tool's format has the codes."""
    parameters: tuple[ExpertMatrix, ...] = ("gate_up", "down")
    for parameter in parameters:
        weight = mixture.matrix(parameter)
        if not isinstance(weight.spec.place, OneByOne):
            raise ValueError(
                f"{weight.sources[0]} holds all experts of a layer, and only checkpoints with a tensor for "
                "each expert's matrix are quantized ahead; serve it with quantization='fp8', 'int4' or "
                "'mxfp4'"
            )
        for name, part in parts_by_name(weight).items():
            yield Matrix(name, part, mixture, "experts", parameter)


def parts_by_name(weight: Weight) -> Mapping[str, slice | tuple[int, int]]:
    """Where in a parameter each of the checkpoint's tensors is."""
    if isinstance(weight.spec.place, OneByOne):
        return {name: divmod(i, weight.spec.place.num_merged) for i, name in enumerate(weight.sources)}
    return rows_by_name(weight)


def rows_by_name(weight: Weight) -> dict[str, slice]:
    """The same of rows [N, K]; one tensor may fill neighbouring parts."""
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
            and each.matrix.kind != "experts"
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
