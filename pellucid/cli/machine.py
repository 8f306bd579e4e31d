"""Measures what this machine can do at best: bytes per second and FLOPs per second, in under two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.cli.limits import Machine

GIB = 1 << 30
ROUNDS = 5


def measure_machine(device: str, dtype: str, num_threads: int) -> Machine:
    """Measure memory and a matmul in `dtype` (torch's name).  Leaves no memory taken on the device."""
    torch.set_num_threads(num_threads)
    machine = Machine(bandwidth=_bandwidth(device), flops=_matmul_rate(device, getattr(torch, dtype)))
    if device == "cuda":
        torch.cuda.empty_cache()
    return machine


def _bandwidth(device: str) -> float:
    """Bytes per second: the better of a copy and a sum, over far more than any cache."""
    num_bytes = GIB if device == "cuda" else GIB // 4
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / _best_seconds(lambda: target.copy_(source), device)
    return max(copied, num_bytes / _best_seconds(source.sum, device))


def _matmul_rate(device: str, dtype: torch.dtype) -> float:
    size = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: torch.nn.functional.linear(left, right), device)


def _best_seconds(work: Callable[[], Tensor], device: str) -> float:
    """The quickest of a few rounds; the first, which warms up, does not count."""
    best = float("inf")
    for round_number in range(ROUNDS + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        if round_number:
            best = min(best, time.perf_counter() - began)
    return best


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
