# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Move keys and values within the paged cache: the accepted path of a draft tree closes up.

Moves 2 * 2 * K * H elements a place of keys and values, a few places a row.

Legend: B rows, K KV heads, H head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.attention.fp8_cache import is_fp8


def kv_move(kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy kv_cache [num_blocks, sides, K, block_size, H] from places `sources` to `targets`, in place.

    sources, targets: [B, n] int64, block * block_size + offset.  A row's copies are made one after the other,
    and none may write what a later one reads: its targets rise, and none lies behind its source.  Rows share
    no place but 0, in the padding block, which stands for no copy.
    """
    assert kv_cache.is_contiguous() and sources.shape == targets.shape, (sources.shape, targets.shape)
    assert sources.dim() == 2 and sources.is_contiguous() and targets.is_contiguous()
    num_rows, num_moves = sources.shape
    if num_rows == 0 or num_moves == 0:
        return
    _, sides, num_kv_heads, block_size, head_dim = kv_cache.shape  # 2, or 1 of what stands for both
    cache = kv_cache.view(torch.uint8) if is_fp8(kv_cache.dtype) else kv_cache
    kv_move_kernel[(num_rows, sides * num_kv_heads)](
        cache,
        sources,
        targets,
        num_moves,
        NUM_HEADS=sides * num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


def kv_move_ref(kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The same, one place after the other."""
    block_size = kv_cache.shape[3]
    pairs = zip(sources.flatten().tolist(), targets.flatten().tolist(), strict=True)
    for source, target in pairs:
        kv = kv_cache[source // block_size, :, :, source % block_size].clone()
        kv_cache[target // block_size, :, :, target % block_size] = kv


@triton.jit
def kv_move_kernel(
    cache_ptr,
    sources_ptr,
    targets_ptr,
    num_moves,
    NUM_HEADS: tl.constexpr,  # of keys and of values
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """One program a row and head, keys and values apart: every thread copies its own elements in order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PADDED)
    inside = dim < HEAD_DIM
    for move in range(num_moves):
        source = tl.load(sources_ptr + row * num_moves + move)
        target = tl.load(targets_ptr + row * num_moves + move)
        if source != target:
            line = (source // BLOCK_SIZE * NUM_HEADS + head) * BLOCK_SIZE + source % BLOCK_SIZE
            kv = tl.load(cache_ptr + line * HEAD_DIM + dim, mask=inside)
            line = (target // BLOCK_SIZE * NUM_HEADS + head) * BLOCK_SIZE + target % BLOCK_SIZE
            tl.store(cache_ptr + line * HEAD_DIM + dim, kv, mask=inside)
