"""A GGUF file written from plain values, in any version and with any lie."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
PACKED = {U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}


class Stored(NamedTuple):
    """A tensor: outputs first, ggml's type, its bytes."""

    shape: tuple[int, ...]
    type: int
    data: bytes


def kind_of(value: object) -> int:
    match value:
        case bool():
            return BOOL
        case int():
            return U32 if value < 1 << 32 else U64
        case float():
            return F32
        case str():
            return STRING
        case list():
            return ARRAY
    raise AssertionError(value)


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value_bytes(value: object) -> bytes:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        kind = kind_of(value[0]) if value else U32
        return struct.pack("<IQ", kind, len(value)) + b"".join(map(value_bytes, value))
    return struct.pack(PACKED[kind_of(value)], value)


def write(path: Path, keys: Mapping[str, object], tensors: Mapping[str, Stored], *, version: int = 3) -> Path:
    """Write one file, tensors at multiples of `general.alignment`."""
    alignment = keys.get("general.alignment", 32)
    assert isinstance(alignment, int)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    for key, value in keys.items():
        head += text(key) + struct.pack("<I", kind_of(value)) + value_bytes(value)
    data = b""
    for name, (shape, type, content) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", type, len(data))
        data += content + bytes(-len(content) % alignment)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path
