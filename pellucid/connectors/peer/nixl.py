"""Memory that engines share by NIXL (`pip install nixl`): RDMA, NVLink, or whatever else its UCX finds.

One agent a worker.  The lender's rank registers what it lends from, and its agent's metadata is the address;
a reader adds that agent, and has pages read into its own, which are registered, too.
"""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from pellucid.connectors.peer.mapped import Memory, TensorMemory

SECONDS = 60.0  # that pages may take
POLL_SECONDS = 50e-6

Region = tuple[int, int, int]  # address, bytes, device


class Agent(Protocol):
    """What this takes of nixl_agent (nixl/_api.py)."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any: ...
    def deregister_memory(self, dereg_list: Any) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> Any: ...
    def remove_remote_agent(self, agent: Any) -> None: ...
    def get_xfer_descs(self, descs: list[Region], mem_type: str) -> Any: ...
    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: Any
    ) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where readers find a rank's memory."""

    metadata: bytes  # of its agent
    start: int  # of the first place, in that process
    stride: int  # bytes of a place
    device: int
    kind: str  # of memory: "VRAM" or "DRAM"


class Nixl:
    """See `Way`.  Agents are for one thread at a time: a lock is held for each call, not while pages move."""

    def __init__(self, pages: Tensor, agent: Agent | None = None) -> None:
        self.agent, self.pages, self.lock = agent or make_agent(), pages, threading.Lock()
        self.kind, self.device = ("VRAM", pages.get_device()) if pages.is_cuda else ("DRAM", 0)
        self._registered: Any = self._register(pages)

    def take(self, num_places: int, stride: int) -> tuple[Memory, bytes]:
        try:
            tensor = torch.empty(num_places, stride, dtype=torch.uint8, device=self.pages.device)
        except torch.OutOfMemoryError as error:
            raise OSError(str(error)) from error
        with self.lock:
            registered = self._register(tensor)
            metadata = self.agent.get_agent_metadata()
        address = Address(metadata, tensor.data_ptr(), stride, self.device, self.kind)
        memory = TensorMemory(tensor, at_end=lambda: self._deregister(registered))
        return memory, msgspec.msgpack.encode(address)

    def open(self, address: bytes) -> Memory:
        return NixlMemory(self, msgspec.msgpack.decode(address, type=Address))

    def close(self) -> None:
        registered, self._registered = self._registered, None
        if registered is not None:
            self._deregister(registered)

    def _register(self, tensor: Tensor) -> Any:
        region = tensor.data_ptr(), tensor.numel(), self.device, ""
        return self.agent.register_memory([region], self.kind)

    def _deregister(self, registered: Any) -> None:
        with self.lock:
            self.agent.deregister_memory(registered)


class NixlMemory:
    """Another agent's places.  `read` waits until pages are there: nothing of it is in stream order."""

    def __init__(self, own: Nixl, address: Address) -> None:
        self._own, self._address = own, address
        with own.lock:
            self._name = own.agent.add_remote_agent(address.metadata)

    def read(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        if pages.is_cuda:  # what was launched before may still read these pages
            torch.cuda.current_stream(pages.device).synchronize()
        own, there, size = self._own, self._address, pages.shape[1]
        here = [(pages.data_ptr() + row * size, size, own.device) for row in rows]
        away = [(there.start + place * there.stride, size, there.device) for place in places]
        agent = own.agent
        with own.lock:
            ours, theirs = agent.get_xfer_descs(here, own.kind), agent.get_xfer_descs(away, there.kind)
            handle = agent.initialize_xfer("READ", ours, theirs, self._name)
            state = agent.transfer(handle)
        until = time.monotonic() + SECONDS
        try:
            while state == "PROC":
                if time.monotonic() > until:
                    raise TimeoutError(f"NIXL has not read {len(here)} pages in {SECONDS:g} s")
                time.sleep(POLL_SECONDS)
                with own.lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with own.lock:
                agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL could not read {len(here)} pages: {state}")

    def write(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        raise AssertionError("readers write nothing")

    def close(self) -> None:
        with self._own.lock:
            self._own.agent.remove_remote_agent(self._name)


def make_agent() -> Agent:
    """Raises ImportError if NIXL is not installed, or does not fit this machine's CUDA."""
    api: Any = importlib.import_module("nixl._api")
    return api.nixl_agent(f"pellucid-{uuid.uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
