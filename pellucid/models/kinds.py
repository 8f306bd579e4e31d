"""The matrices of a model by kind: how files store them, how they are kept, what multiplies them, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from pellucid.layers.embedding import VocabEmbedding
from pellucid.layers.experts import Experts
from pellucid.layers.latent import LatentAttention
from pellucid.layers.linear import Linear
from pellucid.layers.weight import Weight
from pellucid.quant.base import ExpertMatrix
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.products import name_of
from pellucid.weights.decoded import describe, paths_of
from pellucid.weights.source import Header

GIB = 1 << 30
ROUTER = "the router's kernel for few rows, torch's product for the rest"


@dataclass(slots=True)
class Kind:
    """Matrices that are stored and served alike."""

    names: str  # such as "q_proj, k_proj, v_proj"
    stored: str  # such as "awq u4, a scale for each 1 x 128 weights"
    served: str  # by which product, of what, and why by no faster one
    num_matrices: int = 0
    num_weights: int = 0
    file_bytes: int = 0
    kept_bytes: int = 0  # once loaded

    @property
    def bits(self) -> float:
        """Of a weight in files, scales and all."""
        return 8 * self.file_bytes / self.num_weights if self.num_weights else 0.0

    def __str__(self) -> str:
        files = f", {self.file_bytes / GIB:.2f} GiB in files" if self.file_bytes else ""
        kept_bits = 8 * self.kept_bytes / self.num_weights
        return (
            f"{self.num_matrices} x {self.names}: {self.stored}{files}; "
            f"kept at {kept_bits:.2f} bits a weight, {self.kept_bytes / GIB:.2f} GiB; {self.served}"
        )


def kinds_of(
    model: torch.nn.Module,
    formats: Mapping[str, LayerFormat],
    infos: Mapping[str, Header],
    dtype: torch.dtype,
) -> list[Kind]:
    """Each kind of matrix, in the order of the model.

    formats: of the matrices that are stored in codes, by path.  infos: of all tensors in files; none: weights
    are random.  dtype: of activations.
    """
    kinds = dict[tuple[str, str, str], Kind]()
    below: dict[str, list[Header]] = {}
    for name, info in infos.items():
        for path in paths_of(name):
            below.setdefault(path, []).append(info)
    for names, served, weight in matrices(model):
        for name, parts in weight.parts().items():
            part, path = parts[0], name.removesuffix(".weight")
            format = formats.get(path)
            info = infos.get(name)
            plain = info.type if info else name_of(dtype)
            stored = plain if format is None else describe(format)
            kind = kinds.setdefault((names, stored, served), Kind(names, stored, served))
            kind.num_matrices += 1
            kind.file_bytes += sum(info.nbytes for info in below.get(path, [info] if info else []))
            num_weights = prod(weight.whole_shape(part))
            kind.num_weights += num_weights
            kept_bits = weight.spec.kept_bits or 8 * weight.itemsize
            kind.kept_bytes += round(num_weights * kept_bits / 8)
    return [*kinds.values(), *tied_heads(model)]


def tied_heads(model: torch.nn.Module) -> Iterator[Kind]:
    """Heads that multiply with a table of embeddings: with itself, or with what they lay out of it anew."""
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, VocabEmbedding)}
    for layer in model.modules():
        weight = next(layer.parameters(recurse=False), None) if isinstance(layer, Linear) else None
        if isinstance(layer, Linear) and isinstance(weight, Weight) and id(weight) in tables:
            num_weights = prod(weight.whole_shape(0))
            kind = Kind("head", "tied to the table of embeddings", served_by(layer), 1, num_weights)
            is_copy = layer.product is not None and layer.product.copies
            kind.kept_bytes = num_weights * weight.itemsize if is_copy else 0
            yield kind


def matrices(model: torch.nn.Module) -> Iterator[tuple[str, str, Weight]]:
    """Of each layer with a matrix: what its parts are called, what multiplies it, its weight."""
    seen, routers = set[int](), set[int]()
    for layer in model.modules():
        if isinstance(layer, Experts):
            yield from experts_of(layer)
            if layer.router.has_few_rows(layer.dtype):
                routers.add(id(layer.router.linear))
        if isinstance(layer, LatentAttention):
            served = f"{name_of(layer.kv_b.dtype)}: attention's own products, which take plain numbers"
            yield "kv_b_proj", served, layer.kv_b
        if not isinstance(layer, Linear | VocabEmbedding):
            continue
        weight = next((p for p in layer.parameters(recurse=False) if isinstance(p, Weight)), None)
        if weight is None or id(weight) in seen:
            continue
        seen.add(id(weight))
        names = ", ".join(name.removesuffix(".weight").rpartition(".")[2] for name in weight.parts())
        served = f"{name_of(weight.dtype)}: {ROUTER}" if id(layer) in routers else served_by(layer)
        yield names, served, weight


def served_by(layer: Linear | VocabEmbedding) -> str:
    """What multiplies a layer's matrix, or looks its rows up, and in what."""
    if isinstance(layer, Linear) and layer.product is not None:
        return str(layer.product)
    keep = layer.keep if isinstance(layer, VocabEmbedding) else None
    return "looked up" if keep is None else f"looked up in {describe(keep.format)}"


def experts_of(layer: Experts) -> Iterator[tuple[str, str, Weight]]:
    """The same of a mixture's matrices, whichever expert's."""
    matrices: tuple[ExpertMatrix, ...] = ("gate_up", "down")
    for matrix in matrices:
        weight = layer.matrix(matrix)
        last = (name.removesuffix(".weight").rpartition(".")[2] for name in weight.parts())
        served = layer.method.describe(matrix, weight.spec.shape, layer.dtype)
        yield f"{', '.join(dict.fromkeys(last))} of experts", served, weight
