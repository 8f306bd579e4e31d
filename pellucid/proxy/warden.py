"""A process beside the router, for a process that a signal has stopped (SIGSTOP) can do nothing about it.

It answers nobody, and its connections stay open: who waits for it would wait for ever.  So when it has been
stopped for as long as it bears with servers, the warden ends it, and with it the connections, which tells
clients and servers.  Ctrl-Z in a terminal stops both, and harms nobody.  The warden ends with the router.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LOOK_SECONDS = 0.5  # between two looks
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@contextmanager
def warden(patience: float) -> Iterator[None]:
    """This process is looked after meanwhile.  patience: seconds that it may be stopped."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(patience)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


def watch(pid: int, patience: float) -> None:
    """End a process that is stopped for so many seconds; return when this one's input ends."""
    num_looks = 0  # in a row that found it stopped; looks are counted, for this process may be stopped, too
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        is_stopped = psutil.Process(pid).status() in STOPPED
        num_looks = num_looks + 1 if is_stopped else 0
        if num_looks * LOOK_SECONDS >= patience:
            sys.stderr.write(f"pellucid route has been stopped by a signal for {patience:g} s: it is ended\n")
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the router's, whose end is this one's
    watch(int(sys.argv[1]), float(sys.argv[2]))
