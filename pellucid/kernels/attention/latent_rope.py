# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
"""From projections to latent attention's operands in one pass: queries turned, rows of the cache written.

What turns of a query turns in place, so of queries no more than that is moved.  Pairs of features that turn
together stay where they are: scores are sums over features, and keys lie as queries do.

Legend: T tokens, N heads, C rank of the latent, R features that turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.attention.fp8_cache import limit_of
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.pointwise.rms_norm import rms_norm_ref
from pellucid.kernels.products.round_rows import saturated

HEADS = 16  # of one token, that a program turns


def latent_rope(
    q: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    norm: tuple[Tensor, float],
    rope: Tensor,
    interleaved: bool,
    row_scale: float = 1.0,
) -> None:
    """Turn the last R features of q's heads in place, and write a row of each token to the cache.

    q: [T, N, nope + R].  latent: [T, C + R]; its first C features are normalized, its last ones turned.
    kv_cache: [num_blocks, block_size, C + R].  positions: [T], below the table's length.  slot_mapping: [T],
    block * block_size + offset of each token; tokens may share a place only in the padding block.  norm:
    (weight [C], eps).  rope: float32 [max_len, 2, 1, R].  interleaved: features 2i and 2i + 1 turn together,
    not i and i + R / 2.  row_scale: the cache gets rows / row_scale, an FP8 one saturates.  Computes
    in float32 and rounds after norm, weight and turn each.
    """
    num_tokens, num_heads, head_dim = q.shape
    check_operands(q, latent, kv_cache, positions, slot_mapping, norm[0], rope)
    if num_tokens == 0:
        return
    weight, eps = norm
    rotary_dim, rank = rope.shape[-1], weight.shape[0]
    latent_rope_kernel[(num_tokens, 1 + triton.cdiv(num_heads, HEADS))](
        q,
        latent,
        kv_cache,
        positions,
        slot_mapping,
        rope,
        weight,
        eps,
        1 / row_scale,
        q.stride(0),
        latent.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        RANK=rank,
        RANK_PADDED=triton.next_power_of_2(rank),
        HALF=rotary_dim // 2,
        HALF_PADDED=triton.next_power_of_2(rotary_dim // 2),
        INTERLEAVED=interleaved,
        LIMIT=limit_of(kv_cache.dtype),
        HEADS=HEADS,
        num_warps=2,
        **dependent(),
    )


def check_operands(
    q: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    weight: Tensor,
    rope: Tensor,
) -> None:
    """Assert that shapes and strides are what the kernel takes for granted."""
    (num_tokens, _, head_dim), (rank,), rotary_dim = q.shape, weight.shape, rope.shape[-1]
    assert q.stride()[1:] == (head_dim, 1) and rotary_dim <= head_dim, (q.shape, q.stride(), rope.shape)
    assert latent.shape == (num_tokens, rank + rotary_dim) and latent.stride(1) == 1, (latent.shape, rank)
    assert kv_cache.shape[2] == rank + rotary_dim and kv_cache.is_contiguous(), (kv_cache.shape, rank)
    assert positions.shape == slot_mapping.shape == (num_tokens,), (positions.shape, slot_mapping.shape)
    assert positions.is_contiguous() and slot_mapping.is_contiguous(), (
        positions.stride(),
        slot_mapping.stride(),
    )
    assert rope.is_contiguous() and weight.is_contiguous(), (rope.stride(), weight.stride())


def latent_rope_ref(
    q: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    norm: tuple[Tensor, float],
    rope: Tensor,
    interleaved: bool,
    row_scale: float = 1.0,
) -> None:
    """The same in plain torch: what CPUs run."""
    rank, rotary_dim = norm[0].shape[0], rope.shape[-1]
    latents, turning = latent.split((rank, rotary_dim), dim=-1)
    cos, sin = rope.index_select(0, positions)[..., rotary_dim // 2 :].unbind(1)
    turned = rotate_pairs(turning[:, None], cos, sin, interleaved=interleaved)[:, 0]
    rows = torch.cat((rms_norm_ref(latents, *norm), turned), dim=-1)
    if limit := limit_of(kv_cache.dtype):
        rows = (rows.float() * (1 / row_scale)).clamp(-limit, limit).to(kv_cache.dtype).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    kv_cache.view(-1, rank + rotary_dim).index_copy_(0, slot_mapping, rows)
    q_turning = q[..., -rotary_dim:]
    q_turning.copy_(rotate_pairs(q_turning, cos, sin, interleaved=interleaved))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x [T, heads, R] turned by angles of cos and sin [T, 1, R / 2], each pair staying where it is."""
    axis = -1 if interleaved else -2
    a, b = x.float().unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(axis)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=axis).flatten(-2).to(x.dtype)


@triton.jit
def turned(at, at_other, cos, sin, inside):
    """Pairs of features, turned."""
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at_other, mask=inside, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(a.dtype)


@triton.jit
def keep(at, x, inside, inverse_scale, LIMIT: tl.constexpr):
    """Put features of a row into the cache."""
    if LIMIT > 0:
        x = saturated(x.to(tl.float32) * inverse_scale, LIMIT).to(at.dtype.element_ty)
    tl.store(at, x, mask=inside)


@triton.jit
def latent_rope_kernel(
    q_ptr,
    latent_ptr,
    cache_ptr,
    positions_ptr,
    slot_mapping_ptr,
    rope_ptr,
    weight_ptr,
    eps,
    inverse_scale,
    q_stride,
    latent_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,  # where the cache saturates; 0: it is as wide as what is written
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program for the row of each token, and one for each HEADS of its heads."""
    let_next_start(DEPENDENT)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF_PADDED)
    inside = pair < HALF
    step: tl.constexpr = 2 if INTERLEAVED else 1
    other: tl.constexpr = 1 if INTERLEAVED else HALF  # from a feature to the one that it turns with
    feature = pair * step
    wait(DEPENDENT)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angles = rope_ptr + position * 4 * HALF + pair
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + 3 * HALF, mask=inside, other=0.0)  # behind the cosines and -sin
    if part == 0:
        place = tl.load(slot_mapping_ptr + token).to(tl.int64)
        row_at = cache_ptr + place * (RANK + 2 * HALF)
        at = latent_ptr + token * latent_stride
        dim = tl.arange(0, RANK_PADDED)
        in_latent = dim < RANK
        weight = tl.load(weight_ptr + dim, mask=in_latent, other=0.0)
        x = tl.load(at + dim, mask=in_latent, other=0.0)
        wide = x.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)
        normalized = (wide * inverse_rms).to(x.dtype)
        normalized = (normalized.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
        keep(row_at + dim, normalized, in_latent, inverse_scale, LIMIT)
        key, other_key = turned(at + RANK + feature, at + RANK + feature + other, cos, sin, inside)
        keep(row_at + RANK + feature, key, inside, inverse_scale, LIMIT)
        keep(row_at + RANK + feature + other, other_key, inside, inverse_scale, LIMIT)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        heads_at = q_ptr + token * q_stride + head[:, None] * HEAD_DIM + (HEAD_DIM - 2 * HALF)
        pairs_at = heads_at + feature[None, :]
        known = (head < NUM_HEADS)[:, None] & inside[None, :]
        a, b = turned(pairs_at, pairs_at + other, cos[None, :], sin[None, :], known)
        tl.store(pairs_at, a, mask=known)
        tl.store(pairs_at + other, b, mask=known)
