"""A block of KV as a file: a header with length and checksum, and the bytes of its pages on one rank.

A file has its name when all of it is written.  What is cut off, changed or not ours is not read.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MAGIC = b"pellucid-kv-1\0\0\0"
HEADER = struct.Struct("<16sQI")  # magic, bytes behind it, their checksum
UNFINISHED = ".part"

Name = str  # of a block: its kind and digest


def name_of(kind: int, digest: bytes) -> Name:
    return f"{kind}-{digest.hex()}"


def path_of(folder: Path, name: Name, rank: int) -> Path:
    start = name.index("-") + 1
    return folder / name[start : start + 2] / f"{name}.{rank}"


def write(path: Path, pages: Sequence[memoryview]) -> None:
    """Put a block there, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checksum = 0
    for page in pages:
        checksum = zlib.crc32(page, checksum)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with unfinished.open("wb", buffering=0) as file:
            for part in (HEADER.pack(MAGIC, sum(map(len, pages)), checksum), *pages):
                left = memoryview(part)
                while left:
                    left = left[file.write(left) :]
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: Path, pages: Sequence[memoryview]) -> None:
    """Fill these pages.  Raises ValueError for what is not such a block, OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        header = file.read(HEADER.size)
        magic, size, checksum = HEADER.unpack(header) if len(header) == HEADER.size else (b"", 0, 0)
        if magic != MAGIC or size != sum(map(len, pages)):
            raise ValueError("it is not a block of this KV cache")
        found = 0
        for page in pages:
            left = page
            while left and (num := file.readinto(left)):
                left = left[num:]
            if left:
                raise ValueError("it is cut off")
            found = zlib.crc32(page, found)
    if found != checksum:
        raise ValueError("its checksum differs")


def listing(folder: Path, num_ranks: int) -> OrderedDict[Name, None]:
    """Blocks that all ranks have, the oldest first; what was left unfinished is removed."""
    seen: dict[Name, list[float]] = {}
    for path in folder.glob("??/*"):
        if path.suffix == UNFINISHED:
            path.unlink(missing_ok=True)
            continue
        name, _, rank = path.name.rpartition(".")
        if rank.isdigit() and int(rank) < num_ranks and "-" in name:
            with suppress(FileNotFoundError):  # another engine has dropped it
                seen.setdefault(name, []).append(path.stat().st_mtime)
    whole = {name: max(times) for name, times in seen.items() if len(times) == num_ranks}
    return OrderedDict.fromkeys(sorted(whole, key=whole.__getitem__))
