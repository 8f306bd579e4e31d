"""INT8 weights: every product is the plain one of the rounded weights, and each token's its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pellucid import LLM, SamplingParams
from pellucid.quant.int8 import (
    LARGEST,
    Int8,
    PackedProduct,
    WideProduct,
    can_pack,
    quantize_rows,
    split_bytes,
)
from tests.quant.layers import make_linear

needs_packing = pytest.mark.skipif(not can_pack(), reason="this CPU does not multiply packed INT8 exactly")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(20, 64).to(dtype)
    weight[3] = 0
    integers, scale = quantize_rows(weight)
    assert integers.dtype == torch.int8 and integers[:3].abs().amax(dim=1).eq(127).all()
    error = (integers.float() * scale[:, None] - weight.float()).abs()
    assert (error <= scale[:, None] * 0.501).all() and integers[3].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_bytes_hold_an_activation_within_half_a_step(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 64) * torch.tensor([[1e-4], [1.0], [100.0], [1.0], [0.0], [1.0]])).to(dtype)
    x[3, 0], x[5] = 1e4, 1.0
    bytes, step = split_bytes(x)
    low, high = (bytes.double() - 128).split(6)
    torch.testing.assert_close(step[:, 0].double() * LARGEST, x.double().abs().amax(1).clamp_min(1e-30))
    assert ((low + 256 * high) * step - x.double()).abs().le(step * 0.51).all()
    assert high.abs().max() <= 127


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 8, 130])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
)
def test_the_product_is_that_of_the_rounded_weights(
    dtype: torch.dtype, tolerance: float, num_tokens: int, bias: bool
) -> None:
    layer = make_linear(Int8(), dtype, bias=bias)
    integers, scale = quantize_rows(layer.param("weight"))
    layer.finish()
    assert [name for name, _ in layer.named_parameters()] == ["bias"] * bias
    x = torch.randn(num_tokens, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = F.linear(x.double(), integers.double() * scale.double()[:, None])
    expected = expected if layer.bias is None else expected + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=tolerance)


@needs_packing
@pytest.mark.parametrize("num_inputs", [96, 1000, 12288])
def test_the_packed_product_is_exact_up_to_rounding_of_the_activations(num_inputs: int) -> None:
    weight = torch.randint(-127, 128, (40, num_inputs), dtype=torch.int8)
    scale = torch.rand(40) + 0.5
    x = torch.randn(5, num_inputs)
    x[0], x[1] = 3.0, -3.0  # sums as large as they can be
    weight[0] = 127
    packed, wide = PackedProduct(weight, scale)(x), WideProduct(weight.double(), scale.double())(x.double())
    error = (packed - wide).abs() / (x.abs().amax(1, keepdim=True) * scale * 127)
    assert error.max() < num_inputs**0.5 * 1e-4


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_result_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    layer = make_linear(Int8(), dtype)
    layer.finish()
    x = (torch.randn(130, 96) * torch.logspace(-3, 3, 130)[:, None]).to(dtype)
    together = layer(x)
    for rows in (slice(0, 1), slice(7, 9), slice(100, 117)):
        assert torch.equal(layer(x[rows]), together[rows])


def test_a_product_in_float16_is_finite_where_its_results_are() -> None:
    weight = torch.full((8, 4096), 0.01)
    integers, scale = quantize_rows(weight)
    x = torch.full((2, 4096), 3.0, dtype=torch.float16)
    for product in [WideProduct] + [PackedProduct] * can_pack():
        torch.testing.assert_close(
            product(integers, scale)(x).float(), torch.full((2, 8), 122.88), rtol=1e-3, atol=0
        )


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights_seldom_change_the_next_token(tiny: Path, name: str, dtype: str) -> None:
    prompts = [[(7 * i + 31 * j) % 319 + 1 for j in range(20)] for i in range(40)]
    tokens = []
    for quantization in (None, name):
        options = {"dtype": dtype, "device": "cpu", "block_size": 16, "quantization": quantization}
        with LLM(str(tiny), **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= 24, f"{same} of 40 tokens agree"


def test_an_unknown_scheme_names_the_known(tiny: Path) -> None:
    with pytest.raises(ValueError, match="unknown quantization 'int9' .*known.*fp8, int8"):
        LLM(str(tiny), quantization="int9", device="cpu")
