"""Triton's interpreter, under which kernels run where there is no GPU.

It replaces the builtins of triton.language at every call of every function of a kernel, and searches whole
modules for them each time; makes types and shapes anew for each result; and computes with 64 bits whether
each sum of integers fits in its own, for an assertion that it does not make.  None of that changes what
kernels compute: here it is done once, or not at all.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from dataclasses import replace
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
        spare_the_interpreter()


def spare_the_interpreter() -> None:
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if interpreter._patch_builtin is patch_builtins:
        return
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = unless_patched(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "who asserts must look for overflow"
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    TritonSemantic.broadcast_impl_value = unless_alike(TritonSemantic.broadcast_impl_value)
    core.tensor.__init__ = make_tensor
    core.block_type.__init__ = by_shape(core.block_type.__init__)


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


def unless_patched(patch_lang: Any) -> Any:
    """Functions that a kernel calls find patched what it uses itself."""
    from triton.language.core import is_builtin
    from triton.runtime.interpreter import _LangPatchScope

    def patch(function: Any) -> Any:
        languages = languages_of(function)
        if any(is_builtin(place) for lang in languages for place in (lang.load, lang.tensor.__add__)):
            return patch_lang(function)
        return _LangPatchScope()

    return patch


@cache
def languages_of(function: Any) -> list[Any]:
    """triton.language and its core, as far as the function's module names them."""
    from triton import language

    named = {id(value) for value in function.__globals__.values()}
    return [place for place in (language, language.core) if id(place) in named]


def by_name(get_np_dtype: Any) -> Any:
    found: dict[str, Any] = {}

    def known(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = get_np_dtype(dtype)
        return found[name]

    return known


def unless_alike(broadcast: Any) -> Any:
    """Two scalars, and two blocks of the same shape, stay what they are."""

    def broadcast_unlike(semantic: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block():
            is_alike = b.is_block() and a.shape.values == b.shape.values
        else:
            is_alike = not b.is_block()
        return (lhs, rhs) if is_alike else broadcast(semantic, lhs, rhs)

    return broadcast_unlike


def by_shape(make_block_type: Any) -> Any:
    from triton.language import core

    @cache
    def block_of(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        block = core.block_type.__new__(core.block_type)
        make_block_type(block, core.int1, list(shape))
        return block.shape, block.numel, str(block.shape)

    def make_known(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, text = block_of(tuple(map(operator.index, shape)))
        self.name = f"<{text}, {element_ty}>"

    return make_known


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    """As a tensor's own `__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = sizes_of(tuple(type.shape.values) if type.is_block() else ())


@cache
def sizes_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """As constants: a block's shape, and its product."""
    from triton.language import core

    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))
