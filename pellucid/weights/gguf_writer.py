"""GGUF files written: keys, headers, then tensors one after the other, so that one is in memory at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from pellucid.quant.layouts.ggml.types import TYPES
from pellucid.weights.gguf import ALIGNMENT, ARRAY, FLOAT32, MAGIC, STRING

VERSION = 3
UINT32, INT32, BOOL, UINT64 = 4, 5, 7, 10
NUMBERS = {type.name: number for number, type in TYPES.items()}
FORMATS = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?", UINT64: "<Q"}


class Written(NamedTuple):
    """A tensor: shape of the matrix, outputs first; ggml's type; and who reads it."""

    shape: tuple[int, ...]
    type: str
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        number = 1
        for size in self.shape:
            number *= size
        type = TYPES[NUMBERS[self.type]]
        return number // type.elements * type.nbytes


def write_gguf(path: Path, keys: Mapping[str, object], tensors: Mapping[str, Written]) -> None:
    """All of it or nothing."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(keys)))
        for key, value in keys.items():
            type = type_of(value)
            file.write(text(key) + struct.pack("<I", type) + value_bytes(value, type))
        offset = 0
        for name, tensor in tensors.items():
            axes = tuple(reversed(tensor.shape))
            file.write(text(name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes))
            file.write(struct.pack("<IQ", NUMBERS[tensor.type], offset))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        fill_up(file)
        for name, tensor in tensors.items():
            content = tensor.read().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            assert len(content) == tensor.nbytes, (name, len(content), tensor.nbytes)
            file.write(content)
            fill_up(file)
    new.replace(path)


def fill_up(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def text(value: str) -> bytes:
    encoded = value.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def type_of(value: object) -> int:
    match value:
        case bool():
            return BOOL
        case int():
            return UINT32
        case float():
            return FLOAT32
        case str():
            return STRING
        case Sequence():
            return ARRAY
    raise AssertionError(f"GGUF has no type for {value!r}")


def value_bytes(value: object, type: int) -> bytes:
    if type == STRING:
        assert isinstance(value, str)
        return text(value)
    if type == ARRAY:
        assert isinstance(value, Sequence)
        kind = type_of(value[0]) if value else UINT32
        kind = INT32 if kind == UINT32 else kind
        return struct.pack("<IQ", kind, len(value)) + b"".join(value_bytes(each, kind) for each in value)
    return struct.pack(FORMATS[type], value)
