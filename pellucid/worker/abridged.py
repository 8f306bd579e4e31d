"""Models with fewer layers, for steps that only have to see which kernels a whole model takes.

Layers that are alike take the same kernels, so the first layer, which nothing has been added to yet, and one
of each kind behind it stand for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch import Tensor, nn

from pellucid.layers.stage import Depth, Layers

NOT_OURS = {"builtins", "numpy", "torch", "triton"}


class Abridged:
    """Calls for models with only as many layers as differ."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._lists = [
            (owner, name, child, one_of_each(child))
            for model in models
            for owner in model.modules()
            for name, child in owner.named_children()
            if isinstance(child, Layers)
        ]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within, models have no other layers."""
        for owner, name, _, few in self._lists:
            setattr(owner, name, few)
        try:
            yield
        finally:
            for owner, name, whole, _ in self._lists:
                setattr(owner, name, whole)


def one_of_each(layers: Layers) -> Layers:
    """The first layer, and the first of each kind behind it."""
    kinds: dict[Hashable, nn.Module] = {}
    for layer in layers[1:]:
        kinds.setdefault(likeness(layer), layer)
    return Layers([*layers[:1], *kinds.values()])


def likeness(value: object, within: frozenset[int] = frozenset()) -> Hashable:
    """What is equal for layers that launch the same kernels: all of them but names and numbers of a launch.

    Those are the values of tensors, and floats, which Triton passes as they are: it compiles nothing for one,
    and every layer may have a KV scale of its own.  within: ids of objects that this one is part of.
    """
    match value:
        case Tensor() if value.layout == torch.strided:
            return value.shape, value.stride(), value.dtype, value.data_ptr() % 16
        case Tensor():
            return value.shape, value.dtype, value.layout
        case Depth():
            return Depth
        case bool() | int() | None | Enum() | type() | BuiltinFunctionType() | torch.dtype():
            return value
        case float():
            return float
        case str():  # names, and paths in a checkpoint
            return ""
    if id(value) in within:
        return ""
    inside = within | {id(value)}
    return type(value), tuple((name, likeness(part, inside)) for name, part in parts_of(value))


def parts_of(value: object) -> Iterable[tuple[str, object]]:
    """What an object is made of, by name or number; a function of its code and what it closes over."""
    match value:
        case dict():
            return [(str(name), part) for name, part in value.items()]
        case list() | tuple():
            return [(str(i), part) for i, part in enumerate(value)]
        case FunctionType():
            cells = value.__closure__ or ()
            code = value.__code__.co_filename, value.__code__.co_firstlineno
            return [(f"{code}", None), *((str(i), cell.cell_contents) for i, cell in enumerate(cells))]
        case MethodType():
            return [("function", value.__func__), ("of", value.__self__)]
        case partial():
            return [("function", value.func), ("with", value.args), ("and", value.keywords)]
    return state_of(value).items()


def state_of(value: object) -> dict[str, object]:
    """What an object holds, if it is a layer's or one of ours; others count by their class alone."""
    if not isinstance(value, nn.Module) and type(value).__module__.partition(".")[0] in NOT_OURS:
        return {}
    names = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    slots = {name: getattr(value, name) for name in names if name != "__weakref__" and hasattr(value, name)}
    return slots | getattr(value, "__dict__", {})
