"""How many blocks of KV cache fit: measured on a GPU, a sensible share of free memory on a CPU."""

from __future__ import annotations

import logging

import torch

from pellucid.executor.base import Capacity
from pellucid.kv.specs import KVGroupSpec
from pellucid.resolve import Resolved

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_SHARE, CPU_MOST = 4, 8 * GIB  # a quarter of free memory, at most
GPU_RESERVE = 256 << 20  # bytes for fragmentation and what libraries allocate late


def gpu_budget(utilization: float, most_bytes: int) -> int:
    """Bytes left for KV cache.

    most_bytes: that torch reserves, so that the holes between its allocations are paid, too.
    """
    free, total = torch.cuda.mem_get_info()
    elsewhere = total - free - torch.cuda.memory_reserved()  # other processes, the driver, libraries
    return int(total * utilization) - elsewhere - most_bytes - GPU_RESERVE


def cpu_budget(resolved: Resolved, bytes_per_token: float) -> int:
    """This worker's bytes for KV cache: what the user said, else a share of free memory.

    It is at most what all slots can use.
    """
    said, num_workers = resolved.user.cache.cpu_kv_cache_gib, resolved.num_workers_of_all
    if said is not None:
        return int(said * GIB) // num_workers
    block_size = resolved.block_size
    # Sequences fill whole blocks, and the padding block comes on top.
    num_blocks = 1 + resolved.max_num_seqs * -(-(resolved.max_model_len + resolved.num_spec) // block_size)
    useful = int(num_blocks * block_size * bytes_per_token)
    return min(min(resolved.platform.memory_free // CPU_SHARE, CPU_MOST) // num_workers, useful)


def count_blocks(resolved: Resolved, groups: tuple[KVGroupSpec, ...], budget: int) -> int:
    """How many blocks this worker can hold with `budget` bytes (the padding block is paid here)."""
    override = resolved.user.cache.num_gpu_blocks_override
    block_bytes = sum(group.block_bytes for group in groups)
    return budget // block_bytes - 1 if override in (None, -1) else override


def fit_capacity(resolved: Resolved, groups: tuple[KVGroupSpec, ...], num_blocks: int) -> Capacity:
    """What `num_blocks` blocks can serve.

    Raises ValueError if one request of the length that the user asked for cannot fit; a length that is only
    the model's own is lowered to what fits.
    """
    block_bytes = sum(group.block_bytes for group in groups)
    needed = -(-(resolved.max_model_len + resolved.num_spec) // resolved.block_size)
    max_model_len = resolved.max_model_len
    if num_blocks < needed:
        fits = num_blocks * resolved.block_size - resolved.num_spec
        numbers = f"max_model_len {max_model_len:,} needs {needed * block_bytes / GIB:.2f} GiB of KV cache"
        room = f"{max(0, num_blocks)} blocks ({max(0, num_blocks) * block_bytes / GIB:.2f} GiB)"
        if not resolved.max_model_len_is_default or fits < 2:
            lower = (
                f"lower max_model_len to {fits:,}, or" if fits >= 2 else "end what else uses the device, or"
            )
            raise ValueError(
                f"{numbers}, but there is room for {room}; {lower} give the cache more "
                "(gpu_memory_utilization, cpu_kv_cache_gib, num_gpu_blocks_override)"
            )
        logger.warning("%s, there is room for %s: max_model_len is now %s", numbers, room, f"{fits:,}")
        max_model_len = fits
    return Capacity(
        groups=groups,
        num_blocks=tuple(num_blocks for _ in groups),
        max_model_len=max_model_len,
        num_spec=resolved.num_spec,
    )
