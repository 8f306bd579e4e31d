"""How the caches of all layers lie in equal pages.  Pure, no torch.

Layers of a kind are dealt into *stripes*, and a block of the kind is a page for each.  A page is cut into
*units*, the largest piece of which every layer's part of a block is a multiple; so models of other shapes,
such as a draft model, share pages and tables with the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pellucid.kv.kinds import Full, Kind, Window

MOST_PADDING = 0.2  # share of all caches that is worth it to have fewer stripes


class LayerCache(NamedTuple):
    """What one layer keeps."""

    num_bytes: int  # of a block
    window: int | None  # tokens that a query sees, itself included; None sees all


class Place(NamedTuple):
    """Where one layer's part of a block lies."""

    table: int  # of Layout.tables
    unit: int  # its first one in a page


class Table(NamedTuple):
    """A block table as layers read it: `factor` times the pages of one stripe, for caches of `num_bytes`."""

    stripe: int  # of all kinds' together
    factor: int  # parts of `num_bytes` in a page
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The pages of one worker."""

    kinds: tuple[Kind, ...]
    unit_bytes: int
    page_bytes: int
    tables: tuple[Table, ...]
    places: tuple[Place, ...]  # of the layers that are here

    @property
    def pages_a_block(self) -> int:
        return sum(kind.stripes for kind in self.kinds)

    def describe(self, num_pages: int) -> str:
        """So many pages, for the log."""
        kinds = ", ".join(f"{kind.stripes} for a block of {kind.name}" for kind in self.kinds)
        size, per_block = self.kinds[0].block_size, f" ({kinds})" if self.pages_a_block > 1 else ""
        return f"{num_pages} pages of {size} tokens, {self.page_bytes / 1e6:.3g} MB each{per_block}"


def choose_kinds(caches: Sequence[LayerCache], block_size: int) -> tuple[Kind, ...]:
    """The kinds of these layers, which are all that there are on any worker; what sees all is the first.

    Its stripes, and so the size of a page, are chosen such that it has the least padding, all together have
    not much, and stripes are few.
    """
    windows = sorted({cache.window for cache in caches}, key=lambda window: window or 0)
    sizes = [[cache.num_bytes for cache in caches if cache.window == window] for window in windows]

    def cost(num_stripes: int) -> tuple[int, float, int]:
        stripes = _stripes(num_stripes, sizes)
        page = max(_page_bytes(each, num) for each, num in zip(sizes, stripes, strict=True))
        total = sum(map(sum, sizes))
        padding = (sum(stripes) * page - total) / total
        return stripes[0] * page - sum(sizes[0]), max(0.0, padding - MOST_PADDING), sum(stripes)

    most = len(sizes[0]) if len(sizes) > 1 else 1
    stripes = _stripes(min(range(1, most + 1), key=cost), sizes)
    return tuple(
        Full(block_size, num) if window is None else Window(block_size, num, window)
        for window, num in zip(windows, stripes, strict=True)
    )


def lay_out(kinds: tuple[Kind, ...], caches: Sequence[LayerCache]) -> Layout:
    """Where the layers of one worker go."""
    unit = math.gcd(*(cache.num_bytes for cache in caches))
    spots = [(0, 0)] * len(caches)  # of each layer: stripe, bytes before it
    first, page = 0, 0
    for kind in kinds:
        window = kind.window if isinstance(kind, Window) else None
        mine = [i for i, cache in enumerate(caches) if cache.window == window]
        sizes = [caches[i].num_bytes for i in mine]
        for i, (stripe, start) in zip(mine, _deal(sizes, kind.stripes), strict=True):
            spots[i] = first + stripe, start
        first, page = first + kind.stripes, max(page, _page_bytes(sizes, kind.stripes))
    whole = math.lcm(*(cache.num_bytes for cache in caches))
    page = -(-page // whole) * whole
    tables = [
        Table(stripe, page // cache.num_bytes, cache.num_bytes)
        for (stripe, _), cache in zip(spots, caches, strict=True)
    ]
    numbered = sorted(set(tables))
    places = [
        Place(numbered.index(table), start // unit) for table, (_, start) in zip(tables, spots, strict=True)
    ]
    return Layout(kinds=kinds, unit_bytes=unit, page_bytes=page, tables=tuple(numbered), places=tuple(places))


def _stripes(num_first: int, sizes: Sequence[Sequence[int]]) -> list[int]:
    """Of each kind, if the first one has so many."""
    page = _page_bytes(sizes[0], num_first)
    return [num_first, *(-(-sum(each) // page) for each in sizes[1:])]


def _page_bytes(sizes: Sequence[int], num_stripes: int) -> int:
    """Bytes of the fullest stripe."""
    spots = zip(_deal(sizes, num_stripes), sizes, strict=True)
    return max((start + size for (_, start), size in spots), default=0)


def _deal(sizes: Sequence[int], num_stripes: int) -> list[tuple[int, int]]:
    """Of each layer the stripe, and the bytes before it there: the largest first, to whoever has least."""
    spots, loads = [(0, 0)] * len(sizes), [0] * num_stripes
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        stripe = loads.index(min(loads))
        spots[i] = stripe, loads[stripe]
        loads[stripe] += sizes[i]
    return spots
