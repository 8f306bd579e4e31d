"""The machine without its GPUs: cores, memory, limits, ports, clock, folders, processes left over."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pellucid.doctor.finding import Finding, error, ok, warning
from pellucid.native.build import COMPILERS, cache_folder
from pellucid.platform import CORES, cpu_memory

GIB = 1 << 30
MEMBER = "pellucid.member"  # what each runs
SHARED_MEMORY = GIB  # bytes that NCCL may want there
MANY_FILES = 4096  # descriptors: one for each client, a few for each member
LITTLE_DISK = 2 * GIB
SLOW_CLOCK = 1e-6  # seconds that asking for the time may take
SYSTEM = Path("/sys/devices/system")


def cores() -> Iterator[Finding]:
    flags = _cpu_flags()
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve") if name in flags]
    logical = len(set[int]().union(*CORES))
    vectors = " ".join(wide) or "no wide"
    said = f"{len(CORES)} cores ({logical} threads) of {platform.machine()}, {vectors} vectors"
    yield ok("CPU", said)
    if told := os.environ.get("OMP_NUM_THREADS"):
        yield ok("OMP_NUM_THREADS", f"{told}: an engine on the CPU uses as many threads")
    with suppress(OSError):
        governor = (SYSTEM / "cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
        if governor == "powersave":
            advice = "cpupower frequency-set -g performance"
            yield warning("CPU governor", "powersave: steps of few rows wait for the CPU", advice)


def _cpu_flags() -> set[str]:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return set(line.split(":", 1)[1].split())
    return set()


def memory() -> Iterator[Finding]:
    total, free = cpu_memory()
    said = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if free < 2 * GIB:
        yield warning("memory", said, "end what takes it, or raise the container's limit")
    else:
        yield ok("memory", said)


def shared_memory(num_gpus: int) -> Iterator[Finding]:
    """Pellucid uses none of it, NCCL does."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    size = shutil.disk_usage(path)
    said = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB in {path} are free"
    if num_gpus > 1 and size.free < SHARED_MEMORY:
        yield warning(
            "shared memory", said, "docker run --shm-size 1g (or --ipc host): NCCL uses it between GPUs"
        )
    else:
        yield ok("shared memory", said)


def limits(num_gpus: int) -> Iterator[Finding]:
    """ulimits."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_limit(files)} (at most {_limit(most)})"
    if 0 <= files < MANY_FILES:
        yield warning(
            "open files", said, f"ulimit -n 65536: every client of a server takes one; {files} are few"
        )
    else:
        yield ok("open files", said)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_infiniband = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    said = _limit(locked) if locked < 0 else f"{locked / (1 << 20):.0f} MiB"
    if locked >= 0 and has_infiniband and num_gpus:
        yield warning("locked memory", said, "ulimit -l unlimited: InfiniBand needs pinned memory")
    else:
        yield ok("locked memory", said)


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def ports(wanted: dict[str, tuple[str, int]]) -> Iterator[Finding]:
    """wanted: what for, and where."""
    for name, (host, port) in wanted.items():
        try:
            socket.create_server((host, port)).close()
            yield ok(f"port {port}", f"free at {host}, for {name}")
        except OSError as failure:
            said = f"cannot be had at {host}, for {name}: {failure.strerror}"
            yield warning(f"port {port}", said, f"another one, or end what has it: ss -ltnp 'sport = {port}'")
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
        except OSError as failure:
            yield error("loopback", f"no port is to be had: {failure.strerror}", "ranks of a host meet there")


def interfaces() -> Iterator[Finding]:
    addresses = {
        name: [each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }
    shown = ", ".join(f"{name} {found[0]}" for name, found in addresses.items() if found)
    yield ok("interfaces", shown or "none has an address")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        named = os.environ.get(variable, "")
        if not named or named[0] in "^=":  # prefixes to leave out, or exact names
            continue
        if not any(name.startswith(wanted) for wanted in named.split(",") for name in addresses):
            advice = f"unset it, or name one of {', '.join(addresses)}"
            yield error(variable, f"is {named}, and there is no such interface", advice)


def clock() -> Iterator[Finding]:
    """Deadlines, traces and priorities of age look at it in every step."""
    source = "unknown"
    with suppress(OSError):
        source = (SYSTEM / "clocksource/clocksource0/current_clocksource").read_text().strip()
    began = time.perf_counter()
    for _ in range(1000):
        time.perf_counter()
    seconds = (time.perf_counter() - began) / 1000
    said = f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, source {source}, {1e9 * seconds:.0f} ns to ask"
    newest = Path(__file__).stat().st_mtime
    if time.time() < newest - 86400:
        yield warning(
            "clock", said, "it is behind the date of this installation: set it (chronyd, timesyncd)"
        )
    elif seconds > SLOW_CLOCK:
        yield warning(
            "clock", said, "a slow source: boot with clocksource=tsc, if the machine has a steady one"
        )
    else:
        yield ok("clock", said)


def compilers() -> Iterator[Finding]:
    """Of C++ for models on a CPU, and of C, which Triton needs for what it launches kernels with."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        advice = (
            "apt install g++: models on a CPU are several times slower without, and Triton compiles with it"
        )
        yield warning("compiler", f"none of {', '.join(COMPILERS)}", advice)
    else:
        yield ok("compiler", found)


def folders() -> Iterator[Finding]:
    """Caches, by what is kept there."""
    home = Path.home()
    hub = (
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or home / ".cache/huggingface") / "hub"
    )
    kept = {
        "models of the hub": Path(hub),
        "Triton's kernels": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton/cache"),
        "native code": cache_folder(),
        "temporary files": Path(tempfile.gettempdir()),
    }
    for name, folder in kept.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        said = f"{folder}, {free / GIB:.1f} GiB free"
        if not os.access(there, os.W_OK):
            yield warning(name, f"{said}, not writable", "let this user write there, or name another folder")
        elif free < LITTLE_DISK:
            yield warning(name, said, "make room there, or name another folder")
        else:
            yield ok(name, said)


def left_over() -> Iterator[Finding]:
    """Members whose owner has gone leave by themselves; one that cannot has a GPU's memory for ever."""
    orphans = list[str]()
    for process in psutil.process_iter(["cmdline", "ppid", "pid"]):
        line = process.info["cmdline"] or []
        if MEMBER in line and process.info["ppid"] == 1:
            orphans.append(str(process.info["pid"]))
    if orphans:
        said = f"members without an owner: {', '.join(orphans)}"
        yield warning("processes", said, f"kill -9 {' '.join(orphans)}, unless their owner is process 1")
    else:
        yield ok("processes", "no member has been left behind")
