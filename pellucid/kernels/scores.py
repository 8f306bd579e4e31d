# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""The soft cap of scores and of logits (Gemma 2), for kernels; its plain torch stands beside theirs."""

from __future__ import annotations

from pellucid.kernels.language import tl, triton


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap) in float32; tanh by exp2, which is 2e-7 off, as tanh.approx is not."""
    grown = tl.exp2(x * (2 * 1.4426950408889634 / cap))  # infinity is fine: the quotient is 0 then
    return cap - 2 * cap / (grown + 1)
