"""Plain checkpoints that are quantized while they load: one way for all layers, or each its own.

A mapping names kinds of layers ("linear", "head"), or layers themselves, by name or by a regular expression
behind `re:`; what it does not name stays plain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pellucid.quant.base import LinearMethod
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.schemes.base import EVERYTHING, Kind, Kinds, path, regex
from pellucid.registry import Registry

NONE = "none"
LINEAR: Kinds = frozenset[Kind](("linear",))
KINDS: dict[str, Kinds] = {"linear": LINEAR, "head": frozenset[Kind](("head",))}
PLAIN_KINDS = {
    "embedding": "rows are read from plain tables",
    "experts": "products of experts are of plain matrices or of a checkpoint's own codes",
}
ONLINE: Registry[Callable[[], LinearMethod]] = Registry(
    "way to quantize plain weights",
    {
        NONE: f"{__package__}.unquantized:Unquantized",
        "fp8": f"{__package__}.fp8:QuantizedWhenLoaded",
        "int8": f"{__package__}.int8:Int8",
        "int4": f"{__package__}.when_loaded:Int4",
        "nf4": f"{__package__}.when_loaded:Nf4",
        "mxfp4": f"{__package__}.when_loaded:Mxfp4",
    },
)


class Choice(NamedTuple):
    """Layers of some kinds whose whole name matches, and the way they are quantized."""

    pattern: re.Pattern[str]
    way: str
    kinds: Kinds


@dataclass(frozen=True, slots=True)
class Online:
    """A plain checkpoint; the first choice that names a layer tells how it is quantized."""

    choices: tuple[Choice, ...] = ()

    def method(self, paths: tuple[str, ...], kind: Kind) -> LinearMethod | None:
        ways = {self.way(path, kind) for path in paths}
        return ONLINE.load(ways.pop())() if len(ways) == 1 else None

    def way(self, path: str, kind: Kind) -> str:
        """A name in ONLINE."""
        hits = (each for each in self.choices if kind in each.kinds and each.pattern.fullmatch(path))
        hit = next(hits, None)
        return NONE if hit is None else hit.way

    def stored(self, path: str, kind: Kind) -> LayerFormat | None:
        return None


def online(asked: str | Mapping[str, object] | None) -> Online | None:
    """How layers are quantized that are plain in files; None: `asked` is no way to do that.

    Raises ValueError for a mapping that names a way or a kind that there is not.
    """
    if asked is None:
        return Online()
    if isinstance(asked, str) and not asked.lstrip().startswith("{"):
        return Online((Choice(EVERYTHING, asked, LINEAR),)) if asked in ONLINE else None
    mapping = dict(read(asked))
    ignored = mapping.pop("ignore", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise ValueError(f"ignore in quantization is {ignored!r:.100}, must be a list of names")
    both = frozenset[Kind](("linear", "head"))
    choices = [Choice(matcher(name), NONE, both) for name in ignored]
    ways = {name: way_of(name, way) for name, way in mapping.items()}
    choices += [Choice(matcher(name), way, both) for name, way in ways.items() if name not in KINDS]
    choices += [Choice(EVERYTHING, way, KINDS[name]) for name, way in ways.items() if name in KINDS]
    return Online(tuple(choices))


def read(asked: str | Mapping[str, object]) -> Mapping[str, object]:
    """A mapping, or what says one in JSON."""
    if isinstance(asked, Mapping):
        return asked
    try:
        return json.loads(asked)
    except ValueError as error:
        raise ValueError(f"quantization {asked!r:.100} is no JSON: {error}") from None


def way_of(name: str, way: object) -> str:
    """A name in ONLINE.  Raises ValueError if it is none, or if layers so called stay plain."""
    if way is None or way == NONE:
        return NONE
    if not isinstance(way, str) or way not in ONLINE:
        known = ", ".join(ONLINE)
        raise ValueError(f"quantization of {name!r} is {way!r:.100}, must be one of {known}")
    if name in PLAIN_KINDS:
        raise ValueError(
            f"quantization of {name!r} while loading is not served: {PLAIN_KINDS[name]}; leave it out"
        )
    return way


def matcher(name: str) -> re.Pattern[str]:
    return regex(name.removeprefix("re:")) if name.startswith("re:") else path(name)
