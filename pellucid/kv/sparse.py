"""Memory for tables of which most is never used."""

from __future__ import annotations

import mmap
from contextlib import suppress


def sparse_memory(num_bytes: int) -> mmap.mmap:
    """Memory of which only those pages are there that somebody has touched, and small pages."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
