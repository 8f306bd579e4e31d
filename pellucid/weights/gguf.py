"""GGUF files: llama.cpp's keys and tensors, read from a map of the file.

Knows nothing of models: keys and tensors have the names that the file gives them (`gguf_model` translates).
"""

from __future__ import annotations

import mmap
import re
import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pellucid.quant.layouts.ggml.types import TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless a key says otherwise
FLOAT32, STRING, ARRAY = 6, 8, 9
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}  # all others are blocks of bytes
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class TensorInfo(NamedTuple):
    """What a header tells of a tensor.  shape: of the matrix, outputs first; offset: bytes into the file."""

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    part: int = 0


class Gguf:
    """One model in one file, or in parts `-00001-of-00003.gguf`, of which any may be named.

    metadata: the keys, of the first part where there are several.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the headers.  Raises ValueError for what is no GGUF, cut short or of unknown types."""
        self.path = Path(path)
        self.metadata: dict[str, object] = {}
        self.infos: dict[str, TensorInfo] = {}
        self._maps: list[mmap.mmap] = []
        for part, file in enumerate(parts_of(self.path)):
            header = Header(file)
            self.metadata = header.metadata | self.metadata
            self._maps.append(header.bytes)
            for name, info in header.infos.items():
                if name in self.infos:
                    raise ValueError(f"{file} has {name} once more; download it again")
                self.infos[name] = info._replace(part=part)

    def read(self, name: str) -> Tensor:
        """A tensor of the file, on the host, as a view of its map: writing to it changes no file.

        Blocks are uint8 [N, bytes of a row], so rows may be cut anywhere and inputs at blocks.
        """
        shape, type, offset, nbytes, part = self.infos[name]
        if nbytes == 0:
            return torch.empty(shape, dtype=DTYPES.get(type, torch.uint8))
        dtype = DTYPES.get(type, torch.uint8)
        flat = torch.frombuffer(self._maps[part], dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
        return flat.view(*shape[:-1], -1)


class Header:
    """One file's keys and tensors."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.metadata: dict[str, object] = {}
        self.infos: dict[str, TensorInfo] = {}
        with file.open("rb") as opened:
            if opened.read(4) != MAGIC:
                raise ValueError(f"{file} is no GGUF file")
            # A private map may be written to, as torch wants it; the file keeps what it has.
            self.bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._size, self._at = len(self.bytes), 4
        try:
            self._read()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is damaged or cut short ({error}); download it again") from error

    def _read(self) -> None:
        version = self._number("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "for machines that store the highest byte first" if swapped else f"of version {version}"
            raise ValueError(f"{self.file} is a GGUF {what}, and versions 2 and 3 are read; convert it again")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        found = [self._info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment in {self.file} is {alignment!r}, must be a number of bytes")
        start = -(-self._at // alignment) * alignment
        for name, info in found:
            end = start + info.offset + info.nbytes
            if end > self._size:
                raise ValueError(
                    f"{self.file} has {self._size:,} bytes, and {name} ends at {end:,}; download it again"
                )
            self.infos[name] = info._replace(offset=start + info.offset)

    def _number(self, format: str) -> int:
        (value,) = struct.unpack_from(format, self.bytes, self._at)
        self._at += struct.calcsize(format)
        return value

    def _take(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        at, self._at = self._at, self._at + size
        if self._at > self._size:
            raise IndexError(f"{size:,} bytes are said to follow byte {at:,} of {self._size:,}")
        return at

    def _string(self) -> str:
        size = self._number("<Q")
        at = self._take(size)
        return self.bytes[at : at + size].decode()

    def _value(self, type: int) -> object:
        if type == STRING:
            return self._string()
        if type == ARRAY:
            return self._array()
        (value,) = self._numbers(type, 1)
        # 1e-6 as float32 is meant to be 1e-6, not 9.999999974752427e-07.
        return float(str(np.float32(value))) if isinstance(value, float) and type == FLOAT32 else value

    def _array(self) -> list[object]:
        type, count = self._number("<I"), self._number("<Q")
        if type == STRING:
            return self._strings(count)
        if type == ARRAY:
            return [self._array() for _ in range(count)]
        return self._numbers(type, count)

    def _numbers(self, type: int, count: int) -> list[object]:
        if type not in NUMBERS:
            raise IndexError(f"there is no type {type} of values")
        dtype = np.dtype(NUMBERS[type])
        at = self._take(count * dtype.itemsize)
        return np.frombuffer(self.bytes, dtype, count, at).tolist()

    def _strings(self, count: int) -> list[object]:
        """Vocabularies have hundreds of thousands: no call a string but those that C answers."""
        data, at, length_at = self.bytes, self._at, struct.Struct("<Q").unpack_from
        found: list[object] = []
        for _ in range(count):
            (length,) = length_at(data, at)
            at += 8
            if at + length > self._size:
                raise IndexError(f"{length:,} bytes are said to follow byte {at:,} of {self._size:,}")
            found.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        return found

    def _info(self) -> tuple[str, TensorInfo]:
        name, num_axes = self._string(), self._number("<I")
        shape = tuple(reversed([self._number("<Q") for _ in range(num_axes)]))
        number, offset = self._number("<I"), self._number("<Q")
        if number not in TYPES:
            raise ValueError(
                f"{name} in {self.file} has ggml's type {number}, which is not known here; "
                "quantize the model again"
            )
        type = TYPES[number]
        if (shape[-1] if shape else 1) % type.elements:
            raise ValueError(
                f"{name} in {self.file} has rows of {shape[-1]}, not whole blocks of {type.elements}"
            )
        return name, TensorInfo(shape or (1,), type.name, offset, prod(shape) // type.elements * type.nbytes)


def parts_of(path: Path) -> list[Path]:
    """All files of a model of which one is named, in order.  Raises ValueError if one is missing."""
    found = PART.fullmatch(path.name)
    if not found:
        return [path]
    stem, num = found[1], int(found[3])
    files = [path.with_name(f"{stem}-{i:05}-of-{num:05}.gguf") for i in range(1, num + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{path.parent} lacks {', '.join(missing[:5])} of {num} parts; download them all")
    return files
