"""Launch kernels for a GPU on a machine without one, where they are to be compiled and not to run.

`python -m tests.kernels.compile_together`, in a process of its own because of the interpreter.  Prints how
many variants were compiled.
"""

from __future__ import annotations

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pellucid.kernels.compilations import compiled_together
from pellucid.kernels.rms_norm import add_rms_norm, add_rms_norm_kernel
from pellucid.kernels.silu_mul import silu_mul, silu_mul_kernel


class Absent:
    """A driver of a Hopper GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(Absent())
    with compiled_together(torch.device("cpu")):
        for dtype in (torch.bfloat16, torch.float32):
            gated = silu_mul(torch.ones(4, 64, dtype=dtype))
            assert not gated.any() and torch.ones(3).all(), "what kernels write is zero, and nothing else"
            add_rms_norm(torch.ones(4, 64, dtype=dtype), None, torch.ones(64, dtype=dtype), 1e-6)
    assert torch.ones(2, 2).new_empty(1 << 20).shape == (1 << 20,)
    compiled = [len(kernel.device_caches[0][0]) for kernel in (silu_mul_kernel, add_rms_norm_kernel)]
    sys.stdout.write(f"compiled {compiled}\n")


if __name__ == "__main__":
    main()
