"""The keys by which Triton finds compiled kernels on disk, the same in every process.

A kernel's key is made of its source, the functions that it calls, and the constants that these read.  Triton
makes it when it is first asked for, and 3.6 leaves out the constants of functions that have no key by then
(3.9 does not): so keys depend on what was compiled before, and what another process has compiled is not
found.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import RLock
from types import CodeType, ModuleType
from typing import Any

_settled: set[int] = set()  # ids of functions, which live as long as their modules
_lock = RLock()


def settle(function: Any) -> None:
    """Make the key of a kernel, or of a function that kernels call, behind those of all that it calls."""
    with _lock:
        if id(function) in _settled:
            return
        _settled.add(id(function))  # before it is: it may call itself
        for called in called_by(function):
            settle(called)
        function.cache_key  # noqa: B018 which makes it


def called_by(function: Any) -> Iterator[Any]:
    """The functions of Triton's that one names: of its own module, imported ones, and of modules it names."""
    names = names_in(function.fn.__code__)
    own = function.fn.__globals__
    modules = [own[name] for name in names if isinstance(own.get(name), ModuleType)]
    for name in names:
        values = own.get(name), *(getattr(module, name, None) for module in modules)
        # Not asked for its key, which would make it.
        yield from (each for each in values if hasattr(type(each), "cache_key") and hasattr(each, "fn"))


def names_in(code: CodeType) -> list[str]:
    """Names of globals and of attributes in a function, and in functions within it."""
    within = [name for each in code.co_consts if isinstance(each, CodeType) for name in names_in(each)]
    return [*code.co_names, *within]
