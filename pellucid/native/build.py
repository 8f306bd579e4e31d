"""Compile `cpu.cpp` for this CPU, once: into the user's cache, under a hash of all that it depends on.

Whatever fails is one line in the log, and there is no library.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("cpu.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-w")
PATIENCE = 180.0  # seconds for a compiler, or for another process that compiles the same
SWITCH = "PELLUCID_NATIVE"  # 0 in the environment: torch computes all


def build(
    folder: Path | None = None, compiler: str | None = None, target: tuple[str, ...] | None = None
) -> Path | None:
    """The library of this CPU, compiled now if it is not there yet; None: torch has to do.

    folder: where it is kept.  target: the compiler's options that name a CPU.
    """
    if os.environ.get(SWITCH) == "0":
        logger.info("no native code: %s is 0", SWITCH)
        return None
    compiler = compiler or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info(
            "no native code: there is no C++ compiler (%s); a CPU is several times slower without",
            ", ".join(COMPILERS),
        )
        return None
    try:
        options = (*FLAGS, *(native_target() if target is None else target))
        name = f"cpu-{digest(compiler, options)}.so"
        folder = writable(folder or cache_folder())
        with alone(folder / f"{name}.lock"):
            if not (folder / name).exists():
                compile_into(folder / name, compiler, options)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home, no compiler, no time
        said = getattr(error, "stderr", None) or error
        logger.warning("no native code, which makes a CPU slower: %s", str(said).strip()[:500])
        return None
    return folder / name


def native_target() -> tuple[str, ...]:
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pellucid" / "native"


def writable(folder: Path) -> Path:
    """The folder, or a new one of this process, if that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pellucid-native-"))


def digest(compiler: str, options: tuple[str, ...]) -> str:
    """Of the source, the compiler, its options and the CPU that it compiles for."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    parts = (SOURCE.read_text(), compiler, version.stdout, *options, platform.machine(), cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def cpu_features() -> str:
    """Which instructions this CPU has, as the system tells; they say what "native" is."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within, no other process is.  Raises TimeoutError if one does not leave."""
    deadline = time.monotonic() + PATIENCE
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {PATIENCE:.0f} s") from None
                time.sleep(0.05)
        yield


def run(command: list[str]) -> None:
    """Raises SubprocessError with what a compiler says, or when it has had its time."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            _, said = process.communicate(timeout=PATIENCE)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # compilers have children
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def compile_into(target: Path, compiler: str, options: tuple[str, ...]) -> None:
    """Raises SubprocessError with what the compiler says."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *options, "-o", str(made), str(SOURCE), "-ldl"]
        run(command)
        made.replace(target)  # in one go: nobody loads half of it
    seconds = time.perf_counter() - began
    logger.info("compiled %s by %s in %.1f s", SOURCE.name, Path(compiler).name, seconds)
