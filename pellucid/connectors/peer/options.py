"""`kv_connector_extra_config` of the peer connector."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from pellucid.connectors.config import KVTransferConfig

GIB = 1 << 30
MOST_BYTES = 8 * GIB  # of a rank's memory, if nobody says
ON_GPU = 4 * GIB  # the same, of a GPU's


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """Raises ValueError for a value that makes no sense."""

    cpu_bytes_to_use: int | None = None  # of host memory for each rank, in which pages lie for others
    gpu_bytes_to_use: int | None = None  # the same of its GPU, if they lie there (kv_buffer_device)
    lend_seconds: float = 120.0  # that they lie there for a request that nobody asks for
    # Hosts, addresses or networks that are believed about KV, whoever names them; see trust.py.
    peers: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.lend_seconds, int | float) and self.lend_seconds > 0):
            raise ValueError(f"lend_seconds is {self.lend_seconds!r}, must be more than 0 seconds")
        for name in ("cpu_bytes_to_use", "gpu_bytes_to_use"):
            given: object = getattr(self, name)
            if given is not None and (not isinstance(given, int) or given < 1):
                raise ValueError(f"{name} is {given!r}, must be a number of bytes")
        peers: object = self.peers
        if not isinstance(peers, list | tuple) or not all(isinstance(each, str) for each in peers):
            raise ValueError(f"peers is {peers!r}, must be a list of hosts, addresses or networks")

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """As the user wrote it.  Raises ValueError for what is unknown."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
                raise ValueError(f"unknown key {name!r} in kv_connector_extra_config{hint}")
        return cls(**given)  # type: ignore[arg-type]

    def num_places(self, num_pages: int, stride: int, num_ranks: int, *, on_gpu: bool = False) -> int:
        """Pages of a rank's memory: as asked for, else as the pool has, and not more than memory bears."""
        if on_gpu:
            return max(1, min(num_pages, (self.gpu_bytes_to_use or ON_GPU) // stride))
        if self.cpu_bytes_to_use is not None:
            return self.cpu_bytes_to_use // stride
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(num_pages, min(MOST_BYTES, free // 4 // num_ranks) // stride))


def way_of(config: KVTransferConfig, device: str) -> str | None:
    """How readers reach this engine's pages; None: in the host's memory.  Raises ValueError if none can."""
    if config.kv_connector.startswith("Nixl") and importlib.util.find_spec("nixl") is not None:
        return "nixl"
    if config.kv_buffer_device != "cuda":
        return None
    if device != "cuda":
        raise ValueError("kv_buffer_device is 'cuda', but this engine has no GPU; leave it out")
    if config.kv_port is not None:
        raise ValueError(
            "kv_buffer_device is 'cuda', which engines of other nodes cannot reach; leave it out, or kv_port"
        )
    return "cuda"
