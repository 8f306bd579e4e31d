"""Products of a layer of experts, packed and plain: microseconds by number of tokens.

`python benchmarks/experts.py --codes mxfp4 --tokens 1 32 256` on a GPU; gpt-oss-20b's sizes unless
told otherwise.
Experts are drawn by chance, and each launch is of another of several layers, so that codes come from memory.
Sorting and adding up are in it, routing is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.kernels.experts import ExpertWeights, Gating, mix_experts
from pellucid.kernels.packed_experts import PackedExperts, mix_packed, pack_experts
from pellucid.kernels.packed_weight import GroupCodes
from pellucid.kernels.routing import Chosen
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.online import EXPERT_FORMATS
from pellucid.quant.packed import dummy

LAYERS, LAUNCHES = 3, 9
GATING = Gating("silu", 7.0, 1.702)


def packed_layer(num: int, dim: int, hidden: int, format: Callable[[int], LayerFormat]) -> PackedExperts:
    def codes(num_out: int, num_in: int) -> GroupCodes:
        bits = torch.randint(256, (num_out, num_in), dtype=torch.uint8, device="cuda")
        return dummy(bits, format(num_in))

    gates = [(codes(hidden, dim), codes(hidden, dim)) for _ in range(num)]
    downs = [(codes(dim, hidden),) for _ in range(num)]
    return PackedExperts(
        gate_up=pack_experts(gates, torch.bfloat16, gated=True),
        down=pack_experts(downs, torch.bfloat16),
        num_experts=num,
        hidden=hidden,
        dim=dim,
    )


def plain_layer(num: int, dim: int, hidden: int) -> ExpertWeights:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

    return ExpertWeights(random(num, 2 * hidden, dim), random(num, dim, hidden))


def microseconds(launch: Callable[[int], Tensor]) -> float:
    """Of one of several launches in a recorded graph, the best of three replays."""
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
    parser.add_argument("--codes", choices=("plain", *EXPERT_FORMATS), default="mxfp4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 4096, 16384])
    parser.add_argument("--sizes", type=int, nargs=4, default=[32, 4, 2880, 2880], metavar="N",
                        help="experts, of a token, features of the model, of an expert")  # fmt: skip
    args = parser.parse_args()
    num, top_k, dim, hidden = args.sizes
    layers = [
        plain_layer(num, dim, hidden)
        if args.codes == "plain"
        else packed_layer(num, dim, hidden, EXPERT_FORMATS[args.codes])
        for _ in range(LAYERS)
    ]
    print(
        f"{torch.cuda.get_device_name()}, {args.codes}, {num} experts, {top_k} of a token, {dim} x {hidden}"
    )
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, dim, device="cuda", dtype=torch.bfloat16)
        ids = torch.stack([torch.randperm(num, device="cuda")[:top_k] for _ in range(num_tokens)]).int()
        chosen = Chosen(ids, torch.rand(num_tokens, top_k, device="cuda"))
        mix = mix_experts if args.codes == "plain" else mix_packed
        taken = microseconds(lambda i: mix(x, chosen, layers[i], GATING))  # noqa: B023 called at once
        teraflops = 6e-12 * num_tokens * top_k * dim * hidden
        print(f"{num_tokens:6} tokens {taken:9.1f} us, {teraflops / taken * 1e6:6.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
