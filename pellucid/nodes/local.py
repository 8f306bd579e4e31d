"""Members as processes of this machine.

They import what their owner could import, in its folder and environment, and never its script: that needs no
`if __name__ == "__main__":`, and may have come through a pipe or from a notebook.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress

import psutil

from pellucid.cluster.line import Line
from pellucid.platform import share_of_cpus

TITLE = "pellucid "  # in front of a member's name, on its command line
NOTES = 64  # bytes of memory that a member writes and its owner can read at any time
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class LocalProcess:
    """A member's process."""

    def __init__(self, process: subprocess.Popen[bytes], notes: mmap.mmap) -> None:
        self._process, self._notes = process, notes

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Has something stopped it (SIGSTOP, a debugger)?"""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() in STOPPED
        return False

    is_lost = False  # and nobody will ever know how it ended

    def reason(self) -> str:
        """What else is known of its end."""
        return ""

    def notes(self) -> bytes:
        """What it has noted; `NOTES` bytes, zeros at first."""
        return self._notes[:]

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """How it ended, a signal's number negative; None if it has not within `seconds`."""
        if seconds:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        return self._process.poll()

    def kill(self) -> None:
        """End it, also if it is stopped; nothing happens if it has ended."""
        self._process.kill()

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()


class LocalLauncher:
    """Starts them."""

    def start(self, name: str, node: int = 0) -> tuple[LocalProcess, Line]:
        """Start a member, whose name the command line shows; there is one node."""
        line, theirs = Line.pair()
        try:
            return spawn(name, theirs), line
        finally:
            for descriptor in theirs:
                os.close(descriptor)


def spawn(name: str, line: tuple[int, int], environment: Mapping[str, str] | None = None) -> LocalProcess:
    """Start `python -m pellucid.member`.

    line: the descriptors of its end, which the process gets under the same numbers.  environment: in place of
    this process's.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryFile() as file:
        file.truncate(NOTES)
        process = subprocess.Popen(
            # -P: only what its owner could import, which need not be what lies in the current folder.
            [sys.executable, "-P", "-m", "pellucid.member", *map(str, (*line, file.fileno())), TITLE + name],
            env={**(os.environ if environment is None else environment), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=(*line, file.fileno()),
            # Ctrl-C is its owner's to hear.  And should that end while this one is stopped, then the system
            # wakes it, as a group of processes that nobody could wake any more.
            process_group=0,
        )
        return LocalProcess(process, mmap.mmap(file.fileno(), NOTES))


@contextmanager
def own_cpus(index: int, num_shares: int) -> Generator[None, None, None]:
    """Processes started within get a share of the CPUs, if OpenMP pins threads: else all to the same."""
    is_pinned = "OMP_PROC_BIND" in os.environ and "OMP_NUM_THREADS" in os.environ
    if not is_pinned or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)  # of this thread alone
    os.sched_setaffinity(0, share_of_cpus(index, num_shares))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
