"""A line for whoever watches a start: what is being done, and so what takes so long.

To a terminal alone; elsewhere it is in the log, at INFO, as all else.
"""

from __future__ import annotations

import logging
import sys
import time

import psutil

logger = logging.getLogger(__name__)


def tell(doing: str) -> None:
    """Say what begins now."""
    logger.info("%s", doing)
    is_shown = logger.isEnabledFor(logging.INFO)  # then it is on the screen already
    if not is_shown and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"pellucid: {doing} ...\n")
        sys.stderr.flush()


class Phases:
    """How long the parts of a start took, as a line."""

    def __init__(self, imported: float) -> None:
        """imported: when all imports were made, by `time.time`; a worker's own process does little before."""
        self._ended = time.perf_counter()
        self._said = [f"imports {imported - psutil.Process().create_time():.1f} s"]

    def end(self, name: str) -> None:
        """A phase has ended."""
        now = time.perf_counter()
        self._said.append(f"{name} {now - self._ended:.1f} s")
        self._ended = now

    def __str__(self) -> str:
        return ", ".join(self._said)
