"""Rounding to INT8 and products of integers: exact sums times scales, by whichever kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.pointwise.rms_norm import add_rms_norm, add_rms_norm_rounded, add_rms_norm_rounded_ref
from pellucid.kernels.pointwise.silu_mul import silu_mul, silu_mul_rounded, silu_mul_rounded_ref
from pellucid.kernels.products.bytes_gemv import bytes_gemv, bytes_gemv_ref
from pellucid.kernels.products.own_products import OwnByteProducts
from pellucid.kernels.products.round_rows import Rounded, Rounding, round_rows, round_rows_ref
from pellucid.kernels.products.scaled_matmul import scaled_matmul
from pellucid.kernels.products.small_matmul import Scales, small_matmul
from pellucid.kernels.products.tiles import Gemv, SplitK
from tests.kernels.compare import DTYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATIC = torch.tensor(0.02, device=DEVICE)
ROUNDINGS = {"rows": Rounding(dtype=torch.int8), "static": Rounding(static=STATIC, dtype=torch.int8)}
roundings = pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS.keys())
GEMV, SPLIT_K = Gemv(4, 128, 4), SplitK(16, 64, 2, 4, 3)


def activations(num_tokens: int, num_features: int, dtype: torch.dtype) -> Tensor:
    """Tokens of very different size, one of them zeros; not contiguous."""
    size = torch.logspace(-3, 2, num_tokens, device=DEVICE)[:, None]
    x = torch.randn(num_tokens, 2 * num_features, device=DEVICE) * size
    x[num_tokens // 2 :][:1] *= num_tokens > 1
    return x.to(dtype)[:, num_features:]


def weights(num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    """INT8, one output of the largest, and float32 scales."""
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8, device=DEVICE)
    weight[0] = 127
    return weight, torch.rand(num_outputs, 1, device=DEVICE) / 1000


def exact(x: Rounded, weight: Tensor, scale: Tensor) -> Tensor:
    """The sums of integers, rounded to float32 once, times the scales."""
    sums = (x.values.double() @ weight.double().T).to(torch.float32)
    return (sums * scale.T * x.scales).to(x.dtype)


def assert_same(ours: Rounded, expected: Rounded) -> None:
    assert ours.dtype == expected.dtype and ours.values.dtype == torch.int8
    assert torch.equal(ours.scales, expected.scales) and torch.equal(ours.values, expected.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_features"), [(1, 64), (5, 1000), (2, 25600)])
@roundings
def test_activations_are_rounded_as_the_reference_does(
    num_tokens: int, num_features: int, dtype: torch.dtype, rounding: Rounding
) -> None:
    x = activations(num_tokens, num_features, dtype)
    assert_same(round_rows(x, rounding), round_rows_ref(x, rounding))


def test_halves_go_to_the_even_integer_and_what_is_too_large_to_the_last_one() -> None:
    x = torch.tensor([[0.5, 1.5, -2.5, -0.5, 126.5, 127.6, 1e6, -1e6]], device=DEVICE)
    rounding = Rounding(static=torch.tensor(1.0, device=DEVICE), dtype=torch.int8)
    for round in (round_rows, round_rows_ref):
        assert round(x, rounding).values.tolist() == [[0, 2, -2, 0, 126, 127, 127, -127]]


def test_what_is_no_number_spoils_its_own_token() -> None:
    x = torch.tensor([[1.0, torch.nan, -2.0, 3.0], [1.0, 2.0, -3.0, 4.0]], device=DEVICE)
    for round in (round_rows, round_rows_ref):
        rounded = round(x, Rounding(dtype=torch.int8))
        assert not rounded.scales[0].isfinite().any()
        torch.testing.assert_close(rounded.values[1] * rounded.scales[1], x[1], rtol=0, atol=4 / 254)


@roundings
def test_norms_and_gates_round_what_they_compute(rounding: Rounding) -> None:
    x, weight = activations(5, 300, torch.bfloat16), torch.rand(300, device=DEVICE).bfloat16()
    ours, _ = add_rms_norm_rounded(x.clone(), torch.ones_like(x), weight, 1e-6, rounding)
    normalized, _ = add_rms_norm(x.clone(), torch.ones_like(x), weight, 1e-6)
    assert_same(ours, round_rows(normalized, rounding))
    reference, _ = add_rms_norm_rounded_ref(x.clone(), torch.ones_like(x), weight, 1e-6, rounding)
    assert reference.values.dtype == torch.int8
    torch.testing.assert_close(ours.scales, reference.scales, rtol=2e-2, atol=0)
    for hidden in (96, 1500):
        gate_up = activations(4, 2 * hidden, torch.float32) / 100
        ours = silu_mul_rounded(gate_up, rounding=rounding)
        assert_same(ours, round_rows(silu_mul(gate_up), rounding))
        reference = silu_mul_rounded_ref(gate_up, rounding=rounding)
        torch.testing.assert_close(ours.scales, reference.scales, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tile", [GEMV, Gemv(2, 256, 2)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("num_outputs", "num_inputs", "has_bias"), [(70, 256, False), (33, 336, True)])
@roundings
def test_a_row_is_multiplied_with_every_output(
    tile: Gemv, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, rounding: Rounding
) -> None:
    x = activations(num_rows, num_inputs, torch.float16)
    weight, scale = weights(num_outputs, num_inputs)
    bias = torch.randn(num_outputs, device=DEVICE).half() if has_bias else None
    rounded = round_rows(x, rounding)
    y = bytes_gemv(rounded, weight, scale, tile, rounding, bias=bias)
    reference = bytes_gemv_ref(rounded, weight, scale, rounding, bias=bias)
    torch.testing.assert_close(y.float(), reference, rtol=1e-2, atol=1e-2)
    assert has_bias or torch.equal(y, exact(rounded, weight, scale))
    assert torch.equal(bytes_gemv(x, weight, scale, tile, rounding, bias=bias), y), (
        "rounds as round_rows does"
    )


@pytest.mark.parametrize(("num_tokens", "num_inputs"), [(1, 1104), (17, 100), (70, 256), (0, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_exact_sums_times_scales(num_tokens: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight, scale = weights(70, num_inputs)
    x = round_rows(activations(num_tokens, num_inputs, torch.float32), ROUNDINGS["rows"])
    x = Rounded(x.values, x.scales / 1000, dtype)  # within float16
    y = scaled_matmul(x.values, x.scales, weight, scale, block=num_inputs, dtype=dtype)
    assert torch.equal(y, exact(x, weight, scale))


@pytest.mark.parametrize("rows", [2, 33])
def test_split_sums_are_exact_too(rows: int) -> None:
    """Of more than float32 would hold."""
    weight, scale = weights(70, 1088)
    x = round_rows(activations(rows, 1088, torch.float16), ROUNDINGS["rows"])
    x.values[0] = 127
    arrivals = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    out = torch.empty(rows, 70, dtype=torch.float16, device=DEVICE)
    small_matmul(x.values, weight, out, SPLIT_K, scales=Scales(scale, x.scales), arrivals=arrivals)
    assert torch.equal(out, exact(x, weight, scale)) and not arrivals.any()


@roundings
def test_a_rows_result_is_the_same_in_any_company_rounded_or_not(rounding: Rounding) -> None:
    x, (weight, scale) = activations(16, 256, torch.float16), weights(70, 256)
    products = OwnByteProducts(weight, {1: GEMV, 8: SPLIT_K, 12: None}, rounding)
    expected = exact(round_rows(x, rounding), weight, scale)
    for num_rows in (1, 2, 8):
        for rows in (x[:num_rows], round_rows(x[:num_rows], rounding)):
            y = products(rows, weight, scale)
            assert y is not None and torch.equal(y, expected[:num_rows])
    assert products(x[:9], weight, scale) is None


def test_rows_of_no_whole_sixteens_are_another_kernels() -> None:
    weight, scale = weights(70, 100)
    products = OwnByteProducts(weight, {1: GEMV}, ROUNDINGS["rows"])
    assert products(activations(1, 100, torch.float16), weight, scale) is None
