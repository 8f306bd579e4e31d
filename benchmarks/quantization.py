"""What a layer's projections take in each format: `python benchmarks/quantization.py`, on a GPU or a CPU.

Figures are microseconds of the four projections of one decoder layer, activations rounded and all.  A launch
has weights of its own, so that none are found in a cache.  On a GPU a figure is the median over replays of a
CUDA graph; on a CPU the least of many launches, for others may share its cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pellucid.kernels.products.round_rows import rounded_bytes, rounded_bytes_ref
from pellucid.layers.linear import Linear
from pellucid.layers.weight import Weight
from pellucid.quant.base import WHOLE, LinearMethod, LinearShape
from pellucid.quant.codes import E2M1, LUT4, S8, U4, Group
from pellucid.quant.fp8 import Fp8, Fp8Format, QuantizedWhenLoaded
from pellucid.quant.int8 import Int8, Int8Format
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.packed import Packed
from pellucid.quant.unquantized import Unquantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
SHAPES = {  # (outputs, inputs) of qkv, o, gate and up, down
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
}
METHODS: dict[str, Callable[[], LinearMethod]] = {
    "bfloat16": Unquantized,
    "fp8": QuantizedWhenLoaded,
    "fp8, static": lambda: Fp8(Fp8Format(activations="static")),
    "fp8, blocks": lambda: Fp8(Fp8Format(block=(128, 128))),
    "int8": Int8,
    "int8, both": lambda: Int8(Int8Format("dynamic")),
    "int8, both, static": lambda: Int8(Int8Format("static")),
    "int4": lambda: Packed(LayerFormat(layout="gptq", code=U4, group=Group(1, 128))),
    "nf4": lambda: Packed(LayerFormat(layout="bnb4", code=LUT4, group=Group(1, 64))),
    "mxfp4": lambda: Packed(LayerFormat(layout="mxfp4", code=E2M1, group=Group(1, 32))),
    "w8a16": lambda: Packed(LayerFormat(layout="ct-pack", code=S8, group=Group(1, 128))),
}
BYTES = 400 << 20  # of weights that one pass reads at least: more than a cache holds
Figures = list[dict[str, object]]


def make_layers(method: Callable[[], LinearMethod], shapes: Sequence[tuple[int, int]]) -> list[list[Linear]]:
    """As many decoder layers' projections as it takes to leave the caches behind."""
    num_layers = max(2, -(-BYTES // sum(rows * columns for rows, columns in shapes)))
    return [[make_linear(method(), *shape) for shape in shapes] for _ in range(num_layers)]


def make_linear(method: LinearMethod, num_outputs: int, num_inputs: int) -> Linear:
    shape = LinearShape(in_features=num_inputs, out_partitions=(num_outputs,), split="out", dtype=DTYPE)
    weights = {
        name: Weight.of(spec, (name,), (WHOLE,), DEVICE) for name, spec in method.params(shape).items()
    }
    generator = torch.Generator(DEVICE).manual_seed(0)
    for weight in weights.values():
        weight.allocate()
        weight.fill(generator)
    layer = Linear(shape, method, weights)
    layer.finish()
    return layer


def seconds(launches: Sequence[Callable[[], object]]) -> float:
    """What one launch takes."""
    for launch in launches:
        launch()
    if DEVICE.type == "cpu":
        return min(elapsed(launch) for _ in range(7) for launch in launches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    return statistics.median(elapsed(graph.replay) for _ in range(20)) / len(launches)


def elapsed(run: Callable[[], object]) -> float:
    if DEVICE.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def projections(layer: Sequence[Linear], inputs: Sequence[Tensor]) -> None:
    for linear, x in zip(layer, inputs, strict=True):
        linear(x)


def product_figures(model: str, nums_tokens: Sequence[int], methods: Sequence[str]) -> Figures:
    """Each format's projections, for each number of tokens."""
    figures: Figures = []
    for name in methods:
        layers = make_layers(METHODS[name], SHAPES[model])
        for num_tokens in nums_tokens:
            inputs = [
                torch.randn(num_tokens, columns, dtype=DTYPE, device=DEVICE) for _, columns in SHAPES[model]
            ]

            launches = [partial(projections, layer, inputs) for layer in layers]
            microseconds = seconds(launches) * 1e6
            figures.append({"model": model, "what": name, "tokens": num_tokens, "us": microseconds})
    return figures


def rounding_figures(nums_tokens: Sequence[int], num_features: int) -> Figures:
    """Rounding activations to FP8, by one kernel and by torch's."""
    figures: Figures = []
    for num_tokens in nums_tokens:
        copies = max(2, BYTES // (num_tokens * num_features * 3))
        inputs = torch.randn(min(copies, 200), num_tokens, num_features, dtype=DTYPE, device=DEVICE)
        for name, group in (("a row", num_features), ("128", 128)):
            for how, quantize in (("one kernel", rounded_bytes), ("torch", rounded_bytes_ref)):
                what = f"round {name} of {num_features}, {how}"
                microseconds = seconds([partial(quantize, x, group) for x in inputs]) * 1e6
                figures.append({"model": "", "what": what, "tokens": num_tokens, "us": microseconds})
    return figures


def main() -> None:
    on_gpu = DEVICE.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["0.6B", "8B"] if on_gpu else ["0.6B"])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 8, 32, 256, 2048] if on_gpu else [1, 4, 16, 128]
    )
    parser.add_argument("--formats", nargs="+", choices=METHODS, help="which formats to measure")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    methods = options.formats or (list(METHODS)[:4] if on_gpu else ["bfloat16", "int8"])
    with torch.inference_mode():
        figures = [
            each for model in options.models for each in product_figures(model, options.tokens, methods)
        ]
        if on_gpu:
            figures += rounding_figures(options.tokens, 4096)
    table = Table("model", "what", *map(str, options.tokens), title="microseconds by number of tokens")
    for row in dict.fromkeys((figure["model"], figure["what"]) for figure in figures):
        cells = [f"{each['us']:,.1f}" for each in figures if (each["model"], each["what"]) == row]
        table.add_row(*map(str, row), *cells)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
