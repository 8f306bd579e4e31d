"""Triton's interpreter, under which kernels run where there is no GPU.

It replaces the builtins of triton.language at every call of every function of a kernel, and searches whole
modules for them each time.  Which names these are never changes, so here they are looked for once.
"""

from __future__ import annotations

import inspect
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


def interpret() -> None:
    """Without a GPU, have kernels interpreted.  Comes before whatever imports Triton."""
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        from triton.runtime import interpreter

        interpreter._patch_builtin = patch_builtins


def patch_builtins(place: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's own.  place: a module or a class of triton.language."""
    from triton.language.core import is_builtin
    from triton.runtime.interpreter import _patch_attr

    for name in names_of_builtins(place):
        member = getattr(place, name)
        if is_builtin(member):
            _patch_attr(place, name, member, builder, scope)


@cache
def names_of_builtins(place: Any) -> list[str]:
    """First asked for before anything there has been replaced."""
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(place) if is_builtin(member)]
