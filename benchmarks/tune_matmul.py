"""Find the fastest product for each projection of a model: `python benchmarks/tune_matmul.py`.

Measures every kernel that could be the fastest, and the library's product, for each shape and number of rows
(where outputs are gated, with the gate, which ours take along), and writes the choices to the table of this
GPU, in the user's cache folder unless told otherwise; an engine started afterwards finds them.  Weights
rotate through more memory than any L2 holds.  Products of up to 512 rows follow a norm each, whose time is
included, as in a model: ours ask for weights before it ends, and let the next one start before they end.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import torch
from kernels import median_seconds
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.pointwise.rms_norm import add_rms_norm
from pellucid.kernels.pointwise.silu_mul import silu_mul
from pellucid.kernels.products.bytes_gemv import bytes_gemv
from pellucid.kernels.products.hopper_matmul import hopper_matmul, is_hopper, num_multiprocessors
from pellucid.kernels.products.persistent_matmul import persistent_matmul
from pellucid.kernels.products.round_rows import Rounding, round_rows
from pellucid.kernels.products.scaled_matmul import scaled_matmul
from pellucid.kernels.products.small_matmul import Scales, small_matmul
from pellucid.kernels.products.tiles import (
    MAX_GEMV_ROWS,
    MAX_ROWS,
    MAX_SPLIT_K_ROWS,
    PACKAGED,
    RING_BYTES,
    RINGS,
    SPARE,
    Choices,
    Gemv,
    Persistent,
    SplitK,
    Tile,
    Wgmma,
    choose,
    kind_of,
    takes_groups,
    to_words,
    user_folder,
    write_table,
)
from pellucid.models.checkpoint import ASSETS
from pellucid.quant.bytes_product import multiply_rows

# At start steps of up to 2,048 rows are warmed up: what serves more of them should serve these, too.
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2047, 16_384)
TOUCHED = 128 << 20  # bytes of weights that the launches of one graph read at least
TOLERANCE = 1.02  # a kernel that also serves others may be so much slower
GEMVS = {  # by bits of a weight
    16: [
        Gemv(2, 1024, 4),
        Gemv(4, 1024, 4),
        Gemv(8, 1024, 2),
        Gemv(8, 1024, 4),
        Gemv(2, 2048, 8),
        Gemv(4, 2048, 4),
        Gemv(8, 2048, 4),
        Gemv(16, 2048, 4),
        Gemv(8, 4096, 4),
        Gemv(8, 4096, 8),
    ],
    8: [
        Gemv(4, 1024, 2),
        Gemv(8, 1024, 2),
        Gemv(4, 2048, 4),
        Gemv(8, 2048, 4),
        Gemv(2, 4096, 4),
        Gemv(4, 4096, 4),
        Gemv(4, 4096, 8),
    ],
}
MOST_GEMV_ROWS = {16: MAX_GEMV_ROWS, 8: 2}  # that are worth a try
SPLIT_KS = {
    16: [
        SplitK(64, 64, 1, 4, 6),
        SplitK(64, 128, 1, 4, 4),
        SplitK(64, 128, 1, 4, 6),
        SplitK(64, 256, 1, 4, 3),
        SplitK(128, 64, 1, 4, 6),
        SplitK(128, 128, 1, 8, 4),
    ],
    8: [
        SplitK(64, 128, 1, 4, 4),
        SplitK(64, 128, 1, 4, 6),
        SplitK(64, 256, 1, 4, 3),
        SplitK(64, 256, 1, 4, 4),
    ],
}
WIDE = {  # from 65 rows on
    16: [],
    8: [SplitK(64, 128, 1, 4, 4), SplitK(64, 256, 1, 4, 3), SplitK(64, 256, 1, 4, 4)],
}
WGMMAS = [  # the largest of their width and rows, and one of which two share a multiprocessor
    Wgmma(64, 64, 1, 8),
    Wgmma(64, 64, 1, 12),
    Wgmma(128, 64, 1, 8),
    Wgmma(64, 128, 1, 4),
    Wgmma(64, 128, 1, 8),
    Wgmma(128, 128, 1, 6),
    Wgmma(192, 64, 1, 6),
    Wgmma(192, 128, 1, 4),
    Wgmma(128, 256, 1, 4),
    Wgmma(192, 256, 1, 4),
]
MANY = [Wgmma(64, 128, 1, 4), Wgmma(128, 128, 1, 6)]  # for any number of rows with scales of groups
PERSISTENTS = [Persistent(128, 16), Persistent(192, 11)]
SPLITS = (1, 2, 3, 4, 8)
WGMMA_SPLITS = (1, 2, 4, 8)
MAX_PROGRAMS = 2048
SHARED_BYTES = 220 << 10  # that a program's tiles may take

Shape = tuple[int, int, bool]  # outputs, inputs, whether they are gated


def shapes_of(config: Mapping[str, int], ranks: int) -> list[Shape]:
    """The projections of a decoder with this config.json, as one of `ranks` holds them; the head if alone."""
    dim, heads, hidden = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or dim // heads
    q, kv = heads * head_dim // ranks, max(1, kv_heads // ranks) * head_dim
    attention = [(q + 2 * kv, dim, False), (dim, q, False)]
    network = [(2 * hidden // ranks, dim, True), (dim, hidden // ranks, False)]
    return attention + network + [(config["vocab_size"], dim, False)] * (ranks == 1)


def candidates(shape: Shape, num_rows: int, bits: int, group: int | None) -> Iterator[Tile | None]:
    """What could be the fastest, the library's product (None) first."""
    for tile in all_candidates(shape, num_rows, bits, group):
        if group is None or not isinstance(tile, Wgmma) or takes_groups(tile, group):
            yield tile


def all_candidates(shape: Shape, num_rows: int, bits: int, group: int | None) -> Iterator[Tile | None]:
    """The same, and what no group of inputs fits."""
    num_out, num_in, is_gated = shape
    yield None
    if num_rows >= MAX_ROWS and is_gated and bits == 16 and is_hopper(torch.device("cuda")):
        yield from PERSISTENTS
    if num_rows > MAX_ROWS:
        yield from MANY if group else []
        return
    if num_rows <= MOST_GEMV_ROWS[bits]:
        yield from (tile for tile in GEMVS[bits] if tile.block_k < 2 * num_in)
    if num_rows == 1:
        return  # between other kernels, too, a GEMV starts the earliest: its first tile waits in registers
    if (num_rows >= 64 or bits == 16 or group) and is_hopper(torch.device("cuda")):
        yield from MANY if group and num_rows == MAX_ROWS else wgmma_candidates(num_out, num_in, num_rows)
    if num_rows > MAX_SPLIT_K_ROWS:
        return
    for tile in SPLIT_KS[bits] if num_rows <= 64 else WIDE[bits]:
        if group and (tile.block_k > group or num_rows > 128):
            continue
        for splits in SPLITS:
            too_short = splits > 1 and splits * tile.block_k > num_in
            held = tile.num_stages * tile.block_k * (tile.block_n + num_rows) * bits // 8
            fits = held <= SHARED_BYTES and splits * num_out <= MAX_PROGRAMS * tile.block_n
            if fits and not too_short:
                yield replace(tile, splits=splits)


def wgmma_candidates(num_out: int, num_in: int, num_rows: int) -> Iterator[Wgmma]:
    """With about as many splits as there is room for."""
    room = num_multiprocessors(torch.device("cuda")) - SPARE
    for tile in WGMMAS if num_rows >= 64 else rings(num_rows):
        programs = -(-num_out // tile.block_n) * -(-num_rows // tile.rows)
        is_tall = tile.rows // 2 >= max(32, num_rows)
        is_flat = 4 * tile.rows <= num_rows
        most = min(tile.rows // 8, num_in // 128)
        splits = [s for s in WGMMA_SPLITS if s * programs <= room and s <= most]
        if not (is_tall or is_flat):
            yield from (replace(tile, splits=s) for s in splits[-2:] or [1])


def rings(num_rows: int) -> Iterator[Wgmma]:
    """For up to 32 rows: as many programs a multiprocessor as share all of its memory, and its registers."""
    for rows in (16, 32):
        for width, programs in ((64, 1), (64, 2), (128, 1), (128, 2), (192, 1)):
            if num_rows <= rows:
                yield Wgmma(width, rows, 1, RING_BYTES // programs // (128 * (width + rows)))


class Case:
    """Copies of one weight, and rows to multiply them with."""

    def __init__(self, shape: Shape, bits: int, group: int | None, *, integers: bool = False) -> None:
        num_out, num_in, self.is_gated = shape
        copies = max(2, TOUCHED // (num_out * num_in * bits // 8))
        self.weights = [self._weight(shape[:2], bits, integers=integers) for _ in range(copies)]
        self.rounding = Rounding(group, dtype=self.weights[0].dtype)
        self.weight_scale = torch.ones(num_out, -(-num_in // (group or num_in)), device="cuda")
        self.x = torch.randn(max(ROWS), num_in, dtype=torch.bfloat16, device="cuda")
        self.arrivals = torch.zeros(num_out, dtype=torch.int32, device="cuda")
        self.launch = self._launch if bits == 16 else self._launch_bytes

    @staticmethod
    def _weight(shape: tuple[int, int], bits: int, *, integers: bool) -> Tensor:
        weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        if bits == 16:
            return weight
        return (1600 * weight).to(torch.int8) if integers else (50 * weight).to(torch.float8_e4m3fn)

    def seconds(self, num_rows: int, tile: Tile | None) -> float:
        """Of one product, and what goes before it."""
        launches = [self.launch(num_rows, tile, weight) for weight in self.weights]
        if num_rows > MAX_ROWS:
            return median_seconds(launches, replays=7)
        norm = partial(add_rms_norm, self.x[:num_rows], None, self.x[0], 1e-6)
        return 2 * median_seconds([step for launch in launches for step in (norm, launch)], replays=7)

    def _launch(self, num_rows: int, tile: Tile | None, weight: Tensor) -> Callable[[], object]:
        x = self.x[:num_rows]
        if tile is None and self.is_gated:
            return lambda: silu_mul(F.linear(x, weight))
        if tile is None:
            return lambda: F.linear(x, weight)
        act, width = ("silu", len(weight) // 2) if self.is_gated else (None, len(weight))
        out = torch.empty(num_rows, width, dtype=torch.bfloat16, device="cuda")
        if isinstance(tile, Persistent):
            return lambda: persistent_matmul(x, weight, out, tile, act=act)
        if isinstance(tile, Wgmma):
            return lambda: hopper_matmul(x, weight, out, tile, act=act, arrivals=self.arrivals)
        return lambda: small_matmul(x, weight, out, tile, act=act, arrivals=self.arrivals)

    def _launch_bytes(self, num_rows: int, tile: Tile | None, weight: Tensor) -> Callable[[], object]:
        x, group = round_rows(self.x[:num_rows], self.rounding), self.rounding.group
        if isinstance(tile, Gemv):
            return lambda: bytes_gemv(x, weight, self.weight_scale, tile, self.rounding)
        if tile is None:
            operands = (x.values, x.scales, weight, self.weight_scale)
            multiply = scaled_matmul if group or weight.dtype == torch.int8 else multiply_rows
            return lambda: multiply(*operands, block=group or weight.shape[1], dtype=x.dtype)
        out = torch.empty(num_rows, len(weight), dtype=torch.bfloat16, device="cuda")
        more = {"scales": Scales(self.weight_scale, x.scales, group), "arrivals": self.arrivals}
        if isinstance(tile, Wgmma):
            return lambda: hopper_matmul(x.values, weight, out, tile, **more)
        return lambda: small_matmul(x.values, weight, out, tile, **more)


def choose_all(
    times: Mapping[tuple[Shape, int], Mapping[Tile | None, float]],
) -> dict[Shape, Choices]:
    """Of ours that are nearly the fastest, what serves most other cases; the library where it is faster."""
    good: dict[tuple[Shape, int], list[Tile]] = {}
    for case, measured in times.items():
        ours = {tile: seconds for tile, seconds in measured.items() if tile is not None}
        best = min(ours.values(), default=inf)
        is_ours = best <= measured[None]
        good[case] = [tile for tile, seconds in ours.items() if is_ours and seconds <= TOLERANCE * best]
    # Where splits are no matter of compilation, kernels that differ in them alone are one.
    uses = Counter(kernel_of(tile) for tiles in good.values() for tile in tiles)
    chosen: dict[Shape, Choices] = {}
    for (shape, num_rows), tiles in good.items():
        best = max(tiles, key=lambda tile: uses[kernel_of(tile)]) if tiles else None
        chosen.setdefault(shape, {})[num_rows] = best
    return chosen


def kernel_of(tile: Tile) -> Tile:
    return replace(tile, splits=1) if isinstance(tile, SplitK) else tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in (ASSETS / "shapes").glob("*.json"))
    parser.add_argument("models", nargs="*", default=["qwen3-0.6b"], help=f"config.json files, or of {known}")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=ROWS, help="rows to measure")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="tensor-parallel sizes")
    parser.add_argument("--bits", type=int, choices=(8, 16), default=16, help="of a weight")
    parser.add_argument("--integers", action="store_true", help="of 8 bits: INT8 rather than FP8")
    parser.add_argument("--group", type=int, help="inputs that share a scale, of 8 bits; all if left out")
    parser.add_argument("--package", action="store_true", help=f"write to {PACKAGED}, not {user_folder()}")
    parser.add_argument("--json", type=Path, help="also write every time to this file")
    options = parser.parse_args()
    console, times = Console(), {}
    configs = [ASSETS / "shapes" / f"{name}.json" if name in known else Path(name) for name in options.models]
    shapes = [
        shape
        for path in configs
        for ranks in options.ranks
        for shape in shapes_of(json.loads(path.read_text()), ranks)
    ]
    for shape in dict.fromkeys(shapes):
        case = Case(shape, options.bits, options.group, integers=options.integers)
        for num_rows in options.rows:
            if num_rows > MAX_ROWS and not (shape[2] or options.group or options.integers):
                continue  # the library's alone
            tiles = list(candidates(shape, num_rows, options.bits, options.group))
            if options.integers and num_rows >= MAX_ROWS:
                tiles += RINGS
            measured = {tile: case.seconds(num_rows, tile) for tile in tiles}
            times[shape, num_rows] = measured
            best = min(measured, key=measured.__getitem__)
            figures = f"{1e6 * measured[best]:6.1f} us, library {1e6 * measured[None]:6.1f} us"
            console.print(f"{shape[0]}x{shape[1]} {num_rows:4} rows: {figures}  {to_words(best)}")
    device_name, chosen = torch.cuda.get_device_name(), {}
    for (num_out, num_in, _), choices in choose_all(times).items():
        # A table counts for all rows of a shape, so those that were not measured keep what is known for them.
        is_all = set(options.rows) == set(ROWS)
        kind = {"bits": options.bits, "group": options.group, "integers": options.integers}
        kept = {} if is_all else choose(num_out, num_in, **kind, device_name=device_name)
        chosen[kind_of(**kind), num_out, num_in] = kept | choices
    folder = PACKAGED if options.package else user_folder()
    console.print(f"wrote {write_table(folder, device_name, chosen)}")
    if options.json:
        report = [
            {"shape": shape, "rows": rows, "us": [[to_words(tile), 1e6 * s] for tile, s in measured.items()]}
            for (shape, rows), measured in times.items()
        ]
        options.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
