"""Quantized matrices as plain ones, decoded when they are read: what serves every format on every machine.

A layer that multiplies codes themselves asks for their tensors by name, and gets them as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import LayerFormat, Layout, MatrixShape, TensorSpec
from pellucid.weights.source import Header, TensorSource

if TYPE_CHECKING:
    from pellucid.quant.codes import Codes

WEIGHT = ".weight"
# What changes a matrix' numbers: a layout that has no such tensor cannot read one that has.
MEANINGFUL = frozenset(
    {"weight_zero_point", "weight_g_idx", "pre_quant_scale", "weight_global_scale", "weight_scale_2"}
)
PLAIN = ("F32", "F16", "BF16")
# Ends of names of experts' codes, which no dot precedes.
JOINED = ("_blocks", "_scales", "_scale", "_weight_scale", "_weight_scale_2", "_input_scale")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantized matrix: where its tensors are, and how to read them."""

    path: str  # its name without ".weight"
    format: LayerFormat

    @property
    def layout(self) -> Layout:
        return layout_of(self.format)

    def name(self, suffix: str) -> str:
        return f"{self.path}{self.layout.joint}{suffix}"

    def specs(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        return self.layout.params(self.format, matrix_shape(shape))


class Decoded:
    """A source of which quantized matrices are read as float32, each by its name with ".weight"."""

    def __init__(self, source: TensorSource, formats: Mapping[str, LayerFormat], wanted: Set[str]) -> None:
        """formats: by a matrix' path.  wanted: all names that the model has, on any rank."""
        self._source, self._wanted = source, wanted
        self._below: dict[str, list[str]] = {name.removesuffix(WEIGHT): [] for name in wanted}
        for name in source.infos:
            for path in paths_of(name):
                if path in self._below:
                    self._below[path].append(name)
        self.matrices = {
            name: Matrix(path, format)
            for name in wanted
            if name.endswith(WEIGHT)
            if (format := formats.get(path := name.removesuffix(WEIGHT))) and self._is_coded(path)
        }
        coded = {tensor for matrix in self.matrices.values() for tensor in self._below[matrix.path]}
        others = {name for name in source.infos if name not in coded or name in wanted or self._adds(name)}
        self.names = others | self.matrices.keys()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def _is_coded(self, path: str) -> bool:
        """Is there more than a plain matrix, and nobody who asks for it as it is stored?"""
        weight = path + WEIGHT
        more = [name for name in self._below[path] if name not in (weight, path + ".bias")]
        info = self._source.infos.get(weight)
        is_plain = info is None or info.type in PLAIN
        return not any(name in self._wanted for name in more) and (bool(more) or not is_plain)

    def _adds(self, name: str) -> bool:
        """Is it a bias that changes anything?  Old tools wrote zeros for matrices that have none."""
        return name.endswith(".bias") and bool(self._source.read(name).any())

    def key(self, name: str) -> str:
        """What its file calls it, or its codes."""
        if name not in self.matrices:
            return self._source.key(name)
        below = self._below[self.matrices[name].path]
        return next((each for each in below if not each.endswith(".bias")), below[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is no matrix of codes."""
        return self._source.infos[name].shape

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the tensors of a matrix of codes cannot be those of such a matrix [N, K]."""
        matrix = self.matrices[name]
        specs = matrix.specs(shape)
        for suffix in MEANINGFUL - specs.keys():
            beside = matrix.name(suffix)
            if beside in self._source.infos and bool(self._source.read(beside).any()):
                raise ValueError(f"has {suffix} beside it, of which the config says nothing")
        for suffix, spec in specs.items():
            info = self._source.infos.get(matrix.name(suffix))
            if info is None and spec.required:
                raise ValueError(f"lacks {matrix.name(suffix)}, which {matrix.format.layout} has")
            if (
                info is None or -1 in spec.shape or tuple(info.shape) == shape
            ):  # ggml's headers have the matrix'
                continue
            if without_ones(info.shape) != without_ones(spec.shape) and not holds_bytes(info, spec):
                raise ValueError(f"has {suffix} {info.shape}, this model expects {spec.shape}")

    def read(self, name: str) -> Tensor:
        """A tensor that is no matrix of codes, in host memory."""
        return self._source.read(name)

    def decode(self, name: str, shape: tuple[int, ...], device: torch.device) -> Codes:
        """A matrix of codes [N, K] or [E, N, K] on the device, where they are read."""
        matrix = self.matrices[name]
        names = {suffix: matrix.name(suffix) for suffix in matrix.specs(shape)}
        with device:
            raw = {
                suffix: self._source.read(name).to(device)
                for suffix, name in names.items()
                if name in self._source.infos
            }
            try:
                codes = matrix.layout.decode(raw, matrix.format, matrix_shape(shape))
                check_finite(codes)
                return codes
            except ValueError as error:
                raise ValueError(f"{self.key(name)}, a matrix of {matrix.format.layout}: {error}") from error


def check_finite(codes: Codes) -> None:
    """Raise ValueError if the numbers that codes are scaled by are none."""
    for what, scales in (("scales", codes.scale), ("zeros", codes.zero), ("offsets", codes.offset)):
        if scales is None or not scales.values.is_floating_point():
            continue
        for numbers in scales:
            if numbers is not None and not bool(numbers.float().isfinite().all()):
                raise ValueError(f"its {what} are not all finite; quantize the model again")


def paths_of(name: str) -> Iterator[str]:
    """The paths that a tensor's name begins with, or is."""
    yield name
    for joined in JOINED:
        if name.endswith(joined):
            yield name.removesuffix(joined)
    end = name.rfind(".")
    while end > 0:
        yield name[:end]
        end = name.rfind(".", 0, end)


def matrix_shape(shape: tuple[int, ...]) -> MatrixShape:
    """[N, K], or with experts before them."""
    return MatrixShape(*shape[-2:], *shape[:-2])


def without_ones(shape: Iterable[int]) -> list[int]:
    """Axes of length 1 are written or not."""
    return [size for size in shape if size != 1]


def holds_bytes(info: Header, spec: TensorSpec) -> bool:
    """Whether a row of bytes is stored as elements of a wider dtype (`bnb_4bit_quant_storage`)."""
    row = without_ones(spec.shape)
    return (
        spec.dtypes == (torch.uint8,)
        and len(without_ones(info.shape)) == len(row) == 1
        and info.nbytes == row[0]
    )


def describe(format: LayerFormat) -> str:
    """For a line of the log, such as "awq u4, groups of 128 inputs"."""
    rows, inputs = format.group
    shared = {(1, 0): "row", (0, 0): "matrix"}.get((rows, inputs), f"{rows} x {inputs} weights")
    weights, act = f"{format.layout} {format.code.name}, a scale for each {shared}", format.act
    if act.type == "plain":
        return weights
    of_act = (
        "one scale" if act.static else f"a scale for each {f'{act.group} inputs' if act.group else 'row'}"
    )
    return f"{weights}, for activations in {act.type}, {of_act}{' and zero' * (not act.symmetric)}"
