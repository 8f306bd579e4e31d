# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""From a packed projection to attention's operands in one pass: q and k normalized and turned, k, v cached.

Moves 2 * T * (N + 2K) * H elements and nothing between.  On an H200 with Qwen3-0.6B's heads in bfloat16 that
takes 1.4 us for one token, 3.3 us for 256, and 22 us for 4,096 (3.0 TB/s); 31 us with Qwen3-8B's (3.2 TB/s).
With gpt-oss-20b's 80 heads of 64 features 16,384 tokens take 87 us (3.9 TB/s).

Knows nothing about rows: every token has its place.

Legend: T tokens, N query heads, K KV heads, H head dim, R rotary dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.attention.fp8_cache import limit_of
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.pointwise.rms_norm import rms_norm_ref
from pellucid.kernels.products.round_rows import saturated

FEW_TOKENS = 16  # up to here heads are spread over more programs, for latency
MANY_TOKENS = 1024  # from here on small heads have fewer programs, which each begin anew
SMALL_HEAD = 64  # features


def qkv_rope(
    qkv: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    rope: Tensor | None = None,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Normalize and turn the heads of qkv [T, (N + 2K) * H], write k and v to the cache, return q [T, N, H].

    N may be 0, where tokens are kept and do not attend.
    kv_cache: [num_blocks, 2, K, block_size, H]; it gets k / k_scale and v / v_scale, an FP8 one
    saturates.  positions: [T], below the table's length.  slot_mapping: [T], block * block_size +
    offset of each token; tokens may share a place only in the padding block, where it does not matter which
    of them stays.  norm: RMSNorm of each head of q and k, (weight [N + K, H], eps).  rope: float32
    [max_len, 2, 1, R], cosines and sines that are negative in the first half; features from R on pass.
    interleaved: features 2i and 2i + 1 of a head turn together, not i and i + R / 2.
    Computes in float32 and rounds to qkv's dtype after norm, weight (unless that is float32) and turn each.
    """
    (num_tokens, width), (_, two, num_kv_heads, block_size, head_dim) = qkv.shape, kv_cache.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    assert two == 2 and num_heads >= 0 and width % head_dim == 0, (qkv.shape, kv_cache.shape)
    assert qkv.stride(1) == 1 and kv_cache.is_contiguous(), (qkv.stride(), kv_cache.stride())
    assert positions.shape == slot_mapping.shape == (num_tokens,), (positions.shape, slot_mapping.shape)
    assert positions.is_contiguous() and slot_mapping.is_contiguous(), (
        positions.stride(),
        slot_mapping.stride(),
    )
    rotary_dim = head_dim // 2 * 2 if rope is None else rope.shape[-1]
    assert rope is None or (rope.is_contiguous() and rotary_dim <= head_dim), (rope.shape, head_dim)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    heads, num_warps = program_size(num_tokens, head_dim)
    weight, eps = (qkv, 0.0) if norm is None else norm
    assert norm is None or (weight.shape == (num_heads + num_kv_heads, head_dim) and weight.is_contiguous())
    qkv_rope_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv,
        q,
        kv_cache,
        positions,
        slot_mapping,
        positions if rope is None else rope,
        weight,
        eps,
        1 / k_scale,
        1 / v_scale,
        qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF=rotary_dim // 2,
        HALF_PADDED=triton.next_power_of_2(rotary_dim // 2),
        REST_PADDED=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        HAS_NORM=norm is not None,
        HAS_ROPE=rope is not None,
        INTERLEAVED=interleaved,
        LIMIT=limit_of(kv_cache.dtype),
        HEADS=heads,
        num_warps=num_warps,
        **dependent(),
    )
    return q


def program_size(num_tokens: int, head_dim: int) -> tuple[int, int]:
    """Heads of one token that a program takes, and its warps."""
    if num_tokens <= FEW_TOKENS:
        return 2, 1
    return (32, 4) if num_tokens >= MANY_TOKENS and head_dim <= SMALL_HEAD else (8, 2)


def qkv_rope_ref(
    qkv: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    rope: Tensor | None = None,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """The same, one step and in the end one token after the other."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    how = {"norm": norm, "rope": rope, "interleaved": interleaved}
    q, k, v = qkv_heads(qkv, positions, num_kv_heads, head_dim, **how)
    limit = limit_of(kv_cache.dtype)
    k, v = k.float() * (1 / k_scale), v.float() * (1 / v_scale)
    if limit:
        k, v = k.clamp(-limit, limit), v.clamp(-limit, limit)
    for token, place in enumerate(slot_mapping.tolist()):
        written = torch.stack((k[token], v[token])).to(kv_cache.dtype)
        kv_cache[place // block_size, :, :, place % block_size] = written
    return q


def qkv_heads(
    qkv: Tensor,
    positions: Tensor,
    num_kv_heads: int,
    head_dim: int,
    *,
    norm: tuple[Tensor, float] | None = None,
    rope: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, N, H], keys and values [T, K, H] as they attend, in plain torch: what CPUs run."""
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if norm is not None:
        qk = rms_norm_ref(qk, *norm)
    if rope is not None:
        qk = turn(qk, positions, rope, interleaved=interleaved)
    q, k = qk.split((num_heads, num_kv_heads), dim=1)
    return q, k, v


def turn(x: Tensor, positions: Tensor, rope: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [T, heads, H] turned by rope [max_len, 2, 1, R] at positions [T], in float32 and rounded back.

    interleaved: see `qkv_rope`.
    """
    cos, sin = rope.index_select(0, positions).unbind(1)
    rotary_dim = rope.shape[-1]
    if rotary_dim == x.shape[-1] and not interleaved:
        return rotate(x, cos, sin)
    turning, passing = x.split((rotary_dim, x.shape[-1] - rotary_dim), dim=-1)
    if not interleaved:
        return torch.cat((rotate(turning, cos, sin), passing), dim=-1)
    turned = rotate(torch.cat((turning[..., ::2], turning[..., 1::2]), dim=-1), cos, sin)
    return torch.cat((torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2), passing), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, R] with cos and signed sin [T, 1, R]: x_i pairs with x_(i + R / 2)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


@triton.jit
def normalize(x, inverse_rms, weight_ptr, inside, is_value):
    """Some features x [HEADS, ...] of each head, normalized and weighted; values as they are."""
    weight = tl.load(weight_ptr, mask=inside & ~is_value, other=0.0).to(tl.float32)
    normalized = x.to(tl.float32) * inverse_rms
    if weight_ptr.dtype.element_ty == x.dtype:
        normalized = normalized.to(x.dtype).to(tl.float32)
    return tl.where(is_value, x, (normalized * weight).to(x.dtype))


@triton.jit
def store(x, q_ptr, cache_ptr, to_q, to_cache, inverse_scale, LIMIT: tl.constexpr):
    """Put some features of each head where the head belongs."""
    tl.store(q_ptr, x, mask=to_q)
    scaled = x.to(tl.float32) * inverse_scale
    if LIMIT > 0:
        scaled = saturated(scaled, LIMIT)
    tl.store(cache_ptr, scaled.to(cache_ptr.dtype.element_ty), mask=to_cache)


@triton.jit
def qkv_rope_kernel(
    qkv_ptr,
    q_ptr,
    cache_ptr,
    positions_ptr,
    slot_mapping_ptr,
    rope_ptr,
    norm_ptr,
    eps,
    k_inverse_scale,
    v_inverse_scale,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # features 0 .. HALF turn with HALF .. 2 * HALF; the rest pass
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # features 2i turn with 2i + 1 instead
    LIMIT: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token and HEADS of its heads, whatever they are: queries, then keys, then values."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    dim = tl.arange(0, HALF_PADDED)[None, :]
    rest_dim = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
    has_rest: tl.constexpr = HEAD_DIM > 2 * HALF

    known = head < NUM_HEADS + 2 * NUM_KV_HEADS
    inside, rest_inside = known & (dim < HALF), known & (rest_dim < HEAD_DIM)
    at = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    low_dim, high_dim = dim, HALF + dim
    if INTERLEAVED:
        low_dim, high_dim = 2 * dim, 2 * dim + 1
    low = tl.load(at + low_dim, mask=inside, other=0.0)
    high = tl.load(at + high_dim, mask=inside, other=0.0)
    if has_rest:
        rest = tl.load(at + rest_dim, mask=rest_inside, other=0.0)

    # What heads share is loaded for each of them, out of the L1 cache: then it lies in the registers as `low`
    # does, and nothing has to change places between threads.
    if HAS_NORM:
        squares = tl.sum(low.to(tl.float32) * low.to(tl.float32), 1)
        squares += tl.sum(high.to(tl.float32) * high.to(tl.float32), 1)
        if has_rest:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight_at = norm_ptr + head * HEAD_DIM
        low = normalize(low, inverse_rms, weight_at + low_dim, inside, is_value)
        high = normalize(high, inverse_rms, weight_at + high_dim, inside, is_value)
        if has_rest:
            rest = normalize(rest, inverse_rms, weight_at + rest_dim, rest_inside, is_value)

    if HAS_ROPE:
        position = tl.load(positions_ptr + token).to(tl.int64)
        angles = rope_ptr + position * 4 * HALF + tl.broadcast_to(dim, (HEADS, HALF_PADDED))
        cos = tl.load(angles, mask=inside, other=0.0)
        sin = tl.load(angles + 3 * HALF, mask=inside, other=0.0)  # behind the cosines and -sin
        a, b = low.to(tl.float32), high.to(tl.float32)
        low = tl.where(is_value, low, (a * cos - b * sin).to(low.dtype))
        high = tl.where(is_value, high, (b * cos + a * sin).to(high.dtype))

    # Keys of all heads, then values of all heads: a block's pages lie as the projection's heads do.
    place = tl.load(slot_mapping_ptr + token).to(tl.int64)
    page = (place // BLOCK_SIZE) * 2 * NUM_KV_HEADS + (head - NUM_HEADS)
    q_at = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM
    cache_at = cache_ptr + (page * BLOCK_SIZE + place % BLOCK_SIZE) * HEAD_DIM
    inverse_scale = tl.where(is_value, v_inverse_scale, k_inverse_scale)
    to_q, to_cache = is_query & inside, (head >= NUM_HEADS) & inside
    store(low, q_at + low_dim, cache_at + low_dim, to_q, to_cache, inverse_scale, LIMIT)
    store(high, q_at + high_dim, cache_at + high_dim, to_q, to_cache, inverse_scale, LIMIT)
    if has_rest:
        to_q, to_cache = is_query & rest_inside, (head >= NUM_HEADS) & rest_inside
        store(rest, q_at + rest_dim, cache_at + rest_dim, to_q, to_cache, inverse_scale, LIMIT)
