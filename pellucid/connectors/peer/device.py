"""Memory of a GPU that processes of one machine share by CUDA's handles (cuIpcGetMemHandle).

The lender's rank takes it, readers open it, and pages go from GPU to GPU, over NVLink where there is one, and
not through memory of the host.  By CUDA's driver, and not by torch's sharing of storages, which leaves files
with counters in /dev/shm when a process is killed.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from pellucid.connectors.peer.mapped import Memory
from pellucid.connectors.runs import runs

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where readers find a rank's memory."""

    handle: bytes
    token: bytes  # by chance: no two memories have the same address
    stride: int  # bytes of a place
    num_places: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Address:
        return msgspec.msgpack.decode(encoded, type=cls)


class Driver(Protocol):
    """What this takes of CUDA's driver, in the context of the thread's device.  Each raises OSError."""

    def take(self, num_bytes: int) -> int:
        """The address of so many bytes."""
        ...

    def give_back(self, pointer: int) -> None: ...

    def handle(self, pointer: int) -> bytes:
        """By which other processes open what was taken."""
        ...

    def open(self, handle: bytes) -> int: ...

    def close(self, pointer: int) -> None: ...

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Begin a copy on the current stream, from whatever device to whatever device."""
        ...


class DeviceMemory:
    """Places on a GPU, this process's own or another one's.  pointer: of the first place."""

    def __init__(self, driver: Driver, pointer: int, stride: int, num_places: int, *, is_own: bool) -> None:
        self._driver, self._pointer, self._stride, self._is_own = driver, pointer, stride, is_own
        self._num_places = num_places

    def read(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        for here, there, num_bytes in self._copies(places, pages, rows):
            self._driver.copy(here, there, num_bytes)

    def write(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        for here, there, num_bytes in self._copies(places, pages, rows):
            self._driver.copy(there, here, num_bytes)

    def _copies(
        self, places: Sequence[int], pages: Tensor, rows: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Addresses of pages and places, and bytes; those side by side on both sides together.

        Raises LookupError for a place that the memory lacks: the driver would copy what lies there.
        """
        if any(not 0 <= place < self._num_places for place in places):
            raise LookupError(f"places {min(places)} to {max(places)} of memory with {self._num_places}")
        size, stride, base = pages.shape[1], self._stride, pages.data_ptr()
        if size == stride:
            together = runs(rows, places)
        else:  # of another stage, whose pages are larger
            together = ((row, place, 1) for row, place in zip(rows, places, strict=True))
        return [
            (base + row * size, self._pointer + place * stride, num * size) for row, place, num in together
        ]

    def close(self) -> None:
        (self._driver.give_back if self._is_own else self._driver.close)(self._pointer)


class CudaHandles:
    """See `Way`.  driver: CUDA's own, if none is given."""

    def __init__(self, pages: Tensor, driver: Driver | None = None) -> None:
        self._driver = driver or Cuda()

    def take(self, num_places: int, stride: int) -> tuple[Memory, bytes]:
        pointer = self._driver.take(num_places * stride)
        memory = DeviceMemory(self._driver, pointer, stride, num_places, is_own=True)
        token = secrets.token_bytes(16)
        return memory, Address(self._driver.handle(pointer), token, stride, num_places).encode()

    def open(self, address: bytes) -> Memory:
        where = Address.decode(address)
        pointer = self._driver.open(where.handle)
        return DeviceMemory(self._driver, pointer, where.stride, where.num_places, is_own=False)

    def close(self) -> None:
        """Nothing is kept."""


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Cuda:
    """The driver itself."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def take(self, num_bytes: int) -> int:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return pointer.value

    def give_back(self, pointer: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def handle(self, pointer: int) -> bytes:
        handle = Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        pointer, given = ctypes.c_uint64(), Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return pointer.value

    def close(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            stream,
        )

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._library, name)(*args)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(error, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'').decode() or error}")
