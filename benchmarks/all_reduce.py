"""Microseconds of a sum over GPUs, the residual's addition and the norm: `python benchmarks/all_reduce.py`.

Medians over replays of a CUDA graph of many such steps, each on the output of the one before: joined in one
kernel, and NCCL's sum with the norm's kernel behind it.  Ranks are the GPUs that torch sees.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue

import torch
from rich.console import Console
from torch import Tensor

from pellucid.dist.collectives import connect, disconnect
from pellucid.dist.mesh import Mesh
from pellucid.kernels.pointwise.rms_norm import add_rms_norm
from pellucid.kernels.ranks.all_reduce import sum_add_rms_norm

DIM, STEPS, REPLAYS = 4096, 72, 20
ROWS = (1, 8, 32, 64, 128)


def microseconds(step: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Of one of STEPS in a row."""
    step(x)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x
        for _ in range(STEPS):
            y = step(y)
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / STEPS)
    return statistics.median(times)


def run_rank(rank: int, size: int, ports: SimpleQueue[int]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)

    def meet(port: int | None) -> int:
        if port is None:
            return ports.get()
        for _ in range(size - 1):
            ports.put(port)
        return port

    mesh = Mesh(tp=size, rank=rank)
    tp = connect(mesh, meet, device, entered=lambda _: None, waiting=lambda _: None).tp
    weight = torch.ones(DIM, dtype=torch.bfloat16, device=device)
    for rows in ROWS:
        x, residual = torch.randn(2, rows, DIM, device=device).bfloat16()

        def joined(x: Tensor, residual: Tensor = residual) -> Tensor:
            assert tp.mailbox is not None, "these GPUs share no memory"
            return sum_add_rms_norm(x, residual, weight, 1e-6, tp.mailbox)[0]

        def apart(x: Tensor, residual: Tensor = residual) -> Tensor:
            torch.distributed.all_reduce(x)
            return add_rms_norm(x, residual, weight, 1e-6)[0]

        figures = microseconds(joined, x.clone()), microseconds(apart, x.clone())
        if rank == 0:
            Console().print(f"{rows} rows of {DIM}: joined {figures[0]:.2f} us, NCCL {figures[1]:.2f} us")
    disconnect()


def main() -> None:
    size = torch.cuda.device_count()
    ports = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run_rank, (size, ports), nprocs=size)


if __name__ == "__main__":
    main()
