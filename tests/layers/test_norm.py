"""RMSNorm rounds as transformers does and hands on the sum."""

from __future__ import annotations

import pytest
import torch

from pellucid.layers.leaf import PLAIN
from pellucid.layers.norm import NormSpec, RMSNorm
from pellucid.layers.weight import Weight
from pellucid.quant.base import WHOLE, ParamSpec, Replicated


def make_norm(dtype: torch.dtype) -> RMSNorm:
    spec = ParamSpec(shape=(64,), dtype=dtype, place=Replicated(), fill="near_one")
    weight = Weight.of(spec, ("norm.weight",), (WHOLE,), torch.device("cpu"))
    weight.allocate()
    weight.fill(torch.Generator().manual_seed(0))
    return RMSNorm(weight, NormSpec(1e-5), PLAIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_rounds_before_the_weight_not_after(dtype: torch.dtype) -> None:
    norm = make_norm(dtype)
    x = (torch.randn(200, 64) * 3).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(norm(x)[0], norm.weight * normed.to(dtype), rtol=0, atol=0)


def test_x_is_added_to_the_residual_in_place_and_handed_on() -> None:
    norm = make_norm(torch.float32)
    x, residual = torch.randn(2, 5, 64)
    expected = x + residual
    y, stream = norm(x, residual)
    assert stream is residual and torch.equal(stream, expected)
    assert torch.equal(y, norm(expected)[0])


def test_without_a_residual_the_input_becomes_it() -> None:
    x = torch.randn(5, 64)
    assert torch.equal(make_norm(torch.float32)(x)[1], x)
