"""GGUF, where each tensor has a type of its own."""

from __future__ import annotations

from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.layouts.ggml.formats import format_of
from pellucid.quant.layouts.ggml.types import SIZES
from pellucid.quant.schemes.base import Options, QuantScheme, Rule, Rules, StoredConfig, exact, refusal


class GgufScheme(QuantScheme):
    """Names are those of the model, not llama.cpp's."""

    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        matrices = {
            name.removesuffix(".weight"): tensor.type
            for name, tensor in stored.tensors.items()
            if name.endswith(".weight") and len(tensor.shape) > 1
        }
        return Rules(tuple(Rule(exact(name), known_format(type)) for name, type in matrices.items()))


def known_format(type: str) -> LayerFormat:
    """Raises ValueError for a type that is not decoded here."""
    size = SIZES.get(type)
    if size is None or size.file is None:
        known = ", ".join(name for name, known in SIZES.items() if known.file)
        raise refusal(f"ggml's type {type}", f"there are {known}", "quantize it again with llama.cpp")
    return format_of(type)
