"""Which kernel multiplies a matrix with rows, and how it is cut up: measured tables, and a rule without.

A table is a JSON file: `devices`, the names (or their beginnings) of the GPUs it is for, and `choices`, for
weights of a kind and a shape "NxK", what is best up to so many rows.  Kinds are "16", bits of a weight, "8",
"8/128" where so many inputs share a scale, and "int8" where bytes are integers.  A file in the user's cache
folder, written by benchmarks/tune_matmul.py, comes before the package's.  Needs neither torch nor Triton.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path

MAX_GEMV_ROWS = 4
MAX_SPLIT_K_ROWS = 256
MAX_ROWS = 512  # for which products are cut to size
MANY_ROWS = 16_384  # as many as there are
SPARE = 4  # multiprocessors that programs which wait for one another leave to messages between GPUs
RING_BYTES = 208 << 10  # of steps that a Hopper multiprocessor has room for
PACKAGED = Path(__file__).parents[2] / "assets" / "matmul"


@dataclass(frozen=True, slots=True)
class Gemv:
    """Each program multiplies block_n outputs, block_k inputs at a time, without tensor cores."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SplitK:
    """Each program multiplies block_n outputs with its range of inputs, one of `splits`, on tensor cores."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Wgmma:
    """Each program multiplies block_n outputs with `rows` rows and its range of inputs; on Hopper alone."""

    block_n: int  # 64, 128 or 192
    rows: int  # 16, 32, 64, 128 or 256
    splits: int  # 1, 2, 4 or 8, each with at least 8 of the rows to add up
    stages: int


@dataclass(frozen=True, slots=True)
class Persistent:
    """Each program multiplies and gates tile after tile, of so many rows and 256 outputs; on Hopper alone."""

    rows: int  # 128 or 192
    band: int  # tiles of rows that are computed side by side


Tile = Gemv | SplitK | Wgmma | Persistent
Choices = dict[int, Tile | None]  # up to so many rows: the tile, or None for the library's product
KINDS: dict[str, type[Tile]] = {
    "gemv": Gemv,
    "split_k": SplitK,
    "wgmma": Wgmma,
    "persistent": Persistent,
}


def to_words(tile: Tile | None) -> list[str | int]:
    """As tables have it: ["gemv", 4, 1024, 4], or ["library"]."""
    if tile is None:
        return ["library"]
    name = next(name for name, kind in KINDS.items() if isinstance(tile, kind))
    return [name, *astuple(tile)]


def from_words(words: Iterable[str | int]) -> Tile | None:
    """The opposite of `to_words`.  Raises ValueError for a word that no kernel goes by."""
    name, *sizes = words
    if name == "library":
        return None
    if name not in KINDS:
        raise ValueError(f"a kernel is called {name!r}, must be library, {' or '.join(KINDS)}")
    return KINDS[str(name)](*map(int, sizes))


def choose(
    num_out: int,
    num_in: int,
    *,
    bits: int,
    group: int | None = None,
    integers: bool = False,
    device_name: str,
    hopper: int = 0,
) -> Choices:
    """The measured choices for such weights on such a device, or else those of a rule of thumb.

    bits: of a weight, 16 or 8.  group: inputs that share a scale, if not all do.  integers: bytes are INT8,
    which no library is asked for: kernels of ours take any number of rows, few of them as FP8's do.  hopper:
    multiprocessors, if it is one.  More rows than any choice has are the library's, or the last one's if it
    is for over MAX_ROWS.
    """
    case = kind_of(bits, group, integers=integers), num_out, num_in
    for folder in (user_folder(), PACKAGED):
        for devices, table in tables(folder):
            if device_name.startswith(devices) and (measured := table.get(case)):
                return measured
    if not integers:
        return rule_of_thumb(num_out, num_in, bits, group=group, hopper=hopper)
    few = choose(num_out, num_in, bits=bits, device_name=device_name, hopper=hopper)
    if not hopper or num_out % 16 or num_in % 16:
        return few
    ours = {rows: tile for rows, tile in few.items() if tile is not None and rows < 256}
    return {
        rows: ours.get(rows) or quickest_ring(num_out, rows, hopper)
        for rows in sorted({*ours, 128, 256, 512, 1024, MANY_ROWS})
    }


def takes_groups(tile: Wgmma, group: int) -> bool:
    """Whether so many inputs may share a scale: whole steps, whose products take as many registers again."""
    return group % 128 == 0 and tile.rows <= (128 if tile.block_n <= 128 else 64)


def kind_of(bits: int, group: int | None, *, integers: bool = False) -> str:
    """As tables call weights of so many bits."""
    if integers:
        return f"int{bits}"
    return f"{bits}/{group}" if group else f"{bits}"


def fitted(tile: Tile | None, num_rows: int, num_out: int, num_multiprocessors: int) -> Tile | None:
    """The tile for up to so many rows, with no more splits than leave each program a multiprocessor.

    Programs that share a sum wait for one another, and a table may be of a GPU with more of them.  Messages
    to and from other GPUs may hold some meanwhile, and wait for one that this product keeps from starting.
    """
    room = num_multiprocessors - SPARE
    while isinstance(tile, Wgmma) and tile.splits > 1:
        if -(-num_rows // tile.rows) * -(-num_out // tile.block_n) * tile.splits <= room:
            break
        tile = replace(tile, splits=tile.splits // 2)
    return tile


class ByRows:
    """Which tile serves how many rows."""

    def __init__(self, choices: Choices) -> None:
        self._most = sorted(choices)
        self._tiles = [choices[most] for most in self._most]
        takes_any = bool(self._most) and self._most[-1] > MAX_ROWS
        self._tiles.append(self._tiles[-1] if takes_any else None)

    def __call__(self, num_rows: int) -> Tile | None:
        """None: the library."""
        return self._tiles[bisect_left(self._most, num_rows)] if num_rows else None


def rule_of_thumb(
    num_out: int, num_in: int, bits: int, *, group: int | None = None, hopper: int = 0
) -> Choices:
    """What is seldom slower than the library: GEMV, and split-K with programs for half of a large GPU.

    On Hopper few rows are hopper_matmul's, and all that split-K leaves where groups have scales.  Of many
    rows that are gated, a GPU's worth of tiles saves a pass.
    """
    rings: Choices = {}
    if hopper and num_out % 16 == num_in % (128 // bits) == 0:
        rings |= {rows: widest_ring(num_out, num_in, rows, bits, hopper) for rows in (16, 32, 64)}
    if bits == 8:
        splits = min(8, max(1, 256 // -(-num_out // 64)), max(1, num_in // 512))
        gemv, split = Gemv(4, min(4096, power_of_two(num_in)), 4), SplitK(64, 128, splits, 4, 4)
        if group is None:
            return {1: gemv} | (rings or {64: split})
        many = Wgmma(64, 128, 1, 4)
        return {1: gemv, 64: split} | ({MANY_ROWS: many} if rings and takes_groups(many, group) else {})
    # A row of x lies in the registers of a program, and a long one in those of eight warps.
    gemv = Gemv(8, min(2048, power_of_two(num_in)), 4) if num_in <= 16_384 else Gemv(8, 4096, 8)
    splits = max(1, min(4, 64 * 64 // num_out, num_in // 512))
    few: Choices = {1: gemv if num_in % 8 == 0 else None}
    few |= rings or {32: SplitK(64, 128, splits, 4, 3)}
    return few | {2047: None, 2048: Persistent(128, 16)} if num_out >= 6144 else few


def widest_ring(num_out: int, num_in: int, num_rows: int, bits: int, num_multiprocessors: int) -> Wgmma:
    """For 2 to 64 rows: a program for each multiprocessor, with all of its memory, if outputs allow.

    What of W is under way while the kernel before still runs is what counts.  More outputs than one round of
    programs takes have two programs each, and small ones, so that the last round is not long.
    """
    width = next((width for width in (64, 128, 192) if num_out <= width * num_multiprocessors), 64)
    blocks = -(-num_out // width)
    # A split takes at least 8 rows of a tile: of few outputs more are wanted than few rows give.
    rows = max(num_rows, 32) if 4 * blocks <= num_multiprocessors else num_rows
    splits = [s for s in (2, 4, 8) if 8 * s <= rows and 512 * s <= num_in]
    splits = max((s for s in splits if s * blocks <= num_multiprocessors - SPARE), default=1)
    num_steps = max(4, -(-num_in * bits // (1024 * splits)))
    stages = RING_BYTES // (1 if blocks <= num_multiprocessors else 2) // (128 * (width + rows))
    return Wgmma(width, rows, splits, min(stages, num_steps))


RINGS = (
    Wgmma(192, 256, 1, 4),
    Wgmma(128, 256, 1, 4),
    Wgmma(192, 128, 1, 4),
    Wgmma(128, 128, 1, 6),
    Wgmma(64, 128, 1, 8),
)


def quickest_ring(num_out: int, num_rows: int, num_multiprocessors: int) -> Wgmma:
    """For more rows of bytes: whose rounds of programs end first.

    A program of small tiles takes as long as its operands do to come: one as 85 products.
    """

    def cost(tile: Wgmma) -> int:
        programs = -(-num_rows // tile.rows) * -(-num_out // tile.block_n)
        step = max(tile.block_n * tile.rows, 85 * (tile.block_n + tile.rows))
        return -(-programs // num_multiprocessors) * step

    return min(RINGS, key=cost)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def user_folder() -> Path:
    """Where tables of this machine's own are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pellucid" / "matmul"


@cache
def tables(folder: Path) -> list[tuple[tuple[str, ...], dict[tuple[str, int, int], Choices]]]:
    """Each table of a folder: beginnings of device names, and choices by (kind, N, K)."""
    return [read_table(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def read_table(table: Mapping) -> tuple[tuple[str, ...], dict[tuple[str, int, int], Choices]]:
    """A file's contents as `tables` has them."""
    choices: dict[tuple[str, int, int], Choices] = {}
    for kind, shapes in table["choices"].items():
        for shape, measured in shapes.items():
            num_out, num_in = map(int, shape.split("x"))
            choices[kind, num_out, num_in] = {
                int(rows): from_words(words) for rows, words in measured.items()
            }
    return tuple(table["devices"]), choices


def write_table(folder: Path, device_name: str, choices: Mapping[tuple[str, int, int], Choices]) -> Path:
    """Add choices to the folder's table for a device, and return its path."""
    path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', device_name).lower()}.json"
    table = json.loads(path.read_text()) if path.exists() else {"devices": [device_name], "choices": {}}
    for (kind, num_out, num_in), measured in choices.items():
        shapes = table["choices"].setdefault(kind, {})
        shapes[f"{num_out}x{num_in}"] = {str(rows): to_words(tile) for rows, tile in sorted(measured.items())}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(table) + "\n")
    return path


def dumps(table: Mapping) -> str:
    """JSON with a line for each shape."""
    text = json.dumps(table, indent=1)
    flat = re.sub(r"\[[^][]*\]", lambda m: re.sub(r"\s+", " ", m.group()), text)
    return re.sub(r'(?<=": )\{[^{}]*\}', lambda m: re.sub(r"\s+", " ", m.group()), flat)
