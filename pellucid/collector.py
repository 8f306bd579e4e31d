"""Memory in processes that last: Python's garbage collector, and what the C library keeps of freed memory."""

from __future__ import annotations

import atexit
import ctypes
import gc

COLLECT_EVERY = (20_000, 5, 10)  # new objects, such collections, larger ones


def freeze() -> None:
    """Have the collector never again look at what is there already: that takes it longer than many steps."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules report at the end what was never given back


def spare() -> None:
    """`freeze`, and have it look for what has come since when that is some hundred requests, not some."""
    freeze()
    gc.set_threshold(*COLLECT_EVERY)


def trim() -> None:
    """Give freed memory back to the system: glibc keeps it, of each thread that did large work."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
