"""How much the tiers hold, and where; the same in the engine and in its workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity
    from pellucid.resolve import Resolved

GIB = 1 << 30
FORMAT = 1  # of the files
KNOWN = ("cpu_bytes_to_use", "num_cpu_blocks", "shared_storage_path", "disk_bytes_to_use", "eviction_policy")
STAGING = GIB  # bytes of host memory before a disk, if nothing is said
DISK = 64 * GIB
SAMPLES, SAMPLE = 16, 4096  # of a file of weights: so many pieces of so many bytes name it


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """What `kv_connector_extra_config` says of them."""

    host_bytes: int  # of all ranks
    num_blocks: int | None = None  # instead of these
    folder: Path | None = None
    disk_bytes: int = DISK  # of all ranks

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Raises ValueError, naming what is wrong."""
        for name in given:
            if name not in KNOWN:
                raise ValueError(
                    f"unknown key {name!r} in kv_connector_extra_config (known: {', '.join(KNOWN)})"
                )
        if given.get("eviction_policy", "lru") != "lru":
            raise ValueError(f"eviction_policy is {given['eviction_policy']!r}, must be 'lru'")
        folder, num_blocks = given.get("shared_storage_path"), given.get("num_cpu_blocks")
        if folder is not None and not isinstance(folder, str):
            raise ValueError(f"shared_storage_path is {folder!r}, must be a folder")
        host = _positive("cpu_bytes_to_use", given.get("cpu_bytes_to_use", STAGING if folder else None))
        num_blocks = None if num_blocks is None else _positive("num_cpu_blocks", num_blocks)
        if host is None and num_blocks is None:
            raise ValueError("neither cpu_bytes_to_use nor num_cpu_blocks says how much host memory to use")
        disk = _positive("disk_bytes_to_use", given.get("disk_bytes_to_use", DISK)) or DISK
        path = None if folder is None else Path(folder).expanduser()
        return cls(host_bytes=host or 0, num_blocks=num_blocks, folder=path, disk_bytes=disk)

    def num_host_pages(self, capacity: Capacity, num_ranks: int) -> int:
        """Each rank holds these.  Raises ValueError if not even one sequence's window fits."""
        pages_a_block = sum(kind.stripes for kind in capacity.kinds)
        num = self.host_bytes // (capacity.page_bytes * num_ranks)
        if self.num_blocks is not None:
            num = self.num_blocks * pages_a_block
        if num < pages_a_block:
            raise ValueError(
                f"{self.host_bytes / GIB:.3f} GiB of host memory hold {num} pages of KV, {num_ranks} x "
                f"{capacity.page_bytes:,} bytes each, of {pages_a_block} a block; raise kv_offloading_size"
            )
        return num

    def num_disk_pages(self, capacity: Capacity, num_ranks: int) -> int:
        return self.disk_bytes // (capacity.page_bytes * num_ranks)

    def own_folder(self, resolved: Resolved, capacity: Capacity) -> Path:
        """For KV of this model, dtype, layout and ranks."""
        assert self.folder is not None
        return self.folder / fingerprint(resolved, capacity)


def fingerprint(resolved: Resolved, capacity: Capacity) -> str:
    """What must be equal where KV is to be: another model's, or in another layout, is another's.

    Weights are named by samples of their files: what differs in so few bytes that none of these do is taken
    for the same.
    """
    user, checkpoint = resolved.user, resolved.checkpoint
    said = [
        FORMAT,
        dict(checkpoint.config),
        _weights(checkpoint.path),
        repr((resolved.dtype, resolved.kv_dtype, resolved.block_size, capacity.kinds, capacity.page_bytes)),
        repr((user.parallel.tensor_parallel_size, resolved.stage_layers, resolved.platform.device)),
        repr(
            (user.device.attention_backend, user.device.quantization, user.model.load_format, user.model.seed)
        ),
        repr(resolved.speculative),
        None if resolved.draft is None else _weights(resolved.draft.path),
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _weights(path: Path) -> list[object]:
    files = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    return [[each.name, each.stat().st_size, _sampled(each)] for each in files if each.suffix in suffixes]


def _sampled(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _positive(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name} is {value!r}, must be a number above 0")
    return int(value)
