# pyright: reportOptionalCall=false
"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits inside.

What a kernel does before `wait` overlaps with the end of the kernel before it: its launch, and reading what
no kernel writes, such as weights.  The law: every program of a kernel launched with `dependent()` calls
`wait` before it touches what other kernels write, before it writes anything, and before it ends; then to
wait for one kernel is to wait for all before it.  On GPUs before Hopper, and in the interpreter, kernels just
follow one another.  Works within CUDA graphs.  CUDA C++ Programming Guide, "Programmatic Dependent Launch".
"""

from __future__ import annotations

import os
from functools import cache

import torch

from pellucid.kernels.lang.language import tl, triton
from pellucid.platform import platform_of

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton, or one without it
    gdc_launch_dependents = gdc_wait = None


@cache
def dependent() -> dict[str, bool]:
    """What to launch a kernel with, beside its arguments: `kernel[grid](..., **dependent())`."""
    knows_how = gdc_wait is not None and not os.environ.get("TRITON_INTERPRET")
    if knows_how and torch.cuda.is_available() and platform_of(torch.device("cuda")).reaches(9):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """The next kernel may be launched, once every program has said so: as its programs find room."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until all kernels before this one have ended and what they wrote can be read."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def ask_for(at):
    """Have the lines of memory at these addresses in the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
