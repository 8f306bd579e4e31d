"""Members as processes of this machine.

They import what their owner could import, in its folder and environment, and never its script: that needs no
`if __name__ == "__main__":`, and may have come through a pipe or from a notebook.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

import psutil

from pellucid.platform import share_of_cpus

TITLE = "pellucid "  # in front of a member's name, on its command line
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class LocalProcess:
    """A member's process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Has something stopped it (SIGSTOP, a debugger)?"""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() in STOPPED
        return False

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
    """Starts `python -m pellucid.member`."""

    def start(self, name: str, line: tuple[int, int], files: Sequence[int] = ()) -> LocalProcess:
        """Start a member.

        name: which the command line shows.  line, files: descriptors that the process gets under the same
        numbers, its end of the line and others.
        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            # -P: only what its owner could import, which need not be what lies in the current folder.
            [sys.executable, "-P", "-m", "pellucid.member", *map(str, line), TITLE + name],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=(*line, *files),
            # Ctrl-C is its owner's to hear.  And should that end while this one is stopped, then the system
            # wakes it, as a group of processes that nobody could wake any more.
            process_group=0,
        )
        return LocalProcess(process)


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
