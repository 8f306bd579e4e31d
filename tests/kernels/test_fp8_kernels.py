"""Rounding to FP8 and products with scales of blocks: the kernels against their references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.block_fp8_matmul import block_fp8_matmul, block_fp8_matmul_ref
from pellucid.kernels.quantize_fp8 import quantize_fp8, quantize_fp8_ref

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 64, 64), (5, 1000, 1000), (3, 48, 16), (4, 300, 128), (130, 256, 128), (2, 25600, 25600)]


def activations(num_tokens: int, num_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens of very different size, one of them zeros; not contiguous."""
    size = torch.logspace(-4, 3, num_tokens, device=DEVICE)[:, None]
    x = torch.randn(num_tokens, 2 * num_features, device=DEVICE) * size
    x[num_tokens // 2] *= num_tokens > 1
    return x.to(dtype)[:, num_features:]


def assert_rounded_alike(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """On a GPU the same bits; the interpreter loses the carry of a mantissa rounded up to 2."""
    if HAS_GPU:
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    else:
        is_close = (ours.float() - expected.float()).abs() <= expected.float().abs() / 8 + 2**-9
        assert is_close.float().mean() > 0.9


@pytest.mark.parametrize(("num_tokens", "num_features", "group"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_as_the_reference_does(
    num_tokens: int, num_features: int, group: int, dtype: torch.dtype
) -> None:
    x = activations(num_tokens, num_features, dtype)
    (rounded, scale), (expected, expected_scale) = quantize_fp8(x, group), quantize_fp8_ref(x, group)
    assert torch.equal(scale, expected_scale) and rounded.dtype == torch.float8_e4m3fn
    assert_rounded_alike(rounded, expected)


def test_a_static_scale_serves_every_token_and_saturates() -> None:
    x = torch.tensor([[0.0, 1.0, 3.3, -1e4], [1e4, 2.0, -0.7, 0.1]], device=DEVICE)
    static = torch.tensor(0.5, device=DEVICE)
    for quantize in (quantize_fp8, quantize_fp8_ref):
        rounded, scale = quantize(x, 4, static)
        assert scale.tolist() == [[0.5], [0.5]]
        assert rounded.float()[0, 3] == -448 and rounded.float()[1, 0] == 448
        assert_rounded_alike(rounded, quantize_fp8_ref(x, 4, static)[0])


def test_no_tokens_have_no_scales() -> None:
    rounded, scale = quantize_fp8(torch.empty(0, 96, device=DEVICE), 32)
    assert rounded.shape == (0, 96) and scale.shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_inputs", "block"),
    [
        (1, 40, 128, 128),
        (16, 33, 96, 32),
        (17, 70, 80, 32),
        (70, 64, 256, 64),
        (300, 130, 160, 128),
        (0, 8, 32, 32),
    ],
)
def test_the_product_scales_every_block(
    num_tokens: int, num_outputs: int, num_inputs: int, block: int, dtype: torch.dtype
) -> None:
    if num_tokens > 64 and not HAS_GPU and dtype != torch.float32:
        pytest.skip("large tiles are slow in the interpreter")
    x, x_scale = quantize_fp8_ref(torch.randn(num_tokens, num_inputs, device=DEVICE), block)
    weight, weight_scale = quantize_fp8_ref(torch.randn(num_outputs, num_inputs, device=DEVICE), block)
    weight_scale = weight_scale * torch.logspace(-1, 1, weight_scale.shape[1], device=DEVICE)
    operands = (x.contiguous(), x_scale, weight.contiguous(), weight_scale)
    ours, expected = (
        multiply(*operands, block=block, dtype=dtype) for multiply in (block_fp8_matmul, block_fp8_matmul_ref)
    )
    assert ours.shape == (num_tokens, num_outputs) and ours.dtype == dtype
    tolerance = {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * num_inputs**0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_graph_replays_both_with_new_activations() -> None:
    weight, weight_scale = quantize_fp8_ref(torch.randn(64, 256, device=DEVICE), 128)
    x = torch.randn(9, 256, device=DEVICE).bfloat16()

    def run() -> torch.Tensor:
        operands = (*quantize_fp8(x, 128), weight, weight_scale)
        return block_fp8_matmul(*operands, block=128, dtype=torch.bfloat16)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.copy_(torch.randn(9, 256))
    graph.replay()
    assert torch.equal(out, run())
