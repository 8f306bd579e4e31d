"""A model is warmed up with one layer of each kind, and is whole again afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pellucid.layers.stage import Layers
from pellucid.quant.fp8 import Fp8, Fp8Format
from pellucid.worker.abridged import Abridged
from tests.quant.layers import make_linear


class Layer(nn.Module):
    """Says what it is when it is called."""

    def __init__(self, name: str, *, window: int | None = None, width: int = 4) -> None:
        super().__init__()
        self.name, self.window = name, window
        self.method: Method | None = None
        self.linear: nn.Module | None = None
        self.k_scale = 1.0
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


class Method:
    """Of the same class for all layers, with state of its own for some."""

    def __init__(self, product: Callable[[], object], layer: Layer) -> None:
        self.product, self.layer = product, layer


def product_of(tile: int) -> Callable[[], object]:
    counter = torch.zeros(3)  # each layer has its own

    def product() -> object:
        return counter, tile

    return product


def test_layers_whose_methods_multiply_differently_differ() -> None:
    layers = [Layer(name) for name in "abcd"]
    for layer, product in zip(layers, (1, 2, 2, 3), strict=True):
        layer.method = Method(product_of(product), layer)
    with Abridged([model := Model(*layers)])():
        assert model() == ["a", "b", "d"]


def test_layers_with_scales_of_their_own_are_alike() -> None:
    layers = [Layer(name) for name in "abcd"]
    for layer, scale in zip(layers, (1.0, 0.5, 0.25, 0.1), strict=True):
        layer.k_scale = scale
    with Abridged([model := Model(*layers)])():
        assert model() == ["a", "b"]


def test_a_mixed_scheme_and_a_calibrated_cache_have_a_layer_of_each_kind() -> None:
    """Layer 2 has activations rounded by token in its MLP, the others have static scales."""
    static, dynamic = Fp8Format(activations="static"), Fp8Format()
    layers = []
    for i, format in enumerate((static, static, dynamic, static)):
        linear = make_linear(Fp8(format), torch.bfloat16)
        linear.finish()
        layers.append(layer := Layer(str(i)))
        layer.linear, layer.k_scale = linear, 1 / (i + 1)
    with Abridged([model := Model(*layers)])():
        assert model() == ["0", "1", "2"]


def test_there_may_be_no_layers() -> None:
    with Abridged([Model()])():
        assert True
