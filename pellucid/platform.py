"""Facts about the hardware, never behaviour: which device, how much memory, how many cores."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

OLDEST_GPU = (8, 0)  # the compute capability from which on Triton and the kernels here compile


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
    shared_memory: int | None = None  # most of a CUDA program, in bytes
    is_hip: bool = False  # an AMD GPU, which torch calls "cuda" as well
    has_triton: bool = True  # is installed

    def reaches(self, major: int, minor: int = 0) -> bool:
        """Whether this is an NVIDIA GPU of this compute capability or a newer one."""
        return self.capability is not None and not self.is_hip and self.capability >= (major, minor)

    @property
    def is_hopper(self) -> bool:
        return self.reaches(9) and not self.reaches(10)

    @property
    def gpu(self) -> str:
        """The GPU for an error message: its name and what it can."""
        major, minor = self.capability or (0, 0)
        return f"{self.name} (compute capability {major}.{minor})"


def _openmp_cpus() -> set[int]:
    """The CPUs that OpenMP's threads are pinned to; none if it is not loaded, or pins none."""
    try:
        openmp, cpus = ctypes.CDLL(None), set[int]()
        for place in range(openmp.omp_get_num_places() if openmp.omp_get_proc_bind() else 0):
            ids = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
            openmp.omp_get_place_proc_ids(place, ids)
            cpus |= set(ids)
        return cpus
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no None
        return set()


def _physical_cores() -> list[set[int]]:
    """The CPUs of every physical core this process may run on: hyperthreads share one."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    allowed |= _openmp_cpus()  # which has left this thread one, if torch was imported before
    cores: dict[tuple[int, int], set[int]] = {}
    for cpu in sorted(allowed):
        base = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            with open(f"{base}/physical_package_id") as package, open(f"{base}/core_id") as core:
                cores.setdefault((int(package.read()), int(core.read())), set()).add(cpu)
        except OSError:
            return [{cpu} for cpu in sorted(allowed)]
    return [cores[place] for place in sorted(cores)]


def _num_cores() -> int:
    """How many physical cores there are for us, or what OpenMP was told."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) > 0 else len(CORES)


# Read at import: OpenMP pins the main thread to one core, and its affinity then says 1.
CORES = _physical_cores()
NUM_CORES = _num_cores()


def share_of_cpus(index: int, num_shares: int) -> set[int]:
    """The CPUs of one of several equal shares of the physical cores, neighbours together.

    With fewer cores than shares, several shares are the same core.
    """
    first, end = index * len(CORES) // num_shares, (index + 1) * len(CORES) // num_shares
    return set[int]().union(*CORES[first : max(end, first + 1)])


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


def detect(device: str = "auto", gpu: int | None = None) -> Platform:
    """Look at the machine.

    device: auto, cuda or cpu.  gpu: which one to look at; None is torch's current one.  Raises ValueError if
    CUDA is wanted and absent, or has no such GPU.
    """
    import torch

    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device is {device!r}, must be auto, cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA device; use device='cpu'")
    if device != "cpu" and torch.cuda.is_available():
        if gpu is not None and gpu >= torch.cuda.device_count():
            raise ValueError(
                f"{gpu + 1} GPUs are asked for, but torch sees {torch.cuda.device_count()}; "
                "lower tensor_parallel_size or data_parallel_size, or see CUDA_VISIBLE_DEVICES"
            )
        index = torch.cuda.current_device() if gpu is None else gpu
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        return Platform(
            device="cuda",
            name=properties.name,
            memory_total=total,
            memory_free=free,
            num_cores=NUM_CORES,
            capability=(properties.major, properties.minor),
            num_sms=properties.multi_processor_count,
            shared_memory=getattr(properties, "shared_memory_per_block_optin", None),
            is_hip=torch.version.hip is not None,
            has_triton=has_triton(),
        )
    total, available = cpu_memory()
    return Platform(device="cpu", name="CPU", memory_total=total, memory_free=available, num_cores=NUM_CORES)


@cache
def platform_of(device: torch.device) -> Platform:
    """The machine as it is seen from one of torch's devices; its memory as it was when first asked."""
    return detect("cuda", device.index) if device.type == "cuda" else detect("cpu")


def check_platform(platform: Platform) -> None:
    """Raise ValueError, naming the way out, if nothing can run on this machine's GPU."""
    if platform.device != "cuda":
        return
    if platform.is_hip:
        raise ValueError(
            f"the GPU is {platform.name}, an AMD one (ROCm), for which the kernels are not written; "
            "use an NVIDIA GPU, or device='cpu'"
        )
    if platform.capability is not None and platform.capability < OLDEST_GPU:
        raise ValueError(
            f"the GPU is {platform.gpu}; the kernels need {OLDEST_GPU[0]}.{OLDEST_GPU[1]} (Ampere) or newer; "
            "use a newer GPU, or device='cpu'"
        )
    if not platform.has_triton:
        raise ValueError(
            "Triton is not installed, in which the kernels for GPUs are written; "
            "pip install 'pellucid[cuda]', or use device='cpu'"
        )


def has_triton() -> bool:
    """Whether Triton's kernels can be imported; asked without importing it."""
    return importlib.util.find_spec("triton") is not None


def has_gpu() -> bool:
    """Whether there is a driver for NVIDIA's GPUs; asked without torch, which takes long to import."""
    return os.path.exists("/dev/nvidiactl")
