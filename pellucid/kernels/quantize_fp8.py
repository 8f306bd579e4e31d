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
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.language import tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
INVERSE_MAX = 1 / FP8_MAX  # multiplied with: torch divides by a number in two ways
SMALLEST = 1e-12  # of the largest element: a group of zeros has a scale, too


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
        LIMIT=FP8_MAX,
        INVERSE_LIMIT=INVERSE_MAX,
        SMALLEST=SMALLEST,
        num_warps=min(16, max(1, groups_padded * group_padded // 1024)),
    )
    return out, scales


def quantize_fp8_ref(x: Tensor, group: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    num_tokens, num_features = x.shape
    num_groups = -(-num_features // group)
    wide = F.pad(x.float(), (0, num_groups * group - num_features)).view(num_tokens, num_groups, group)
    if static is None:
        scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST) * INVERSE_MAX
    else:
        scale = static.view(1, 1, 1).expand(num_tokens, num_groups, 1)
    rounded = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return rounded.view(num_tokens, num_groups * group)[:, :num_features], scale.squeeze(-1)


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
    LIMIT: tl.constexpr,
    INVERSE_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
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
        scale = tl.maximum(tl.max(tl.abs(x), axis=1, keep_dims=True), SMALLEST) * INVERSE_LIMIT
    y = tl.div_rn(x, tl.broadcast_to(scale, (GROUPS_PADDED, GROUP_PADDED)))
    y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
    tl.store(out_ptr + token * K + feature, y.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + token * GROUPS + group, scale, mask=group < GROUPS)
