"""Plain checkpoints that are quantized while they load: one way for all layers, or each its own.

A mapping names kinds of layers ("linear", "experts", "head", "embedding"), or layers themselves, by name or
by a regular expression behind `re:`; what it does not name stays plain, but that a head tied to an embedding
is as that is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pellucid.quant.base import ExpertsMethod, LinearMethod
from pellucid.quant.codes import E4M3, ROW, S8
from pellucid.quant.experts import CodedExperts, PlainExperts
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.schemes.base import EVERYTHING, Kind, Kinds, path, regex
from pellucid.quant.tables import RoundedTable
from pellucid.quant.when_loaded import LEAST_GROUP, Int4, Mxfp4, Nf4
from pellucid.registry import Registry

NONE = "none"
LINEAR: Kinds = frozenset[Kind](("linear",))
LAYERS: Kinds = frozenset[Kind](("linear", "experts"))
EVERY: Kinds = frozenset[Kind](("linear", "experts", "head", "embedding"))
KINDS: dict[str, Kinds] = {name: frozenset[Kind]((name,)) for name in sorted(EVERY)}
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


FORMATS: dict[str, Callable[[int], LayerFormat]] = {  # of experts and tables, by their inputs
    "fp8": lambda _: LayerFormat(layout="scaled", code=E4M3, group=ROW),
    "int8": lambda _: LayerFormat(layout="scaled", code=S8, group=ROW),
    "int4": lambda num_in: Int4().format_for(num_in),
    "nf4": lambda num_in: Nf4().format_for(num_in),
    "mxfp4": lambda num_in: Mxfp4().format_for(num_in),
}


UNITS = {"int4": LEAST_GROUP, "nf4": LEAST_GROUP, "mxfp4": Mxfp4.group}  # see `Quantization.unit`


class Choice(NamedTuple):
    """Layers of some kinds whose whole name matches, and the way they are quantized."""

    pattern: re.Pattern[str]
    way: str
    kinds: Kinds


@dataclass(frozen=True, slots=True)
class Online:
    """A plain checkpoint; the first choice that names a layer tells how it is quantized."""

    choices: tuple[Choice, ...] = ()
    device: str = "cuda"

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

    def unit(self, path: str, kind: Kind) -> int:
        return UNITS.get(self.way(path, kind), 1)

    def tied(self, path: str, table: str) -> LinearMethod | None:
        is_named = any("head" in each.kinds and each.pattern.fullmatch(path) for each in self.choices)
        return self.method((path,), "head") if is_named else self.method((table,), "embedding")

    def embedding(self, path: str, dim: int) -> RoundedTable | None:
        way = self.way(path, "embedding")
        return None if way == NONE else RoundedTable(FORMATS[way](dim))

    def experts(self, gate_up: tuple[str, ...], down: tuple[str, ...]) -> ExpertsMethod:
        ways = {self.way(path, "experts") for path in (*gate_up, *down)}
        if len(ways) > 1:
            raise ValueError(
                f"experts of one layer, {gate_up[0]} and others, are to be quantized in several ways: "
                f"{', '.join(sorted(ways))}; name them all alike"
            )
        way = ways.pop()
        if way == NONE:
            return PlainExperts(device=self.device)
        of = FORMATS[way]
        return CodedExperts(of, of, is_stored=False, device=self.device)


def online(
    asked: str | Mapping[str, object] | None, device: str = "cuda", *, packs: bool = True
) -> Online | None:
    """How layers are quantized that are plain in files; None: `asked` is no way to do that.

    packs: codes are multiplied as they are.  Where experts' numbers would be made at every call, experts
    must be asked for.
    Raises ValueError for a mapping that names a way or a kind that there is not.
    """
    if asked is None:
        return Online(device=device)
    if isinstance(asked, str) and not asked.lstrip().startswith("{"):
        kinds = LAYERS if packs else LINEAR
        return Online((Choice(EVERYTHING, asked, kinds),), device) if asked in ONLINE else None
    mapping = dict(read(asked))
    ignored = mapping.pop("ignore", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise ValueError(f"ignore in quantization is {ignored!r:.100}, must be a list of names")
    choices = [Choice(matcher(name), NONE, EVERY) for name in ignored]
    ways = {name: way_of(name, way) for name, way in mapping.items()}
    choices += [Choice(matcher(name), way, EVERY) for name, way in ways.items() if name not in KINDS]
    choices += [Choice(EVERYTHING, way, KINDS[name]) for name, way in ways.items() if name in KINDS]
    return Online(tuple(choices), device)


def read(asked: str | Mapping[str, object]) -> Mapping[str, object]:
    """A mapping, or what says one in JSON."""
    if isinstance(asked, Mapping):
        return asked
    try:
        return json.loads(asked)
    except ValueError as error:
        raise ValueError(f"quantization {asked!r:.100} is no JSON: {error}") from None


def way_of(name: str, way: object) -> str:
    """A name in ONLINE.  Raises ValueError if it is none."""
    if way is None or way == NONE:
        return NONE
    if not isinstance(way, str) or way not in ONLINE:
        known = ", ".join(ONLINE)
        raise ValueError(f"quantization of {name!r} is {way!r:.100}, must be one of {known}")
    return way


def matcher(name: str) -> re.Pattern[str]:
    return regex(name.removeprefix("re:")) if name.startswith("re:") else path(name)
