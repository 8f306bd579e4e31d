"""Rounding to FP8 and products with scales of blocks: the kernels against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from pellucid.kernels.pointwise.rms_norm import add_rms_norm, add_rms_norm_rounded, add_rms_norm_rounded_ref
from pellucid.kernels.pointwise.silu_mul import ACTIVATIONS, silu_mul, silu_mul_rounded, silu_mul_rounded_ref
from pellucid.kernels.products.bytes_gemv import bytes_gemv, bytes_gemv_ref
from pellucid.kernels.products.own_products import OwnByteProducts
from pellucid.kernels.products.round_rows import (
    BY_ROWS,
    Rounded,
    Rounding,
    cut,
    round_rows,
    rounded_bytes,
    rounded_bytes_ref,
    saturated,
)
from pellucid.kernels.products.scaled_matmul import scaled_matmul, scaled_matmul_ref
from pellucid.kernels.products.small_matmul import Scales, small_matmul
from pellucid.kernels.products.tiles import Gemv, SplitK
from tests.kernels.compare import DTYPES as COMPARED

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
Quantize = Callable[..., tuple[torch.Tensor, torch.Tensor]]
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


def assert_same_rows(ours: Rounded, expected: Rounded) -> None:
    assert ours.dtype == expected.dtype and torch.equal(ours.scales, expected.scales)
    assert torch.equal(ours.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize(("num_tokens", "num_features", "group"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_as_the_reference_does(
    num_tokens: int, num_features: int, group: int, dtype: torch.dtype
) -> None:
    x = activations(num_tokens, num_features, dtype)
    (rounded, scale), (expected, expected_scale) = rounded_bytes(x, group), rounded_bytes_ref(x, group)
    assert torch.equal(scale, expected_scale) and rounded.dtype == torch.float8_e4m3fn
    assert_rounded_alike(rounded, expected)


def test_a_static_scale_serves_every_token_and_saturates() -> None:
    x = torch.tensor([[0.0, 1.0, 3.3, -1e4], [1e4, 2.0, -0.7, 0.1]], device=DEVICE)
    static = torch.tensor(0.5, device=DEVICE)
    for quantize in (rounded_bytes, rounded_bytes_ref):
        rounded, scale = quantize(x, 4, static)
        assert scale.tolist() == [[0.5], [0.5]]
        assert rounded.float()[0, 3] == -448 and rounded.float()[1, 0] == 448
        assert_rounded_alike(rounded, rounded_bytes_ref(x, 4, static)[0])


@triton.jit
def saturate_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, saturated(tl.load(x_ptr + at), 448.0))


def test_a_number_saturates_and_nan_stays_nan() -> None:
    x = torch.tensor([1.0, torch.nan, -torch.inf, 1e4], device=DEVICE)
    out = torch.empty_like(x)
    saturate_kernel[(1,)](x, out)
    torch.testing.assert_close(out.cpu(), torch.tensor([1.0, torch.nan, -448.0, 448.0]), equal_nan=True)


@pytest.mark.parametrize("quantize", [rounded_bytes, rounded_bytes_ref] if HAS_GPU else [rounded_bytes_ref])
@pytest.mark.parametrize("is_static", [False, True])
def test_nan_stays_nan_and_spoils_no_other_token(quantize: Quantize, is_static: bool) -> None:
    """The interpreter's own conversion loses it."""
    x = torch.tensor([[1.0, torch.nan, -2.0, 3.0], [1.0, 2.0, -3.0, 4.0]], device=DEVICE)
    rounded, scale = quantize(x, 4, torch.tensor(0.5, device=DEVICE) if is_static else None)
    assert rounded.float()[0, 1].isnan()
    torch.testing.assert_close(rounded.float()[1] * scale[1], x[1], rtol=1 / 16, atol=0)


def test_no_tokens_have_no_scales() -> None:
    rounded, scale = rounded_bytes(torch.empty(0, 96, device=DEVICE), 32)
    assert rounded.shape == (0, 96) and scale.shape == (0, 3)


@pytest.mark.parametrize("num_features", [1, 16, 1024, 3072, 5120, 12288, 25600])
def test_a_row_is_cut_into_few_parts_with_little_to_spare(num_features: int) -> None:
    parts, part = cut(num_features)
    assert part & (part - 1) == 0 and num_features <= parts * part <= 1.25 * num_features


STATIC = torch.tensor(0.02, device=DEVICE)
ROUNDINGS = {"rows": BY_ROWS, "static": Rounding(static=STATIC), "groups": Rounding(32)}
roundings = pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS.keys())


@pytest.mark.parametrize("dtype", COMPARED)
@pytest.mark.parametrize("has_residual", [True, False])
@roundings
def test_a_norm_may_round_what_it_has_normalized(
    dtype: torch.dtype, has_residual: bool, rounding: Rounding
) -> None:
    x, weight = activations(5, 300, dtype), torch.rand(300, device=DEVICE).to(dtype)
    residuals = [torch.ones_like(x) if has_residual else None for _ in range(3)]
    normalized, expected_stream = add_rms_norm(x, residuals[0], weight, 1e-6)
    ours, stream = add_rms_norm_rounded(x, residuals[1], weight, 1e-6, rounding)
    assert_same_rows(ours, round_rows(normalized, rounding))
    assert torch.equal(stream, expected_stream)
    reference, stream = add_rms_norm_rounded_ref(x, residuals[2], weight, 1e-6, rounding)
    torch.testing.assert_close(ours.scales, reference.scales, rtol=1e-2, atol=0)
    assert torch.equal(stream, expected_stream)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [1, 96, 600, 1500])
@roundings
def test_a_gate_may_round_what_it_lets_through(act: str, hidden: int, rounding: Rounding) -> None:
    gate_up = activations(4, 2 * hidden, torch.float32) / 100
    ours = silu_mul_rounded(gate_up, act, rounding)
    assert_same_rows(ours, round_rows(silu_mul(gate_up, act), rounding))
    reference = silu_mul_rounded_ref(gate_up, act, rounding)
    torch.testing.assert_close(ours.scales, reference.scales, rtol=1e-3, atol=1e-6)


def test_no_tokens_are_gated_in_any_way() -> None:
    for rounding in ROUNDINGS.values():
        ours = silu_mul_rounded(torch.empty(0, 192, device=DEVICE), rounding=rounding)
        assert ours.values.shape == (0, 96) and ours.scales.shape == (0, 3 if rounding.group else 1)


GEMVS = [Gemv(4, 128, 4), Gemv(2, 256, 2)]


@pytest.mark.parametrize("tile", GEMVS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 4])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "has_bias"),
    [
        (70, 256, True),
        (33, 336, False),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in [(70, 256, False), (33, 336, True)]),
    ],
)
@roundings
def test_a_row_is_multiplied_with_every_output(
    tile: Gemv, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, rounding: Rounding
) -> None:
    x = activations(num_rows, num_inputs, torch.float16) / 8  # sums stay within float16
    weight, weight_scale = scaled_weight(num_outputs, num_inputs, rounding.group or num_inputs)
    bias = torch.randn(num_outputs, device=DEVICE).half() if has_bias else None
    rounded = round_rows(x, rounding)
    y = bytes_gemv(rounded, weight, weight_scale, tile, rounding, bias=bias)
    expected = bytes_gemv_ref(rounded, weight, weight_scale, rounding, bias=bias)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.float(), expected, rtol=2e-3, atol=2e-3)
    if rounding.group is None:
        unrounded = bytes_gemv(x, weight, weight_scale, tile, rounding, bias=bias)
        assert torch.equal(unrounded, y), "rounds as rounded_bytes does"


@roundings
def test_few_rows_go_to_the_kernel_of_their_number_rounded_or_not(rounding: Rounding) -> None:
    x = activations(16, 256, torch.float16)
    weight, weight_scale = scaled_weight(70, 256, rounding.group or 256)
    tile = SplitK(16, 64, 2, 4, 3)
    products = OwnByteProducts(weight, {1: GEMVS[0], 8: tile, 12: None}, rounding)
    for num_rows in (0, 9, 12, 13, 16):
        assert products(x[:num_rows], weight, weight_scale) is None
    alone = bytes_gemv(round_rows(x[:1], rounding), weight, weight_scale, GEMVS[0], rounding)
    assert torch.equal(products(x[:1], weight, weight_scale), alone)
    rounded, arrivals = round_rows(x[:8], rounding), torch.zeros(5, dtype=torch.int32, device=DEVICE)
    expected = torch.empty(8, 70, dtype=torch.float16, device=DEVICE)
    scales = Scales(weight_scale, rounded.scales, rounding.group)
    small_matmul(rounded.values, weight, expected, tile, scales=scales, arrivals=arrivals)
    for rows in (x[:8], rounded):
        assert torch.equal(products(rows, weight, weight_scale), expected)


WHOLE_ROWS = 1 << 20  # a block that is longer than any row
SCALED = [
    (1, 40, 128, 128),
    (16, 33, 96, 32),
    (17, 70, 80, 32),
    (5, 34, 100, 48),  # steps of 64, not full
    (3, 20, 320, 160),  # two steps a block, the second one not full
    (70, 64, 256, 64),
    (300, 130, 160, 128),
    (0, 8, 32, 32),
    (1, 40, 300, WHOLE_ROWS),
    (20, 33, 70, WHOLE_ROWS),
    (130, 130, 96, WHOLE_ROWS),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_outputs", "num_inputs", "block"), SCALED)
def test_the_product_of_fp8_numbers_scales_every_block(
    num_tokens: int, num_outputs: int, num_inputs: int, block: int, dtype: torch.dtype
) -> None:
    if num_tokens > 64 and not HAS_GPU and dtype != torch.float32:
        pytest.skip("large tiles are slow in the interpreter")
    block = min(block, num_inputs)
    x, x_scale = rounded_bytes_ref(torch.randn(num_tokens, num_inputs, device=DEVICE), block)
    weight, weight_scale = scaled_weight(num_outputs, num_inputs, block)
    operands = (x.contiguous(), x_scale, weight.contiguous(), weight_scale)
    ours, expected = (
        multiply(*operands, block=block, dtype=dtype) for multiply in (scaled_matmul, scaled_matmul_ref)
    )
    assert ours.shape == (num_tokens, num_outputs) and ours.dtype == dtype
    tolerance = {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * num_inputs**0.5)


@pytest.mark.parametrize("dtype", COMPARED)
@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_outputs", "num_inputs", "block"), SCALED)
def test_the_product_of_plain_numbers_widens_weights_exactly(
    num_tokens: int, num_outputs: int, num_inputs: int, block: int, is_int8: bool, dtype: torch.dtype
) -> None:
    if num_tokens > 64 and not HAS_GPU and dtype != torch.float32:
        pytest.skip("large tiles are slow in the interpreter")
    block = min(block, num_inputs)
    weight, weight_scale = scaled_weight(num_outputs, num_inputs, block)
    if is_int8:
        weight = torch.randint(-127, 128, weight.shape, dtype=torch.int8, device=DEVICE)
        weight_scale = weight_scale / 127
    x = torch.randn(num_tokens, num_inputs, device=DEVICE).to(dtype)
    operands = (x, None, weight, weight_scale)
    ours, expected = (
        multiply(*operands, block=block, dtype=torch.float32)
        for multiply in (scaled_matmul, scaled_matmul_ref)
    )
    size = expected.abs().amax(1, keepdim=True)
    assert ((ours - expected).abs() <= 1e-5 * size + 1e-30).all()


@pytest.mark.parametrize("dtype", COMPARED)
def test_every_fp8_number_is_widened_to_what_it_is(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()][:, None].expand(-1, 16).contiguous()
    x = torch.eye(16, dtype=dtype, device=DEVICE)
    ones = torch.ones(len(numbers), 1, device=DEVICE)
    y = scaled_matmul(x, None, numbers, ones, block=16, dtype=torch.float32)
    assert torch.equal(y, numbers.t().float())


def scaled_weight(num_outputs: int, num_inputs: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weights, and scales of blocks that differ much."""
    weight, scale = rounded_bytes_ref(torch.randn(num_outputs, num_inputs, device=DEVICE), block)
    return weight.contiguous(), scale * torch.logspace(-1, 1, scale.shape[1], device=DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_graph_replays_both_with_new_activations() -> None:
    weight, weight_scale = rounded_bytes_ref(torch.randn(64, 256, device=DEVICE), 128)
    x = torch.randn(9, 256, device=DEVICE).bfloat16()

    def run() -> torch.Tensor:
        operands = (*rounded_bytes(x, 128), weight, weight_scale)
        return scaled_matmul(*operands, block=128, dtype=torch.bfloat16)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.copy_(torch.randn(9, 256))
    graph.replay()
    assert torch.equal(out, run())
