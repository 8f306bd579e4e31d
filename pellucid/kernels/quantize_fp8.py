# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Round activations to FP8 (E4M3) in one pass: find the largest, scale, round, store.

One program a token; its row stays in registers between the two uses, so x is read once and a byte an element
is written.  Plain torch takes seven kernels for the same.

Legend: T tokens, K features, G groups of features that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX: tl.constexpr = tl.constexpr(448.0)
INVERSE_MAX: tl.constexpr = tl.constexpr(1 / 448)  # multiplied with: torch divides by a number in two ways
SMALLEST: tl.constexpr = tl.constexpr(1e-12)  # of the largest element: a group of zeros has a scale, too


def quantize_fp8(x: Tensor, group: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (FP8 [T, K], float32 scales [T, G]) with x about their product.

    group: features that share a scale, which is their largest over 448; static: one number on the device, the
    scale of every group instead.
    """
    num_tokens, num_features = x.shape
    assert x.stride(1) == 1, x.stride()
    num_groups = triton.cdiv(num_features, group)
    out = torch.empty(num_tokens, num_features, dtype=FP8, device=x.device)
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return out, scales
    groups_padded, group_padded = triton.next_power_of_2(num_groups), triton.next_power_of_2(group)
    quantize_fp8_kernel[(num_tokens,)](
        x,
        out,
        scales,
        static,
        x.stride(0),
        K=num_features,
        GROUP=group,
        GROUPS=num_groups,
        GROUP_PADDED=group_padded,
        GROUPS_PADDED=groups_padded,
        IS_STATIC=static is not None,
        num_warps=min(16, max(1, groups_padded * group_padded // 1024)),
    )
    return out, scales


def quantize_fp8_ref(x: Tensor, group: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same, one group after the other."""
    parts, scales = [], []
    for part in x.float().split(group, dim=1):
        own = part.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) * (1 / 448)
        scale = own if static is None else static.view(1, 1).expand_as(own)
        parts.append((part / scale).clamp(-448, 448).to(FP8).view(torch.uint8))
        scales.append(scale)
    return torch.cat(parts, dim=1).view(FP8), torch.cat(scales, dim=1)


@triton.jit
def quantize_fp8_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    static_ptr,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)[:, None]
    lane = tl.arange(0, GROUP_PADDED)[None, :]
    feature = group * GROUP + lane
    inside = (lane < GROUP) & (feature < K)
    x = tl.load(x_ptr + token * x_stride + feature, mask=inside, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(static_ptr) + tl.zeros((GROUPS_PADDED, 1), tl.float32)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), axis=1, keep_dims=True), SMALLEST) * INVERSE_MAX
    y = tl.div_rn(x, tl.broadcast_to(scale, (GROUPS_PADDED, GROUP_PADDED)))
    y = tl.minimum(tl.maximum(y, -FP8_MAX), FP8_MAX)
    tl.store(out_ptr + token * K + feature, y.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + token * GROUPS + group, scale, mask=group < GROUPS)
