"""Does torch.compile pay for the leaf operations on this CPU?  `python benchmarks/leaf_compile.py`

Prints microseconds a call, eager and compiled, for the shapes of Qwen3-0.6B at 1, 16 and 128 tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pellucid  # noqa: F401  # isort: skip  (pins the threads before torch loads)
import torch
from torch import Tensor

from pellucid.kernels.attention.qkv_rope import rotate
from pellucid.kernels.pointwise.rms_norm import rms_norm_ref
from pellucid.kernels.pointwise.silu_mul import silu_mul_ref

HIDDEN, HEADS, HEAD_DIM, INNER = 1024, 24, 128, 3072


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return rms_norm_ref(residual, weight, 1e-6), residual


def norm_rope(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(rms_norm_ref(heads, weight, 1e-6), cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    return silu_mul_ref(gate_up)


def microseconds(call: Callable[..., object], arguments: tuple[Tensor, ...], num_calls: int = 2000) -> float:
    for _ in range(num_calls // 20):
        call(*arguments)
    began = time.perf_counter()
    for _ in range(num_calls):
        call(*arguments)
    return (time.perf_counter() - began) / num_calls * 1e6


def cases(num_tokens: int) -> dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]]:
    def bf16(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16)

    angles = torch.randn(2, num_tokens, 1, HEAD_DIM)
    return {
        "add + norm": (add_norm, (bf16(num_tokens, HIDDEN), bf16(num_tokens, HIDDEN), bf16(HIDDEN))),
        "norm + rope": (norm_rope, (bf16(num_tokens, HEADS, HEAD_DIM), bf16(HEADS, HEAD_DIM), *angles)),
        "silu * mul": (silu_mul, (bf16(num_tokens, 2 * INNER),)),
    }


@torch.inference_mode()
def main() -> None:
    for num_tokens in (1, 16, 128):
        for name, (call, arguments) in cases(num_tokens).items():
            eager = microseconds(call, arguments)
            compiled = microseconds(torch.compile(call, dynamic=True), arguments)
            sys.stdout.write(
                f"{num_tokens:4d} tokens  {name:12s} eager {eager:7.1f}  compiled {compiled:7.1f}\n"
            )


if __name__ == "__main__":
    main()
