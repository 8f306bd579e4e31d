# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Write a step's keys and values into the paged cache.  Knows nothing about rows: every token has its place.

Legend: T tokens, K KV heads, H head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def kv_write(
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Copy k / k_scale, v / v_scale [T, K, H] to kv_cache [num_blocks, 2, K, block_size, H].

    slot_mapping: [T], block * block_size + offset of each token.  Tokens may share a place only in the
    padding block, where it does not matter which of them stays.  An FP8 cache (e4m3) saturates at 448.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    assert v.shape == k.shape and kv_cache.shape[1:3] == (2, num_kv_heads), (k.shape, v.shape, kv_cache.shape)
    assert k.stride(2) == v.stride(2) == 1 and kv_cache.is_contiguous()
    assert slot_mapping.shape == (num_tokens,), slot_mapping.shape
    if num_tokens == 0:
        return
    kv_write_kernel[(num_tokens,)](
        k,
        v,
        kv_cache,
        slot_mapping,
        1 / k_scale,
        1 / v_scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=kv_cache.shape[3],
        HEAD_DIM=head_dim,
        LIMIT=limit_of(kv_cache.dtype),
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        DIM_PADDED=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def limit_of(dtype: torch.dtype) -> float:
    """Where a cache of this dtype saturates; 0 if it is as wide as what is written."""
    return FP8_MAX if dtype == torch.float8_e4m3fn else 0.0


def kv_write_ref(
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The same, one token after the other."""
    block_size, limit = kv_cache.shape[3], limit_of(kv_cache.dtype)
    k, v = k.float() * (1 / k_scale), v.float() * (1 / v_scale)
    if limit:
        k, v = k.clamp(-limit, limit), v.clamp(-limit, limit)
    for token, place in enumerate(slot_mapping.tolist()):
        kv_cache[place // block_size, :, :, place % block_size] = torch.stack((k[token], v[token])).to(
            kv_cache.dtype
        )


@triton.jit
def kv_write_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_mapping_ptr,
    k_inverse_scale,
    v_inverse_scale,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LIMIT: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """One program a token: all its heads, keys and values."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping_ptr + token).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    inside = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=inside)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=inside)
    k = k.to(tl.float32) * k_inverse_scale
    v = v.to(tl.float32) * v_inverse_scale
    if LIMIT > 0:
        k = tl.minimum(tl.maximum(k, -LIMIT), LIMIT)
        v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)

    half: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM  # a block's keys; its values follow
    line = (place // BLOCK_SIZE) * 2 * half + (place % BLOCK_SIZE) * HEAD_DIM
    to = cache_ptr + line + head * BLOCK_SIZE * HEAD_DIM + dim
    tl.store(to, k.to(cache_ptr.dtype.element_ty), mask=inside)
    tl.store(to + half, v.to(cache_ptr.dtype.element_ty), mask=inside)
