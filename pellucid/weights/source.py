"""The tensors of a checkpoint's files, whatever kind of files: headers first, numbers when asked for.

Knows no model, no scheme of quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class Header(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> str:
        """As files spell it: "BF16", "F8_E4M3", "Q4_K"."""
        ...

    @property
    def nbytes(self) -> int: ...


class TensorInfo(NamedTuple):
    """The same, read."""

    shape: tuple[int, ...]
    type: str
    nbytes: int

    @classmethod
    def of(cls, shape: Sequence[int], type: str) -> TensorInfo:
        return cls(tuple(shape), type, prod(shape) * ITEM_SIZES.get(type, 1))


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def infos(self) -> Mapping[str, Header]: ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """What headers say beside it."""
        ...

    def key(self, name: str) -> str:
        """What its file calls it."""
        ...

    def read(self, name: str) -> Tensor:
        """In host memory."""
        ...


# Bytes of an element, by the types as safetensors spells them.
ITEM_SIZES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
PICKLES = (".bin", ".pt", ".pth")


class Shards:
    """Safetensors files."""

    def __init__(self, files: Iterable[Path], rename: Callable[[str], str]) -> None:
        """rename: from a file's key to the name that the model has for it."""
        opened = list(map(open_shard, files))
        self._places = {rename(key): (key, file) for file in opened for key in file.keys()}  # noqa: SIM118
        self.metadata = {
            rename(key): text for file in opened for key, text in (file.metadata() or {}).items()
        }
        self.infos: dict[str, TensorInfo] = {}
        for name, (key, file) in self._places.items():
            stored = file.get_slice(key)
            self.infos[name] = TensorInfo.of(stored.get_shape(), stored.get_dtype())

    def key(self, name: str) -> str:
        return self._places[name][0]

    def read(self, name: str) -> Tensor:
        key, file = self._places[name]
        return file.get_tensor(key)


def open_shard(shard: Path) -> safe_open:
    """Read a shard's header.  Raises ValueError naming the file if it is cut off, or of another kind."""
    try:
        return safe_open(shard, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{shard} is no whole safetensors file ({error}); download it again") from error


class Claimed:
    """Of a source the tensors whose names fit some pattern."""

    def __init__(self, source: TensorSource, patterns: Sequence[str]) -> None:
        self._source = source
        fits = {name: any(fnmatchcase(name, pattern) for pattern in patterns) for name in source.infos}
        self.infos = {name: info for name, info in source.infos.items() if fits[name]}
        self.metadata = source.metadata

    def key(self, name: str) -> str:
        return self._source.key(name)

    def read(self, name: str) -> Tensor:
        return self._source.read(name)


class Pickled:
    """torch's own files, .bin and .pt, from which nothing is run: tensors alone are read."""

    def __init__(self, files: Iterable[Path], rename: Callable[[str], str]) -> None:
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, tuple[str, Tensor]] = {}
        for file in files:
            for key, tensor in read_pickle(file).items():
                self._tensors[rename(key)] = key, tensor
        self.infos = {
            name: TensorInfo.of(tensor.shape, TYPES.get(tensor.dtype, str(tensor.dtype)))
            for name, (_, tensor) in self._tensors.items()
        }

    def key(self, name: str) -> str:
        return self._tensors[name][0]

    def read(self, name: str) -> Tensor:
        return self._tensors[name][1]


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, as views of its pages.  Raises ValueError naming the file, and what to do."""
    way_out = "convert it with `safetensors`, or download the checkpoint as *.safetensors"
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # pickles fail in many ways
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{file} cannot be read as tensors alone ({reason}); {way_out}") from error
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{file} holds more than named tensors; {way_out}")
    return {str(key): tensor for key, tensor in content.items()}
