"""What there is to know of a model's weights before they are loaded: headers, formats, and who multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from pellucid.layers.embedding import VocabEmbedding
from pellucid.layers.experts import Experts
from pellucid.layers.linear import Linear
from pellucid.layers.weight import Weight
from pellucid.models.build import BuildOptions, design
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.loader import torch_module
from pellucid.platform import Platform
from pellucid.weights.decoded import describe, paths_of
from pellucid.weights.source import Header

BLOCK_SIZE = 64  # of a KV cache that nobody makes


@dataclass(slots=True)
class Kind:
    """Matrices that are stored and served alike."""

    names: str  # such as "q_proj, k_proj, v_proj"
    stored: str  # such as "awq u4, a scale for each 1 x 128 weights"
    served: str  # by which product, of what
    num_matrices: int = 0
    num_weights: int = 0
    file_bytes: int = 0
    kept_bytes: int = 0  # once loaded

    @property
    def bits(self) -> float:
        """Of a weight in files, scales and all."""
        return 8 * self.file_bytes / self.num_weights if self.num_weights else 0.0


def inspect(
    checkpoint: Checkpoint, platform: Platform, *, dtype: torch.dtype, quantization: str | None = None
) -> list[Kind]:
    """Each kind of matrix of a checkpoint, in the order of the model.

    dtype: of activations.  Raises ValueError for what is not served.
    """
    options = BuildOptions(
        dtype=dtype,
        device=torch.device(platform.device),
        block_size=BLOCK_SIZE,
        max_model_len=BLOCK_SIZE,
        quantization=quantization,
        show_progress=False,
    )
    model, builder, source = design(checkpoint, platform, options)
    formats, kinds = builder.context.formats, dict[tuple[str, str, str], Kind]()
    below: dict[str, list[Header]] = {}
    for name, info in source.infos.items():
        for path in paths_of(name):
            below.setdefault(path, []).append(info)
    for names, served, weight in matrices(torch_module(model)):
        for name, parts in weight.parts().items():
            part, path = parts[0], name.removesuffix(".weight")
            format = formats.get(path)
            info = source.infos.get(name)
            plain = info.type if info else str(dtype).removeprefix("torch.")
            stored = plain if format is None else describe(format)
            kind = kinds.setdefault((names, stored, served), Kind(names, stored, served))
            kind.num_matrices += 1
            kind.file_bytes += sum(info.nbytes for info in below.get(path, [info] if info else []))
            num_weights = prod(weight.whole_shape(part))
            kind.num_weights += num_weights
            kept_bits = weight.spec.kept_bits or 8 * weight.itemsize
            kind.kept_bytes += round(num_weights * kept_bits / 8)
    return list(kinds.values())


def matrices(model: torch.nn.Module) -> Iterator[tuple[str, str, Weight]]:
    """Of each layer with a matrix: what its parts are called, what multiplies it, its weight."""
    seen = set[int]()
    for layer in model.modules():
        if isinstance(layer, Experts):
            yield from experts_of(layer)
        if not isinstance(layer, Linear | VocabEmbedding):
            continue
        weight = next((p for p in layer.parameters(recurse=False) if isinstance(p, Weight)), None)
        if weight is None or id(weight) in seen:
            continue
        seen.add(id(weight))
        names = ", ".join(name.removesuffix(".weight").rpartition(".")[2] for name in weight.parts())
        product = layer.product if isinstance(layer, Linear) else None
        yield names, f"{product.kind}: {product.multiplier.value}" if product else "looked up", weight


def experts_of(layer: Experts) -> Iterator[tuple[str, str, Weight]]:
    """The same of a mixture's matrices, whichever expert's."""
    for weight in (layer.weights.gate_up, layer.weights.down):
        assert isinstance(weight, Weight)
        last = (name.removesuffix(".weight").rpartition(".")[2] for name in weight.parts())
        dtype = str(weight.dtype).removeprefix("torch.")
        yield f"{', '.join(dict.fromkeys(last))} of experts", f"{dtype}: grouped products", weight
