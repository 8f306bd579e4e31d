"""What an adapter is, by whatever name and wherever it lies: a hash of its config and all of its tensors.

KV of an adapter is found again by this alone (`Request.cache_key`), in the engine, tiers and other engines.
Needs no torch.
"""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path

from pellucid.lora.peft_config import CONFIG, weights_file

# A file changed again so soon behind another change may keep its time of change: clocks of file systems tick.
TICK_SECONDS = 2.0


def content_of(folder: Path) -> str:
    """In hexadecimal digits.  Files are read once, and again when they have changed.

    Raises ValueError if there are no weights, OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in (folder / CONFIG, weights_file(folder)):
        status, path = file.stat(), str(file.resolve())
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        is_settled = time.time() - status.st_ctime > TICK_SECONDS
        digest.update(_remembered(path, identity) if is_settled else _read(path))
    return digest.hexdigest()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@lru_cache(maxsize=1024)
def _remembered(path: str, identity: tuple[int, ...]) -> bytes:
    """The same, read once for each identity."""
    return _read(path)
