"""Gated activations by the names that a config.json uses."""

from __future__ import annotations

import pytest
import torch

from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.layers.activation import ACTIVATIONS, activation


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_first_half_gates_the_second_as_in_transformers(name: str) -> None:
    activations = pytest.importorskip("transformers.activations")
    gate, up = torch.randn(2, 3, 16)
    expected = activations.ACT2FN[name](gate) * up
    torch.testing.assert_close(silu_mul_ref(torch.cat((gate, up), dim=-1), activation(name)), expected)


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'sine' \(known: silu, "):
        activation("sine")
