"""How close the kernels come to the machine: `python benchmarks/kernels.py`, on a GPU.

Each figure is the median over replays of a CUDA graph that holds several launches, each on operands of its
own, so that nothing but small operands is found in the L2 cache.  Decode is measured in GB/s of keys and
values, prefill in TFLOP/s below the causal diagonal, products of few rows in GB/s of weights, all layers of a
model without their attention in TFLOP/s, draws in GB/s of logits, passes between products in GB/s read and
written; a plain copy and a plain matrix product say what the machine gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from pellucid.cli.workloads import nano
from pellucid.kernels.attention.decode_attention import decode_attention
from pellucid.kernels.attention.hopper_prefill import hopper_takes
from pellucid.kernels.attention.paged_attention import PagedRows
from pellucid.kernels.attention.prefill_attention import prefill_attention, prefill_tiles, queries_per_tile
from pellucid.kernels.attention.prefill_plan import PromptTiles
from pellucid.kernels.attention.qkv_rope import qkv_rope
from pellucid.kernels.pointwise.rms_norm import add_rms_norm
from pellucid.kernels.pointwise.silu_mul import silu_mul
from pellucid.kernels.products.own_products import OwnProducts, choices_for
from pellucid.kernels.sampling.sample import BLOCK_TOKENS, draw
from pellucid.sample.noise import token_codes

HEAD_DIM = 128
DTYPE = torch.bfloat16
CACHE_BYTES = 200 << 20  # what the launches of one graph must touch at least: several times any L2
WARM_SECONDS = 0.05  # of replays beforehand: a GPU that had nothing to do has let its clocks down
MAX_MODEL_LEN = 16_384
VOCAB_SIZE = 151_936  # Qwen3's
HEADS = {"0.6B": (16, 8), "8B": (32, 8), "32B": (64, 8)}
WIDTHS = {"0.6B": (1024, 3072), "8B": (4096, 12288), "32B": (5120, 25600)}  # model dim, hidden features
PASSES = (1, 32, 256, 4096)  # tokens
NANO = nano().prompts, nano().output_lens
DECODES = {
    "1 x 160": [160],
    "1 x 1,024": [1024],
    "1 x 8,000": [8000],
    "16 x 1,024": [1024] * 16,
    "32 x 160": [160] * 32,
    "64 x 1,024": [1024] * 64,
    "256 x 150": [150] * 256,
    "256 x 256": [256] * 256,
    "256 x 360": [360] * 256,
    "256 x 2,000..100": [2000 - 1900 * i // 255 for i in range(256)],  # as the scheduler has them
    "256 x 100..2,000": [100 + 1900 * i // 255 for i in range(256)],
    "4 x 5,000, 252 x 300": [5000] * 4 + [300] * 252,
    "256 x 100..2,000, mixed": [100 + 1900 * (i * 101 % 256) // 255 for i in range(256)],
    **{
        f"nano, step {step}": [len(prompt) + step for prompt, num in zip(*NANO, strict=True) if num > step]
        for step in (100, 500, 780, 880, 960, 975)
    },
}
VERIFICATIONS = {"1 x 300": [300], "32 x 300": [300] * 32}
PROJECTIONS = {  # outputs and inputs of qkv, o, gate_up, down, as merged
    "0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "8B": [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)],
}
LAYERS = {"0.6B": 28, "8B": 36}
LAYER_ROWS = (5, 24, 32, 64, 144, 256)
PREFILLS = {
    "128 x 128": [(128, 128)] * 128,
    "16 x 512": [(512, 512)] * 16,
    "4 x 2,048": [(2048, 2048)] * 4,
    "1 x 8,192": [(8192, 8192)],
    "2,048 behind 6,144": [(2048, 8192)],
    "8,192 behind 8,192": [(8192, 16_384)],
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured case."""

    kernel: str
    model: str
    case: str
    microseconds: float
    rate: float
    unit: str


def recorded(launches: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of launches, each of which has run once."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def median_seconds(launches: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Seconds of one launch: the median over replays of a graph that holds them all, with clocks up."""
    graph = recorded(launches)
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times) / len(launches)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of (queries, tokens), with as many copies of their blocks as it takes to leave the L2 behind."""

    lens: list[tuple[int, int]]
    heads: tuple[int, int]
    block_size: int
    kv_dtype: torch.dtype = DTYPE

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self.lens)

    @property
    def kv_bytes(self) -> int:
        return self.num_tokens * 2 * self.heads[1] * HEAD_DIM * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        pairs = sum(q * (tokens - q) + q * (q + 1) // 2 for q, tokens in self.lens)
        return 4 * pairs * self.heads[0] * HEAD_DIM

    def build(self) -> tuple[Tensor, Tensor, list[PagedRows]]:
        """(queries [T, N, H], cache, one set of rows a launch)."""
        widths = [-(-tokens // self.block_size) for _, tokens in self.lens]
        copies = max(3, -(-CACHE_BYTES // self.kv_bytes))
        num_blocks = copies * sum(widths) + 1
        cache = torch.randn(
            num_blocks, 2, self.heads[1], self.block_size, HEAD_DIM, dtype=DTYPE, device="cuda"
        ).to(self.kv_dtype)
        free = iter((torch.randperm(num_blocks - 1) + 1).tolist())
        query_lens = [q for q, _ in self.lens]
        rows = []
        for _ in range(copies):
            table = torch.zeros(len(self.lens), MAX_MODEL_LEN // self.block_size, dtype=torch.int32)
            for row, width in enumerate(widths):
                table[row, :width] = torch.tensor([next(free) for _ in range(width)])
            rows.append(
                PagedRows(
                    block_table=table.cuda(),
                    seq_lens=torch.tensor([t for _, t in self.lens], dtype=torch.int32, device="cuda"),
                    cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().cuda(),
                    max_query=max(query_lens),
                )
            )
        return torch.randn(sum(query_lens), self.heads[0], HEAD_DIM, dtype=DTYPE, device="cuda"), cache, rows


def decodes(case: Case) -> list[Callable[[], object]]:
    """Decode attention of a case, on one set of rows after the other."""
    q, cache, views = case.build()
    attend = partial(decode_attention, q, cache, scale=HEAD_DIM**-0.5, out=torch.empty_like(q))
    return [partial(attend, rows) for rows in views]


def decode_figure(
    model: str, name: str, block_size: int, num_query: int = 1, kv_dtype: torch.dtype = DTYPE
) -> Figure:
    lens = DECODES[name] if num_query == 1 else VERIFICATIONS[name]
    case = Case([(num_query, tokens) for tokens in lens], HEADS[model], block_size, kv_dtype)
    seconds = median_seconds(decodes(case))
    kernel = "decode" if num_query == 1 else f"verify {num_query}"
    kernel += ", FP8" if kv_dtype != DTYPE else ""
    return Figure(kernel, model, name, seconds * 1e6, case.kv_bytes / seconds / 1e9, "GB/s")


def prefill_figure(model: str, name: str, block_size: int) -> Figure:
    case = Case(PREFILLS[name], HEADS[model], block_size)
    q, cache, views = case.build()
    out = torch.empty_like(q)
    by_hopper = hopper_takes(q, cache, views[0])
    tile_queries = queries_per_tile(case.heads[0] // case.heads[1], by_hopper=by_hopper)
    tiles = torch.from_numpy(prefill_tiles([q for q, _ in case.lens], tile_queries)).cuda()
    tiles = PromptTiles(tiles, views[0], tile_queries)
    scale = HEAD_DIM**-0.5

    def launch(rows: PagedRows) -> Callable[[], object]:
        return lambda: prefill_attention(q, cache, rows, tiles=tiles, scale=scale, out=out)

    seconds = median_seconds([launch(rows) for rows in views])
    return Figure("prefill", model, name, seconds * 1e6, case.flops / seconds / 1e12, "TFLOP/s")


def norms(model: str, num_tokens: int) -> tuple[int, list[Callable[[], object]]]:
    """(bytes of a launch, launches) of what adds to the residual stream and normalizes."""
    dim = WIDTHS[model][0]
    num_bytes = 4 * num_tokens * dim * DTYPE.itemsize
    operands = torch.randn(copies_of(num_bytes), 2, num_tokens, dim, dtype=DTYPE, device="cuda")
    weight = torch.ones(dim, dtype=DTYPE, device="cuda")
    return num_bytes, [partial(add_rms_norm, x, residual, weight, 1e-6) for x, residual in operands]


def norm_figure(model: str, num_tokens: int) -> Figure:
    return pass_figure("add, norm", model, num_tokens, *norms(model, num_tokens))


def gate_figure(model: str, num_tokens: int) -> Figure:
    hidden = WIDTHS[model][1]
    num_bytes = 3 * num_tokens * hidden * DTYPE.itemsize
    operands = torch.randn(copies_of(num_bytes), num_tokens, 2 * hidden, dtype=DTYPE, device="cuda")
    launches = [partial(silu_mul, gate_up) for gate_up in operands]
    return pass_figure("silu, mul", model, num_tokens, num_bytes, launches)


def turns(model: str, num_tokens: int, block_size: int) -> tuple[int, list[Callable[[], object]]]:
    """(bytes of a launch, launches) of what normalizes and turns q and k, and caches k and v."""
    num_heads, num_kv_heads = HEADS[model]
    width = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    num_bytes = 2 * num_tokens * width * DTYPE.itemsize
    operands = torch.randn(copies_of(num_bytes), num_tokens, width, dtype=DTYPE, device="cuda")
    num_blocks = -(-len(operands) * num_tokens // block_size)
    cache = torch.zeros(num_blocks, 2, num_kv_heads, block_size, HEAD_DIM, dtype=DTYPE, device="cuda")
    places = torch.randperm(num_blocks * block_size, device="cuda").split(num_tokens)
    positions = torch.randint(MAX_MODEL_LEN, (num_tokens,), device="cuda")
    norm = torch.ones(num_heads + num_kv_heads, HEAD_DIM, dtype=DTYPE, device="cuda"), 1e-6
    rope = torch.randn(MAX_MODEL_LEN, 2, 1, HEAD_DIM, device="cuda")
    return num_bytes, [
        partial(qkv_rope, qkv, cache, positions, slots, norm=norm, rope=rope)
        for qkv, slots in zip(operands, places, strict=False)
    ]


def qkv_figure(model: str, num_tokens: int, block_size: int) -> Figure:
    return pass_figure("norm, rope, write", model, num_tokens, *turns(model, num_tokens, block_size))


def copies_of(num_bytes: int) -> int:
    """Operands to go around: past the L2 where that takes few; small ones stay in it, as in the engine."""
    return min(100, max(3, -(-CACHE_BYTES // num_bytes)))


def pass_figure(
    kernel: str, model: str, num_tokens: int, num_bytes: int, launches: Sequence[Callable[[], object]]
) -> Figure:
    """A kernel that passes once over its operands; num_bytes: of one launch, read and written."""
    seconds = median_seconds(launches)
    return Figure(kernel, model, f"{num_tokens:,} tokens", seconds * 1e6, num_bytes / seconds / 1e9, "GB/s")


def product_figure(shape: tuple[int, int], num_rows: int) -> Figure:
    """A projection [outputs, inputs] of few rows, as a layer multiplies it."""
    num_out, num_in = shape
    copies = max(2, CACHE_BYTES // (2 * num_out * num_in))
    weights = [torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(copies)]
    x = torch.randn(num_rows, num_in, dtype=DTYPE, device="cuda")
    products = OwnProducts(weights[0], choices_for(weights[0]))

    def launch(weight: Tensor) -> Callable[[], object]:
        def run() -> Tensor:
            y = products(x, weight)
            return F.linear(x, weight) if y is None else y

        return run

    seconds = median_seconds([launch(weight) for weight in weights])
    case = f"{num_out:,} x {num_in:,}, {num_rows} rows"
    return Figure("product", "-", case, seconds * 1e6, weights[0].nbytes / seconds / 1e9, "GB/s")


def layers_figure(model: str, num_rows: int) -> Figure:
    """A decode's layers without attention, replayed for a second: what the GPU's power allows them."""
    shapes, dim = PROJECTIONS[model], WIDTHS[model][0]
    num_weights = sum(num_out * num_in for num_out, num_in in shapes)
    layers = [
        [0.02 * torch.randn(shape, dtype=DTYPE, device="cuda") for shape in shapes]
        for _ in range(copies_of(num_weights * DTYPE.itemsize))
    ]
    products = [OwnProducts(weight, choices_for(weight)) for weight in layers[0]]
    norm = torch.ones(dim, dtype=DTYPE, device="cuda")
    x = torch.randn(num_rows, dim, dtype=DTYPE, device="cuda")

    def multiply(place: int, x: Tensor, weight: Tensor, act: str | None = None) -> Tensor:
        y = products[place](x, weight, act=act)
        if y is not None:
            return y
        y = F.linear(x, weight)
        return silu_mul(y, act) if act else y

    def run() -> None:
        y, stream = x, x.clone()
        for i in range(LAYERS[model]):
            qkv, o, gate_up, down = layers[i % len(layers)]
            y, stream = add_rms_norm(y, stream, norm, 1e-6)
            attended = multiply(0, y, qkv)[:, : o.shape[1]].contiguous()
            y, stream = add_rms_norm(multiply(1, attended, o), stream, norm, 1e-6)
            y = multiply(3, multiply(2, y, gate_up, "silu"), down)

    seconds = median_seconds([run], replays=200)
    flops = 2 * num_rows * num_weights * LAYERS[model]
    return Figure("layers", model, f"{num_rows} rows", seconds * 1e6, flops / seconds / 1e12, "TFLOP/s")


def draws(num_rows: int, temperature: float) -> tuple[int, list[Callable[[], object]]]:
    """(bytes of logits, launches) of drawing tokens from Qwen3's vocabulary."""
    num_bytes = num_rows * VOCAB_SIZE * DTYPE.itemsize
    copies = max(1, CACHE_BYTES // num_bytes)
    logits = torch.randn(copies, num_rows, VOCAB_SIZE, dtype=DTYPE, device="cuda")
    slots = torch.arange(num_rows, device="cuda")
    heat = torch.full((num_rows,), temperature, dtype=torch.float64, device="cuda")
    codes = token_codes(VOCAB_SIZE, "cuda")[::BLOCK_TOKENS].contiguous()
    return num_bytes, [partial(draw, part, codes, slots, heat, slots, slots) for part in logits]


def draw_figure(num_rows: int, temperature: float) -> Figure:
    num_bytes, launches = draws(num_rows, temperature)
    seconds = median_seconds(launches)
    case = f"{num_rows} rows at temperature {temperature}"
    return Figure("draw", "-", case, seconds * 1e6, num_bytes / seconds / 1e9, "GB/s")


def machine_figures() -> list[Figure]:
    """What the machine gives a plain copy and a plain matrix product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = median_seconds([lambda: target.copy_(source)])
    a = torch.randn(8192, 8192, dtype=DTYPE, device="cuda")
    product = median_seconds([lambda: a @ a])
    return [
        Figure("copy", "-", "1 GiB", copy * 1e6, 2 * source.nbytes / copy / 1e9, "GB/s"),
        Figure("matmul", "-", "8192^3", product * 1e6, 2 * 8192**3 / product / 1e12, "TFLOP/s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a page")
    parser.add_argument(
        "--models", nargs="+", choices=HEADS, default=list(HEADS), help="whose heads to measure"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures = machine_figures()
    figures += [draw_figure(rows, temperature) for rows in (1, 32, 256) for temperature in (0.0, 0.6)]
    for model in options.models:
        shapes = PROJECTIONS.get(model, ())
        figures += [product_figure(shape, rows) for shape in shapes for rows in (1, 4, 16, 64)]
        figures += [layers_figure(model, rows) for rows in LAYER_ROWS if model in LAYERS]
        for dtype in (DTYPE, torch.float8_e4m3fn):
            figures += [decode_figure(model, name, options.block_size, 1, dtype) for name in DECODES]
            figures += [decode_figure(model, name, options.block_size, 5, dtype) for name in VERIFICATIONS]
        figures += [prefill_figure(model, name, options.block_size) for name in PREFILLS]
        for num_tokens in PASSES:
            figures += [norm_figure(model, num_tokens), gate_figure(model, num_tokens)]
            figures.append(qkv_figure(model, num_tokens, options.block_size))
    table = Table("kernel", "model", "case", "us", "rate", title=torch.cuda.get_device_name())
    for figure in figures:
        rate = f"{figure.rate:,.0f} {figure.unit}"
        table.add_row(figure.kernel, figure.model, figure.case, f"{figure.microseconds:,.1f}", rate)
    Console().print(table)
    if options.json:
        report = {"device": torch.cuda.get_device_name(), "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
