"""A router's logits, as its choice takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pellucid.layers.experts import Router


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_router_with_adapters_is_multiplied_as_other_layers_are(is_wide: bool, has_adapters: bool) -> None:
    """Its kernel of few rows knows nothing of them."""
    seen: list[str] = []

    class Layer:
        lora, bias = object(), None

        def param(self, name: str) -> torch.Tensor:
            return torch.zeros(4, 8)

        def __call__(self, x: torch.Tensor, fwd: object) -> torch.Tensor:
            seen.append(f"layer, {x.dtype}")
            return x[:, :4]

    leaf = SimpleNamespace(logit_parts=lambda *_: seen.append("kernel") or torch.zeros(1))
    router: Any = SimpleNamespace(linear=Layer(), leaf=leaf, is_wide=is_wide)
    fwd: Any = SimpleNamespace(adapters_of=lambda x: torch.zeros(len(x)) if has_adapters else None)
    Router._logits(router, torch.zeros(2, 8, dtype=torch.bfloat16), fwd)
    dtype = torch.float32 if is_wide else torch.bfloat16
    assert seen == ([f"layer, {dtype}"] if has_adapters else ["kernel"])
