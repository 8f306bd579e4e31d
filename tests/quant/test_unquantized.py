"""Plain weights: the packed product on a CPU is the plain one, and only one copy is kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pellucid.quant.unquantized import Unquantized, can_pack
from tests.quant.layers import make_linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finishing_does_not_change_the_product(dtype: torch.dtype, num_tokens: int, bias: bool) -> None:
    layer = make_linear(Unquantized(), dtype, bias=bias)
    x = torch.randn(num_tokens, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = F.linear(x, layer.param("weight"), layer.bias)
    layer.finish()
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=2e-3)


@pytest.mark.skipif(not can_pack(), reason="this CPU does not multiply packed bfloat16")
def test_packing_lets_the_plain_copy_go() -> None:
    layer = make_linear(Unquantized(), torch.bfloat16, bias=True)
    layer.finish()
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 9, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_and_many_rows_are_multiplied_on_a_gpu(dtype: torch.dtype, num_tokens: int) -> None:
    layer = make_linear(Unquantized(), dtype, bias=True, device="cuda")
    x = torch.randn(num_tokens, 96, device="cuda").to(dtype)
    expected = F.linear(x, layer.param("weight"), layer.bias)
    layer.finish()
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(layer(x[:, None])[:, 0], expected, rtol=1e-2, atol=2e-3)


def test_float32_stays_as_it_is() -> None:
    layer = make_linear(Unquantized(), torch.float32, bias=False)
    layer.finish()
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
