"""How many pages of KV cache fit: measured on a GPU, a sensible share of free memory on a CPU."""

from __future__ import annotations

import logging

import torch

from pellucid.executor.base import Capacity
from pellucid.kv.kinds import most_pages, most_tokens
from pellucid.kv.layout import Layout
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


def cpu_budget(resolved: Resolved, layout: Layout) -> int:
    """This worker's bytes for KV cache: what the user said, else a share of free memory.

    It is at most what all slots can use.
    """
    said, num_workers = resolved.user.cache.cpu_kv_cache_gib, resolved.num_workers_of_node
    if said is not None:
        return int(said * GIB) // num_workers
    useful = (1 + resolved.max_num_seqs * needed_pages(resolved, layout)) * layout.page_bytes  # 1 is padding
    return min(min(resolved.platform.memory_free // CPU_SHARE, CPU_MOST) // num_workers, useful)


def needed_pages(resolved: Resolved, layout: Layout) -> int:
    """Most pages that one sequence holds at once."""
    return most_pages(layout.kinds, resolved.max_model_len + resolved.num_spec, resolved.max_chunk)


def count_pages(resolved: Resolved, layout: Layout, budget: int) -> int:
    """How many pages this worker can hold with `budget` bytes (the padding page is paid here)."""
    override = resolved.user.cache.num_gpu_blocks_override
    return budget // layout.page_bytes - 1 if override in (None, -1) else override


def fit_capacity(resolved: Resolved, layout: Layout, num_pages: int) -> Capacity:
    """What `num_pages` pages can serve.

    Raises ValueError if one request of the length that the user asked for cannot fit; a length that is only
    the model's own is lowered to what fits.
    """
    max_model_len, needed = resolved.max_model_len, needed_pages(resolved, layout)
    if num_pages < needed:
        has, wants = (max(0, num) * layout.page_bytes / GIB for num in (num_pages, needed))
        fits = most_tokens(layout.kinds, max(0, num_pages), resolved.max_chunk) - resolved.num_spec
        numbers = f"max_model_len {max_model_len:,} needs {wants:.2f} GiB of KV cache"
        room = f"{max(0, num_pages)} pages ({has:.2f} GiB)"
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
        kinds=layout.kinds, num_pages=num_pages, max_model_len=max_model_len, num_spec=resolved.num_spec
    )
