"""What the kernels of a decode step cost in energy: `python benchmarks/energy.py`, on an NVIDIA GPU.

Each kernel is replayed alone, on operands that no L2 cache holds, while the GPU counts its energy (NVML).  A
step that runs at the GPU's power limit takes as long as its energy does: what a kernel saves there, another
one gets, and a kernel that is bound by memory still takes from the others' clocks.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from kernels import (
    CACHE_BYTES,
    DTYPE,
    HEADS,
    LAYERS,
    PROJECTIONS,
    VOCAB_SIZE,
    WARM_SECONDS,
    WIDTHS,
    Case,
    decodes,
    draws,
    norms,
    recorded,
    turns,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.pointwise.silu_mul import silu_mul
from pellucid.kernels.products.own_products import OwnProducts, choices_for

BLOCK_SIZE = 64  # tokens of a page
NAMES = ("q, k, v", "o", "gate, up", "down")
SM_CLOCK = 1  # NVML's number of it
BATCH_SECONDS = 0.02
WARM = 10 * WARM_SECONDS
Launches = Sequence[Callable[[], object]]


class Meter:
    """Torch's current GPU's count of its energy, and its clock.  Raises OSError where there is no NVML."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._check(self._nvml.nvmlInit_v2())
        # By its name, for torch numbers only the GPUs that it may see.
        uuid = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
        self._check(self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._device)))

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)))
        return millijoules.value / 1000

    def megahertz(self) -> int:
        clock = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetClockInfo(self._device, SM_CLOCK, ctypes.byref(clock)))
        return clock.value

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(f"NVML answers with error {status}")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one launch."""

    microseconds: float
    millijoules: float
    megahertz: int


def cost_of(launches: Launches, meter: Meter, seconds: float) -> Cost:
    """Replay launches for so long or more.  Power is energy between changes of the count, over time.

    A batch of replays waits behind the one that runs, so the GPU is never idle while its count is read.
    """
    graph = recorded(launches)
    num_replays = max(1, int(BATCH_SECONDS / seconds_of(graph)))
    ends: list[torch.cuda.Event] = []  # of batches
    changes: list[tuple[float, float]] = []  # of the count: when, joules
    warm = time.perf_counter() + WARM  # the power limit takes some time to slow clocks down
    while time.perf_counter() < warm + seconds or len(changes) < 3:
        if time.perf_counter() < warm:
            ends, changes = ends[-1:], []
        for _ in range(num_replays):
            graph.replay()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        while len(ends) > 1 and not ends[-2].query():
            joules = meter.joules()
            if not changes or joules != changes[-1][1]:
                changes.append((time.perf_counter(), joules))
    megahertz = meter.megahertz()
    ends[-1].synchronize()
    microseconds = 1000 * ends[0].elapsed_time(ends[-1]) / ((len(ends) - 1) * num_replays * len(launches))
    (began, before), (ended, after) = changes[1], changes[-1]  # the first is what the count was
    return Cost(microseconds, (after - before) / (ended - began) * microseconds / 1000, megahertz)


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    """Of a replay, roughly."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 3


def kernels_of(model: str, num_rows: int, num_keys: int) -> Iterator[tuple[str, int, Launches]]:
    """(name, launches a step, launches on operands of their own) of each kernel that takes time."""
    num_layers = LAYERS[model]
    case = Case([(1, num_keys)] * num_rows, HEADS[model], BLOCK_SIZE)
    yield f"attention, {case.kv_bytes / 1e6:.0f} MB", num_layers, decodes(case)
    for name, shape in zip(NAMES, PROJECTIONS[model], strict=True):
        yield from products_of(name, num_layers, shape, num_rows, "silu" if name == "gate, up" else None)
    yield "norm", 2 * num_layers, norms(model, num_rows)[1]
    yield "norm, rope, write", num_layers, turns(model, num_rows, BLOCK_SIZE)[1]
    yield from products_of("logits", 1, (VOCAB_SIZE, WIDTHS[model][0]), num_rows, None)
    yield "draw", 1, draws(num_rows, 0.6)[1]


def products_of(
    name: str, num: int, shape: tuple[int, int], num_rows: int, act: str | None
) -> Iterator[tuple[str, int, Launches]]:
    """A projection by the kernel that the engine takes; where that is ours, by the library, too."""
    copies = max(2, CACHE_BYTES // (2 * shape[0] * shape[1]))
    weights = [0.02 * torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(copies)]
    x = torch.randn(num_rows, shape[1], dtype=DTYPE, device="cuda")
    products = OwnProducts(weights[0], choices_for(weights[0]))
    is_ours = products(x, weights[0], act=act) is not None

    def library(weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return silu_mul(y, act) if act else y

    if is_ours:
        yield name, num, [partial(products, x, weight, act=act) for weight in weights]
    yield f"{name}, by the library", 0 if is_ours else num, [partial(library, weight) for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(LAYERS), default="8B", help="whose kernels to measure")
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode")
    parser.add_argument("--keys", type=int, default=256, help="tokens that each of them has")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="for which each kernel is replayed, at least"
    )
    options = parser.parse_args()
    meter = Meter()
    title = f"{torch.cuda.get_device_name()}, Qwen3-{options.model}, {options.rows} rows of {options.keys}"
    table = Table("kernel", "a step", "us", "mJ", "W", "MHz", title=title)
    total = 0.0
    for name, num, launches in kernels_of(options.model, options.rows, options.keys):
        cost = cost_of(launches, meter, options.seconds)
        total += num * cost.millijoules
        watts = 1000 * cost.millijoules / cost.microseconds
        table.add_row(
            name, f"{num or '-'}", f"{cost.microseconds:,.1f}", f"{cost.millijoules:,.2f}", f"{watts:,.0f}",
            f"{cost.megahertz:,}",
        )  # fmt: skip
    Console().print(table)
    Console().print(f"A step is {total / 1000:.2f} J.")


if __name__ == "__main__":
    main()
