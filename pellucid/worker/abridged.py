"""Models with fewer layers, for steps that only have to see which kernels a whole model takes.

Layers that are alike take the same kernels, so the first layer, which nothing has been added to yet, and one
of each kind behind it stand for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pellucid.layers.stage import Layers


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


def likeness(value: object) -> Hashable:
    """What is equal for layers that launch the same kernels: all of them but names and tensors' values."""
    match value:
        case Tensor():
            return value.shape, value.stride(), value.dtype, value.data_ptr() % 16
        case bool() | int() | float() | None:
            return value
        case str():  # names, and paths in a checkpoint
            return ""
        case nn.Module():
            return type(value), likeness(vars(value))
        case dict():
            return tuple((str(name), likeness(each)) for name, each in value.items())
        case list() | tuple():
            return tuple(likeness(each) for each in value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), tuple(likeness(getattr(value, field.name)) for field in fields)
    return type(value)
