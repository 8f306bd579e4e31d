"""Two GPUs: what goes through mailboxes is what NCCL or plain torch would have made of it, also in graphs."""

from __future__ import annotations

from multiprocessing.queues import SimpleQueue

import pytest
import torch
from torch import Tensor

from pellucid.dist.collectives import Group, connect, disconnect
from pellucid.dist.mesh import Mesh
from pellucid.kernels.ranks.all_reduce import (
    MAX_ROWS,
    sum_add_rms_norm,
    sum_add_rms_norm_ref,
    sum_rows_ref,
)
from tests.kernels.compare import assert_rounded_alike

SIZE = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason="needs two GPUs"),
]
SHAPES = ((1, 4096), (8, 1024), (MAX_ROWS, 2048), (3, 8192), (1, 4096), (17, 2560))


def parts(shape: tuple[int, ...], seed: int) -> Tensor:
    """Of all ranks, [R, ...]; every rank knows them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn((SIZE, *shape), generator=generator, device="cuda").bfloat16()


def check_sums(tp: Group) -> None:
    for seed, shape in enumerate((*SHAPES, (MAX_ROWS + 1, 4096))):  # the last one goes through NCCL
        x = parts(shape, seed)
        assert torch.equal(tp.all_reduce(x[tp.rank].clone()), sum_rows_ref(x))


def check_gathers(tp: Group) -> None:
    for seed, shape in enumerate((*SHAPES, (MAX_ROWS + 1, 8192))):
        x = parts(shape, seed)
        assert torch.equal(tp.gather(x[tp.rank]), x)
        assert torch.equal(tp.gather(x[tp.rank].double()), x.double())


def check_graphs(tp: Group) -> None:
    """Sums with norms of several shapes in one graph, and new operands for every replay."""
    operands = [(parts(shape, 50 + i), parts(shape, 90 + i)[0]) for i, shape in enumerate(SHAPES)]
    weight = parts((8192,), 7)[0]

    def run() -> list[tuple[Tensor, Tensor]]:
        outputs = []
        for x, residual in operands:
            assert tp.mailbox is not None
            own = x[tp.rank].clone()
            outputs.append(sum_add_rms_norm(own, residual.clone(), weight[: x.shape[-1]], 1e-6, tp.mailbox))
        return outputs

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run()
    for replay in range(50):
        for i, (x, residual) in enumerate(operands):
            x.copy_(parts(tuple(residual.shape), 1000 * replay + i))
        graph.replay()
        for (x, residual), (out, stream) in zip(operands, outputs, strict=True):
            expected, expected_stream = sum_add_rms_norm_ref(x, residual.clone(), weight[: x.shape[-1]], 1e-6)
            assert torch.equal(stream, expected_stream)
            assert_rounded_alike(out, expected)


def run_rank(rank: int, ports: SimpleQueue[int]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    links = connect(
        Mesh(tp=SIZE, rank=rank),
        lambda port: meet(ports, port),
        device,
        entered=lambda _: None,
        waiting=lambda _: None,
    )
    assert links.tp.mailbox is not None, "nothing is tested"
    for check in (check_sums, check_gathers, check_graphs):
        check(links.tp)
    disconnect()


def meet(ports: SimpleQueue[int], port: int | None) -> int:
    if port is None:
        return ports.get()
    for _ in range(SIZE - 1):
        ports.put(port)
    return port


def test_two_gpus_agree() -> None:
    ports = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run_rank, (ports,), nprocs=SIZE)
