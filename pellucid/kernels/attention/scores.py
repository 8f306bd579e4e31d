# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""What becomes of scores, and which keys are seen, for kernels; its plain torch stands beside theirs."""

from __future__ import annotations

from pellucid.kernels.lang.language import tl, triton


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap) in float32; tanh by exp2, which is 2e-7 off, as tanh.approx is not."""
    grown = tl.exp2(x * (2 * 1.4426950408889634 / cap))  # infinity is fine: the quotient is 0 then
    return cap - 2 * cap / (grown + 1)


def reach_of(window: int | None, chunk: int | None) -> int:
    """A window, a chunk below zero, or zero for neither: one number for kernels."""
    assert window is None or chunk is None, (window, chunk)
    return window or -(chunk or 0)


@triton.jit
def first_key(position, REACH: tl.constexpr):
    """The first key that a query sees.  REACH: see `reach_of`, not zero."""
    if REACH > 0:
        first = tl.maximum(position - REACH + 1, 0)
    else:
        first = tl.maximum(position, 0) // -REACH * -REACH
    return first
