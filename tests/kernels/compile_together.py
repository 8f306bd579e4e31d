"""Launch kernels for a GPU on a machine without one, where they are to be compiled and not to run.

`python -m tests.kernels.compile_together NUM`, in a process of its own because of the interpreter.  NUM other
processes compile, or with none of them threads.  Prints how many variants were compiled, and how many of them
were found on disk.
"""

from __future__ import annotations

import sys

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pellucid.kernels.compile import compilers as compilers_of_all
from pellucid.kernels.compile.compilations import any_compiled, compiled_together
from pellucid.kernels.compile.compilers import Absent, Compilers
from pellucid.kernels.pointwise.rms_norm import add_rms_norm, add_rms_norm_kernel
from pellucid.kernels.pointwise.silu_mul import silu_mul, silu_mul_kernel


class Pretended(Absent):
    """A driver that takes kernels as if it loaded them."""

    def __init__(self) -> None:
        super().__init__(GPUTarget("cuda", 90, 32))
        self.utils = self

    def launcher_cls(self, *_: object) -> object:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, *_: object) -> tuple[object, ...]:
        return self, self, 0, 0, 1024


def main() -> None:
    num_workers, found = int(sys.argv[1]), []
    compilers_of_all.FEW = 0  # even the first of them is waited for
    compilers = Compilers(num_workers) if num_workers else None
    assert not any_compiled()
    driver.set_active(Pretended())  # type: ignore[arg-type]
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)  # type: ignore[assignment]
    with compiled_together(torch.device("cpu"), compilers=compilers):
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            gated = silu_mul(torch.ones(4, 64, dtype=dtype))
            assert not gated.any() and torch.ones(3).all(), "what kernels write is zero, and nothing else"
            add_rms_norm(torch.ones(4, 64, dtype=dtype), None, torch.ones(64, dtype=dtype), 1e-6)
    assert any_compiled()
    if compilers is not None:
        compilers.close()
    assert torch.ones(2, 2).new_empty(1 << 20).shape == (1 << 20,)
    assert "torch._dynamo" not in sys.modules, "which takes longer to import than many kernels to compile"
    compiled = [len(kernel.device_caches[0][0]) for kernel in (silu_mul_kernel, add_rms_norm_kernel)]
    sys.stdout.write(f"compiled {compiled}, found {sum(found)}\n")


if __name__ == "__main__":
    main()
