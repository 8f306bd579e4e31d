# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Logits scaled and softly capped, in place and in one pass: cap * tanh(scale * x / cap) (Gemma 2).

Legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.attention.scores import capped
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton

BLOCK = 2048


def cap_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Change logits [S, V] in place, computing in float32.  Returns them."""
    assert logits.is_contiguous(), logits.stride()
    if logits.numel():
        grid = (triton.cdiv(logits.numel(), BLOCK),)
        size = logits.numel()
        cap_logits_kernel[grid](
            logits, size, scale, cap or 1.0, BLOCK=BLOCK, IS_CAPPED=cap is not None, **dependent()
        )
    return logits


def cap_logits_ref(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """The same in plain torch: what CPUs run."""
    x = logits.float() * scale
    return logits.copy_(x if cap is None else torch.tanh(x / cap) * cap)


@triton.jit(do_not_specialize=["size"])
def cap_logits_kernel(
    logits_ptr,
    size,
    scale,
    cap,
    BLOCK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a stretch of logits, whatever their rows."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + at, mask=at < size, other=0.0).to(tl.float32) * scale
    if IS_CAPPED:
        x = capped(x, cap)
    tl.store(logits_ptr + at, x.to(logits_ptr.dtype.element_ty), mask=at < size)
