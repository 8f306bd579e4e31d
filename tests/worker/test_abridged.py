"""A model is rehearsed with one layer of each kind, and is whole again afterwards."""

from __future__ import annotations

import torch
from torch import nn

from pellucid.layers.stage import Layers
from pellucid.worker.abridged import Abridged


class Layer(nn.Module):
    """Says what it is when it is called."""

    def __init__(self, name: str, *, window: int | None = None, width: int = 4) -> None:
        super().__init__()
        self.name, self.window = name, window
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, said: list[str]) -> list[str]:
        return [*said, self.name]


class Model(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = Layers(layers)
        self.parts = nn.ModuleList([Layer("x"), Layer("x"), Layer("x")])

    def forward(self) -> list[str]:
        said: list[str] = []
        for layer in self.layers:
            said = layer(said)
        return said


def test_of_layers_the_first_one_and_one_of_each_kind_are_left() -> None:
    model = Model(
        Layer("a"), Layer("b"), Layer("c", window=8), Layer("d"), Layer("e", window=8), Layer("f", width=8)
    )
    abridged = Abridged([model])
    whole = model()
    for _ in range(2):
        with abridged():
            assert model() == ["a", "b", "c", "f"] and len(model.parts) == 3
        assert model() == whole == list("abcdef")


def test_layers_with_weights_that_lie_differently_differ() -> None:
    odd = Layer("c")
    odd.weight = nn.Parameter(torch.rand(5)[1:])
    model = Model(Layer("a"), Layer("b"), odd)
    with Abridged([model])():
        assert model() == ["a", "b", "c"]


def test_there_may_be_no_layers() -> None:
    with Abridged([Model()])():
        assert True
