"""Products of a layer of experts, packed and plain: microseconds by number of tokens.

`python benchmarks/experts.py --codes mxfp4 --tokens 1 32 256` on a GPU; gpt-oss-20b's sizes unless
told otherwise.  `--device cpu`: of native code, or with `--codes torch` of plain experts without it; then it
is the time for which this process has the core, so use one (`OMP_NUM_THREADS=1`).
Experts are drawn by chance, and each launch is of another of several layers, so that codes come from memory.
Sorting and adding up are in it, routing is not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.kernels.experts.experts import ExpertWeights, Gating, added_up, mix_experts, mix_experts_ref
from pellucid.kernels.experts.packed_experts import PackedExperts, mix_packed, pack_experts
from pellucid.kernels.experts.routing import Chosen
from pellucid.kernels.packed.packed_weight import GroupCodes
from pellucid.native.library import library
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.native_experts import NativeExperts, native_experts, native_plain
from pellucid.quant.online import FORMATS
from pellucid.quant.packed import dummy

LAYERS, LAUNCHES = 3, 9
GATING = Gating("silu", 7.0, 1.702)
Layer = ExpertWeights | PackedExperts | NativeExperts


def coded_layer(
    num: int, dim: int, hidden: int, format: Callable[[int], LayerFormat], device: str
) -> PackedExperts | NativeExperts:
    def codes(num_out: int, num_in: int) -> GroupCodes:
        bits = torch.randint(256, (num_out, num_in), dtype=torch.uint8, device=device)
        return dummy(bits, format(num_in))

    gates = [(codes(hidden, dim), codes(hidden, dim)) for _ in range(num)]
    downs = [(codes(dim, hidden),) for _ in range(num)]
    if device == "cpu":
        code = library()
        assert code is not None, "no compiler"
        return native_experts(code, gates, downs, torch.bfloat16)
    return PackedExperts(
        gate_up=pack_experts(gates, torch.bfloat16, gated=True),
        down=pack_experts(downs, torch.bfloat16),
        num_experts=num,
        hidden=hidden,
        dim=dim,
    )


def plain_layer(
    num: int, dim: int, hidden: int, device: str, *, native: bool
) -> ExpertWeights | NativeExperts:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02

    experts = ExpertWeights(random(num, 2 * hidden, dim), random(num, dim, hidden))
    code = library() if native else None
    return experts if code is None else native_plain(code, experts) or experts


def mixed(x: Tensor, chosen: Chosen, layer: Layer) -> Tensor:
    if isinstance(layer, NativeExperts):
        return layer.mix(x, chosen, GATING)
    if isinstance(layer, PackedExperts):
        return added_up(mix_packed(x, chosen, layer, GATING))
    return added_up((mix_experts if x.is_cuda else mix_experts_ref)(x, chosen, layer, GATING))


def on_cpu(launch: Callable[[int], Tensor]) -> float:
    """Microseconds of one of several launches, the best of three rounds."""
    times: list[float] = []
    for _ in range(4):
        began = time.process_time()
        for i in range(LAYERS):
            launch(i)
        times.append(1e6 * (time.process_time() - began) / LAYERS)
    return min(times[1:])


def on_gpu(launch: Callable[[int], Tensor]) -> float:
    """The same in a recorded graph."""
    for i in range(LAYERS):
        launch(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            launch(i % LAYERS)
    times: list[float] = []
    for _ in range(4):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(1e3 * first.elapsed_time(last) / LAUNCHES)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--codes", choices=("plain", "torch", *FORMATS), default="mxfp4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 4096, 16384])
    parser.add_argument("--sizes", type=int, nargs=4, default=[32, 4, 2880, 2880], metavar="N",
                        help="experts, of a token, features of the model, of an expert")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    (num, top_k, dim, hidden), device = args.sizes, args.device
    layers: list[Layer] = [
        plain_layer(num, dim, hidden, device, native=args.codes == "plain" and device == "cpu")
        if args.codes in ("plain", "torch")
        else coded_layer(num, dim, hidden, FORMATS[args.codes], device)
        for _ in range(LAYERS)
    ]
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{name}, {args.codes}, {num} experts, {top_k} of a token, {dim} x {hidden}")
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, dim, device=device, dtype=torch.bfloat16)
        ids = [
            torch.stack([torch.randperm(num, device=device)[:top_k] for _ in range(num_tokens)]).int()
            for _ in layers
        ]
        weights = torch.rand(num_tokens, top_k, device=device)
        microseconds = on_gpu if device == "cuda" else on_cpu
        taken = microseconds(lambda i: mixed(x, Chosen(ids[i], weights), layers[i]))  # noqa: B023 called at once
        teraflops = 6e-12 * num_tokens * top_k * dim * hidden
        print(f"{num_tokens:6} tokens {taken:9.1f} us, {teraflops / taken * 1e6:8.2f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
