"""Memory in processes that last: Python's garbage collector, and what the C library keeps of freed memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def paused() -> Iterator[None]:
    """Within, the collector looks at nothing: for what is all kept, or is all given back at once."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def without_old() -> Iterator[None]:
    """Within, it passes over what is there already: a look at all of a program takes as long as steps.

    What the user has frozen stays so.
    """
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def trim() -> None:
    """Give freed memory back to the system: glibc keeps it, of each thread that did large work."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
