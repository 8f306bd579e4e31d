"""Facts about the hardware, never behaviour: which device, how much memory, how many cores."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The machine as the engine sees it.  Memory in bytes."""

    device: str  # "cuda" or "cpu"
    name: str
    memory_total: int
    memory_free: int
    num_cores: int  # physical cores this process could use when it began
    capability: tuple[int, int] | None = None  # of a CUDA device
    num_sms: int = 0


def _physical_cores() -> int:
    """Physical cores this process may run on (hyperthreads share one), or what OpenMP was told."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores: set[tuple[str, str]] = set()
    for cpu in allowed:
        base = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            with open(f"{base}/physical_package_id") as package, open(f"{base}/core_id") as core:
                cores.add((package.read().strip(), core.read().strip()))
        except OSError:
            return len(allowed)
    return len(cores)


# Read at import: OpenMP later pins the main thread to one core, and its affinity then says 1.
NUM_CORES = _physical_cores()


def cpu_memory() -> tuple[int, int]:
    """(total, available) bytes, the container's limit included where there is one."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            cap = limit.read().strip()
            if cap.isdigit():
                total = min(total, int(cap))
                available = min(available, max(0, int(cap) - int(current.read())))
    except OSError:
        pass
    return total, available


def detect(device: str = "auto") -> Platform:
    """Look at the machine.  device: auto, cuda or cpu.  Raises ValueError if CUDA is wanted and absent."""
    import torch

    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device is {device!r}, must be auto, cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA device; use device='cpu'")
    if device != "cpu" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Platform(
            device="cuda",
            name=properties.name,
            memory_total=total,
            memory_free=free,
            num_cores=NUM_CORES,
            capability=(properties.major, properties.minor),
            num_sms=properties.multi_processor_count,
        )
    total, available = cpu_memory()
    return Platform(device="cpu", name="CPU", memory_total=total, memory_free=available, num_cores=NUM_CORES)


def has_triton() -> bool:
    """Whether Triton's kernels can be imported; asked without importing it."""
    return importlib.util.find_spec("triton") is not None
