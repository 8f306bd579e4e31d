"""INT8 weights: few tokens and many give the plain product of the rounded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pellucid import LLM, SamplingParams
from pellucid.quant.base import choose_scheme
from pellucid.quant.int8 import MAX_DIRECT_TOKENS, Int8, quantize_rows
from pellucid.quant.unquantized import Unquantized
from tests.quant.layers import make_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(20, 64).to(dtype)
    weight[3] = 0
    integers, scale = quantize_rows(weight)
    assert integers.dtype == torch.int8 and scale.dtype == dtype
    error = (integers.float() * scale.float()[:, None] - weight.float()).abs()
    assert (error <= scale.float()[:, None] * 1.01).all()
    assert (error.mean() < scale.float().mean() / 3) and integers[3].eq(0).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, MAX_DIRECT_TOKENS, MAX_DIRECT_TOKENS + 1, 130])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_the_product_is_that_of_the_rounded_weights(
    dtype: torch.dtype, tolerance: float, num_tokens: int, bias: bool
) -> None:
    layer = make_linear(Int8(), dtype, bias=bias)
    integers, scale = quantize_rows(layer.param("weight"))
    layer.finish()
    assert layer.param("weight").dtype == torch.int8
    x = torch.randn(num_tokens, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = F.linear(x.double(), integers.double() * scale.double()[:, None])
    expected = expected if layer.bias is None else expected + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=tolerance)


def test_the_head_stays_plain() -> None:
    scheme = choose_scheme({}, "int8")
    assert isinstance(scheme.method(("lm_head",), "head"), Unquantized)
    assert isinstance(scheme.method(("model.layers.0.mlp.down_proj",), "linear"), Int8)


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
    with pytest.raises(ValueError, match="unknown quantization scheme 'int9'.*known:.*fp8, int8"):
        LLM(str(tiny), quantization="int9", device="cpu")
