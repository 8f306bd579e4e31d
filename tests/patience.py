"""How tests tell a fault from a busy machine.

What comes surely is waited for as long as it takes; what must be cheap is measured in processor time, which
others on the machine hardly lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

PATIENCE = 120.0  # seconds, for what takes far less on a quiet machine, and for ever if there is a fault


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until a condition is true."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.05)


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Processor time that these processes have taken so far, in units of 0.01 seconds; of those alive."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
