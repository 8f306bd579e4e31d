"""The paged cache as the TMA unit copies it: line by line, of one token and one KV head each."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pellucid.platform import platform_of

MIN_HEAD_DIM = 16  # what tl.dot multiplies at least


def has_lines(q: Tensor, kv_cache: Tensor) -> bool:
    """Whether tiles of the cache [num_blocks, 2, K, block_size, H] can be copied as queries q want them."""
    head_dim = kv_cache.shape[-1]
    is_tile = head_dim >= MIN_HEAD_DIM and head_dim & (head_dim - 1) == 0
    return is_tile and q.dtype == kv_cache.dtype and q.itemsize == 2 and has_tma(kv_cache.device)


def cache_lines(kv_cache: Tensor, tile: int) -> TensorDescriptor:
    """A descriptor of the cache as lines [lines, H], copied `tile` at a time, for what `has_lines`."""
    head_dim = kv_cache.shape[-1]
    return TensorDescriptor.from_tensor(kv_cache.view(-1, head_dim), [tile, head_dim])


@cache
def has_tma(device: torch.device) -> bool:
    return platform_of(device).reaches(9)
