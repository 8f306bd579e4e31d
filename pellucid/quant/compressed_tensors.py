"""Checkpoints in the compressed-tensors format "float-quantized": FP8 weights and activations.

Other formats of that family (integers, packed weights) are refused with their name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pellucid.quant.base import Kind, LinearMethod, quantization_config, stored_as
from pellucid.quant.fp8 import Activations, Block, Fp8, Fp8Format, block_of
from pellucid.quant.unquantized import Unquantized

FORMATS = ("float-quantized", "naive-quantized")  # the same tensors for FP8

Entries = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """Layers that are stored alike."""

    targets: tuple[str, ...]
    format: Fp8Format


class CompressedTensorsScheme:
    """Groups of targets, the first that names a layer has it, and what is ignored of them all."""

    def __init__(self, groups: Sequence[ConfigGroup], ignored: tuple[str, ...]) -> None:
        self.groups = groups
        self.ignored = ignored

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, object]) -> Self | None:
        if stored_as(config) != "compressed-tensors":
            return None
        quantization = quantization_config(config)
        groups = [
            group_of(entries(group), quantization.get("format"))
            for group in entries(quantization.get("config_groups")).values()
        ]
        if not groups:
            raise refusal("no config_groups", "at least one")
        return cls(groups, names(quantization.get("ignore")))

    @classmethod
    def online(cls) -> Self | None:
        return None

    def method(self, prefixes: tuple[str, ...], kind: Kind) -> LinearMethod | None:
        formats = {self._format(prefix) for prefix in prefixes}
        if len(formats) > 1:
            return None
        (format,) = formats
        return Unquantized() if format is None else Fp8(format)

    def _format(self, prefix: str) -> Fp8Format | None:
        """How this layer is stored; None is plain."""
        if any(matches(entry, prefix) for entry in self.ignored):
            return None
        named = (group for group in self.groups if any(matches(entry, prefix) for entry in group.targets))
        group = next(named, None)
        return group.format if group else None


def matches(entry: str, prefix: str) -> bool:
    """Whether a target means this linear layer: by its path, by `re:` and a regex of it, or by its class."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), prefix) is not None
    return entry in (prefix, "Linear")


def group_of(group: Entries, common_format: object) -> ConfigGroup:
    """Read one of the config_groups.  Raises ValueError for what is not served, naming it."""
    form = group.get("format") or common_format
    if form not in FORMATS:
        raise refusal(f"format {form!r}", " or ".join(map(repr, FORMATS)))
    block = weight_block(entries(group.get("weights")))
    activations = activations_of(entries(group.get("input_activations")), block)
    return ConfigGroup(names(group.get("targets")), Fp8Format(activations=activations, block=block))


def weight_block(weights: Entries) -> Block | None:
    """The block of the weights' scales, if they have blocks."""
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) != ("float", 8) or not weights.get("symmetric", True):
        raise refusal(f"weights of type {kind!r} with {bits} bits", "symmetric float with 8 bits")
    match weights.get("strategy"):
        case "tensor" | "channel":
            return None
        case "block" if block := block_of("block_structure", weights.get("block_structure")):
            return block
        case other:
            raise refusal(f"a weight scale for each {other!r}", "'tensor', 'channel' or 'block'")


def activations_of(activations: Entries, block: Block | None) -> Activations:
    if not activations:
        raise refusal("no input_activations", "FP8 activations")
    kind, bits = activations.get("type"), activations.get("num_bits")
    if (kind, bits) != ("float", 8) or not activations.get("symmetric", True):
        raise refusal(f"activations of type {kind!r} with {bits} bits", "symmetric float with 8 bits")
    dynamic, strategy = activations.get("dynamic") or False, activations.get("strategy")
    match (dynamic, strategy, block):
        case (True, "token", None):
            return "dynamic"
        case (False, "tensor", None):
            return "static"
        case (True, "group", (_, inputs)) if activations.get("group_size") == inputs:
            return "dynamic"
        case _:
            weights = f"blocks of {list(block)}" if block else "no blocks"
            found = f"dynamic {dynamic} and a scale for each {strategy!r}, weights with {weights}"
            raise refusal(
                f"activations with {found}",
                "dynamic for each 'token' or static for each 'tensor' or, with blocks, "
                "dynamic for each 'group' of a block's inputs",
            )


def entries(value: object) -> Entries:
    """A JSON object of the config, empty if it is missing.  Raises ValueError if it is something else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"quantization_config in config.json holds {value!r} where an object must stand")
    return value


def names(value: object) -> tuple[str, ...]:
    """Names of layers or kinds of them, none if they are missing.  Raises ValueError if it is no list."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"quantization_config in config.json holds {value!r} where a list must stand")
    return tuple(map(str, value))


def refusal(found: str, wanted: str) -> ValueError:
    return ValueError(
        f"the compressed-tensors checkpoint has {found}, which is not supported; use one with {wanted}"
    )
