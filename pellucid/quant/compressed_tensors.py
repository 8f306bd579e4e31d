"""Checkpoints in the compressed-tensors format "float-quantized": FP8 weights and activations.

Other formats of that family (integers, packed weights, blocks) are refused with their name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from pellucid.quant.base import Kind, LinearMethod, stored_as
from pellucid.quant.fp8 import Activations, Fp8, WeightScale
from pellucid.quant.unquantized import Unquantized

Entries = Mapping[str, object]


class CompressedTensorsScheme:
    """One group of targets and what is ignored of them."""

    def __init__(
        self,
        weight_scale: WeightScale,
        activations: Activations,
        targets: tuple[str, ...],
        ignored: tuple[str, ...],
    ) -> None:
        self.weight_scale: WeightScale = weight_scale
        self.activations: Activations = activations
        self.targets = targets
        self.ignored = ignored

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, object]) -> Self | None:
        if stored_as(config) != "compressed-tensors":
            return None
        quantization = entries(config.get("quantization_config") or config.get("compression_config"))
        groups = list(entries(quantization.get("config_groups")).values())
        if len(groups) != 1:
            raise refusal(f"{len(groups)} config_groups", "one")
        group = entries(groups[0])
        form = group.get("format") or quantization.get("format")
        if form != "float-quantized":
            raise refusal(f"format {form!r}", "'float-quantized'")
        return cls(
            weight_scale_of(entries(group.get("weights"))),
            activations_of(entries(group.get("input_activations"))),
            names(group.get("targets")),
            names(quantization.get("ignore")),
        )

    @classmethod
    def online(cls) -> Self | None:
        return None

    def method(self, prefixes: tuple[str, ...], kind: Kind) -> LinearMethod | None:
        quantized = {self._is_quantized(prefix) for prefix in prefixes}
        if len(quantized) > 1:
            return None
        return Fp8(self.weight_scale, self.activations) if quantized == {True} else Unquantized()

    def _is_quantized(self, prefix: str) -> bool:
        ignored = any(matches(entry, prefix) for entry in self.ignored)
        return not ignored and any(matches(entry, prefix) for entry in self.targets)


def matches(entry: str, prefix: str) -> bool:
    """Whether a target means this linear layer: by its path, by `re:` and a regex of it, or by its class."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), prefix) is not None
    return entry in (prefix, "Linear")


def weight_scale_of(weights: Entries) -> WeightScale:
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) != ("float", 8) or not weights.get("symmetric", True):
        raise refusal(f"weights of type {kind!r} with {bits} bits", "symmetric float with 8 bits")
    match weights.get("strategy"):
        case "tensor":
            return "tensor"
        case "channel":
            return "channel"
        case other:
            raise refusal(f"a weight scale for each {other!r}", "'tensor' or 'channel'")


def activations_of(activations: Entries) -> Activations:
    if not activations:
        raise refusal("no input_activations", "FP8 activations")
    kind, bits = activations.get("type"), activations.get("num_bits")
    if (kind, bits) != ("float", 8) or not activations.get("symmetric", True):
        raise refusal(f"activations of type {kind!r} with {bits} bits", "symmetric float with 8 bits")
    match (activations.get("dynamic"), activations.get("strategy")):
        case (True, "token"):
            return "dynamic"
        case (False | None, "tensor"):
            return "static"
        case (dynamic, strategy):
            raise refusal(
                f"activations with dynamic {dynamic} and a scale for each {strategy!r}",
                "dynamic for each 'token', or static for each 'tensor'",
            )


def entries(value: object) -> Entries:
    """A JSON object of the config, empty if it is missing.  Raises ValueError if it is something else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"quantization_config in config.json holds {value!r} where an object must stand")
    return value


def names(value: object) -> tuple[str, ...]:
    return tuple(str(name) for name in value) if isinstance(value, list) else ()


def refusal(found: str, wanted: str) -> ValueError:
    return ValueError(
        f"the compressed-tensors checkpoint has {found}, which is not supported; use one with {wanted}"
    )
