"""GPUs: which there are, whether the kernels run on them, and how fast they reach the host and each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

from pellucid.doctor.finding import Finding, error, ok, warning
from pellucid.platform import check_platform, detect, has_gpu

GIB = 1 << 30
SIZE = 256 << 20  # bytes of a copy
MOST_PAIRS = 56  # that are measured: all of eight GPUs
USED = 0.1  # of a GPU's memory, which somebody else has
SLOW_HOST, SLOW_PEER = 5e9, 8e9  # bytes a second; PCIe 4 x16 has 25e9


def num_gpus() -> int:
    """That torch can use."""
    if not has_gpu():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus() -> Iterator[Finding]:
    if not has_gpu():
        yield ok("GPUs", "no driver of NVIDIA's: engines run on the CPU")
        return
    import torch

    if not torch.cuda.is_available():
        yield error("GPUs", f"there is a driver, but torch sees no GPU ({_why()})", _what_to_do())
        return
    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)


def _why() -> str:
    import torch

    if not torch.version.cuda:
        return "this torch is built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "the driver may be too old for it" if hidden is None else f"CUDA_VISIBLE_DEVICES is {hidden!r}"


def _what_to_do() -> str:
    import torch

    if not torch.version.cuda:
        return "pip install torch from an index with CUDA, see pytorch.org"
    return f"nvidia-smi shows the driver; torch wants CUDA {torch.version.cuda}; see CUDA_VISIBLE_DEVICES"


def _gpu(index: int) -> Iterator[Finding]:
    platform = detect("cuda", index)
    name = f"GPU {index}"
    said = f"{platform.gpu}, {platform.memory_free / GIB:.1f} of {platform.memory_total / GIB:.1f} GiB free"
    try:
        check_platform(platform)
    except ValueError as failure:
        yield error(name, said, str(failure))
        return
    if platform.memory_free < (1 - USED) * platform.memory_total:
        advice = "another process has the rest (nvidia-smi); end it, or lower --gpu-memory-utilization"
        yield warning(name, said, advice)
    else:
        yield ok(name, said)


def links() -> Iterator[Finding]:
    """As the driver tells them, and as copies find them."""
    import torch

    count = num_gpus()
    for index in range(count):
        rate = host_rate(index)
        said = f"{rate / 1e9:.1f} GB/s from pinned memory"
        if rate < SLOW_HOST:
            advice = "look at the slot's width: nvidia-smi -q -d PCIE; KV tiers and start-ups are slow"
            yield warning(f"host to GPU {index}", said, advice)
        else:
            yield ok(f"host to GPU {index}", said)
    kinds = topology(_nvidia_smi("topo", "-m"))
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    for a, b in pairs[:MOST_PAIRS]:
        reach = torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)
        rate = peer_rate(a, b)
        kind = kinds.get((a, b))
        parts = [
            *filter(None, [kind]),
            "peer access" if reach else "no peer access",
            f"{rate / 1e9:.1f} GB/s",
        ]
        said = ", ".join(parts)
        name = f"GPU {a} to GPU {b}"
        if not reach:
            advice = (
                "sums of tensor parallelism go through NCCL and the host; in a virtual machine or container "
                "see IOMMU/ACS and NCCL_P2P_DISABLE; -pp or -dp need less of the link"
            )
            yield warning(name, said, advice)
        elif rate < SLOW_PEER:
            yield warning(name, said, "a slow link: prefer -pp or -dp to -tp across it")
        else:
            yield ok(name, said)


def topology(matrix: str) -> dict[tuple[int, int], str]:
    """Of `nvidia-smi topo -m`: NV18 (NVLink), PIX, PXB, PHB, NODE, SYS (PCIe, ever further) by pair."""
    # Terminals get the header underlined.
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    found = dict[tuple[int, int], str]()
    for row in rows:
        if not row or not (start := re.fullmatch(r"GPU(\d+)", row[0])):
            continue
        cells = row[1:]
        if cells and re.fullmatch(r"GPU\d+", cells[0]):
            continue  # the header
        found |= {(int(start[1]), column): cell for column, cell in enumerate(cells) if cell.isupper()}
    return {pair: kind for pair, kind in found.items() if kind != "X"}


def _nvidia_smi(*arguments: str) -> str:
    """What it says; nothing if it is not there, or some GPUs are hidden, whose numbers it counts."""
    program = shutil.which("nvidia-smi")
    if program is None or os.environ.get("CUDA_VISIBLE_DEVICES"):
        return ""
    try:
        done = subprocess.run((program, *arguments), capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def host_rate(index: int) -> float:
    """Bytes a second from pinned memory."""
    import torch

    source = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{index}")
    return _best(index, lambda: target.copy_(source, non_blocking=True))


def peer_rate(source: int, target: int) -> float:
    """Bytes a second from one GPU to another."""
    import torch

    ours = torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{source}")
    theirs = torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{target}")
    return _best(source, lambda: theirs.copy_(ours, non_blocking=True))


def _best(index: int, copy: Callable[[], object]) -> float:
    import torch

    best = float("inf")
    for _ in range(4):
        torch.cuda.synchronize(index)
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize(index)
        best = min(best, time.perf_counter() - began)
    return SIZE / best
