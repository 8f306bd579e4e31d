"""The door for schemes: which layers of a checkpoint have which layout, read from its config files.

A scheme reads one dialect of configs and does nothing else.  Knows nothing of weights but their names and
types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from pellucid.quant.layouts.base import LayerFormat

Kind = Literal["linear", "experts", "head", "embedding"]
Kinds = frozenset[Kind]
EXPERTS: Kinds = frozenset[Kind](("experts",))
LINEAR: Kinds = frozenset[Kind](("linear", "experts"))
WITH_HEAD: Kinds = frozenset[Kind](("linear", "experts", "head"))
EVERY_KIND: Kinds = frozenset[Kind](("linear", "experts", "head", "embedding"))


class StoredTensor(Protocol):
    """What headers tell of a tensor; type as files spell it: "I32", "F8_E4M3", "Q4_K"."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConfig:
    """What a scheme sees of a checkpoint: all but the weights.

    side: the other JSON files beside config.json, by name.  tensors: by name, none if they are not known yet.
    metadata: of safetensors' headers.  spellings: of matrices that have other names outside, these names.
    """

    config: Mapping[str, object]
    side: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def quantization(self) -> Options | None:
        """What config.json says of its quantization, or else the file beside it; None: weights are plain."""
        for key in ("quantization_config", "compression_config"):
            if self.config.get(key):
                return Options.of(self.config[key], f"{key} in config.json")
        for name in SIDE_FILES:
            if self.side.get(name):
                entries = self.side[name]
                return Options.of(entries.get("quantization", entries), name)
        return None

    def layers_with(self, suffix: str) -> frozenset[str]:
        """The matrices that have such a tensor, by the name without it."""
        return frozenset(name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix))


SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


class Rule(NamedTuple):
    """Layers whose whole name matches, and how they are stored; None is plain."""

    pattern: re.Pattern[str]
    format: LayerFormat | None
    kinds: Kinds = EVERY_KIND


@dataclass(frozen=True, slots=True)
class Rules:
    """How each layer is stored: the first rule that names it tells; what none names is plain.

    plain: layers that the files show to be plain, whatever the rules say.  spellings: see `StoredConfig`.
    """

    rules: tuple[Rule, ...]
    plain: frozenset[str] = frozenset()
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def format_of(self, name: str, kind: Kind = "linear") -> LayerFormat | None:
        """How the matrix called `name` ("model.layers.0.mlp.up_proj") is stored; None is plain."""
        if name in self.plain:
            return None
        names = (name, *self.spellings.get(name, ()))
        for rule in self.rules:
            if kind in rule.kinds and any(map(rule.pattern.fullmatch, names)):
                return rule.format
        return None


class QuantScheme(Protocol):
    """One dialect."""

    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        """How layers are stored.  Raises ValueError for what is not served: what, why, and the way out."""
        ...


def exact(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name))


def path(name: str) -> re.Pattern[str]:
    """Everything at and below what is so called, wherever it begins; `*` stands for anything."""
    return re.compile(rf"(?:.*\.)?{_starred(name)}(?:\..*)?")


def glob(name: str) -> re.Pattern[str]:
    """Everything at and below what is so called, from a name's beginning; `*` stands for anything."""
    return re.compile(rf"{_starred(name)}(?:\..*)?")


def regex(source: str) -> re.Pattern[str]:
    """Names that begin as the regular expression says.  Raises ValueError if it is none."""
    try:
        return re.compile(f"(?:{source}).*")
    except re.error as error:
        raise ValueError(
            f"the quantization config names layers by {source!r}, which is no regular expression ({error})"
        ) from error


def _starred(name: str) -> str:
    return ".*".join(map(re.escape, name.split("*")))


EVERYTHING = regex("")


def plain(names: Iterable[str]) -> list[Rule]:
    """Rules for layers that a config leaves as they are, `re:` before regular expressions."""
    return [
        Rule(regex(name.removeprefix("re:")) if name.startswith("re:") else path(name), None)
        for name in names
    ]


def refusal(found: str, reason: str, way_out: str) -> ValueError:
    return ValueError(f"the checkpoint is stored with {found}, which is not served: {reason}; {way_out}")


@dataclass(frozen=True, slots=True)
class Options:
    """A JSON object of a config, whose values are checked as they are read.  where: its name in errors."""

    entries: Mapping[str, object]
    where: str

    @classmethod
    def of(cls, value: object, where: str) -> Options:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {value!r:.100}, must be an object")
        return cls(value, where)

    def has(self, *keys: str) -> bool:
        """Whether one of these says anything."""
        return any(self.entries.get(key) not in (None, {}, [], "") for key in keys)

    def get(self, *keys: str) -> object:
        """The first of these entries that is there; None if none is."""
        return next((self.entries[key] for key in keys if self.entries.get(key) is not None), None)

    def number(self, *keys: str, default: int | None = None) -> int:
        value = self.get(*keys)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(keys, value, "a whole number")
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        value = self.get(*keys)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(keys, value, "true or false")
        return default if value is None else value

    def text(self, *keys: str, default: str = "") -> str:
        value = self.get(*keys)
        if value is not None and not isinstance(value, str):
            raise self._wrong(keys, value, "a text")
        return default if value is None else value

    def names(self, *keys: str) -> list[str]:
        value = self.get(*keys) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._wrong(keys, value, "a list of names")
        return value

    def part(self, *keys: str) -> Options:
        """An object inside, empty if it is missing."""
        return Options.of(self.get(*keys) or {}, f"{keys[0]} of {self.where}")

    def parts(self, *keys: str) -> dict[str, Options]:
        """The objects inside an object, by name."""
        inside = self.part(*keys)
        return {
            name: Options.of(value, f"{name!r} of {inside.where}") for name, value in inside.entries.items()
        }

    def over(self, other: Options) -> Options:
        """`other`, where these say nothing else."""
        return Options({**other.entries, **self.entries}, self.where)

    def _wrong(self, keys: tuple[str, ...], value: object, wanted: str) -> ValueError:
        return ValueError(f"{' or '.join(keys)} in {self.where} is {value!r:.100}, must be {wanted}")
