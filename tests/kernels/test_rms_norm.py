"""Residual add and RMSNorm in one kernel: against its reference, and what is written where."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.pointwise.rms_norm import MAX_DIM, Post, add_rms_norm, add_rms_norm_ref
from tests.kernels.compare import DTYPES, assert_rounded_alike

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(num_tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, residual = (3 * torch.randn(2, num_tokens, dim, device=DEVICE)).to(dtype)
    return x, residual, (1 + torch.randn(dim, device=DEVICE) / 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 48), (7, 64), (3, 1000), (2, 4096), (1, MAX_DIM)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_it_rounds_as_its_reference_does(
    num_tokens: int, dim: int, dtype: torch.dtype, has_residual: bool
) -> None:
    x, residual, weight = operands(num_tokens, dim, dtype)
    theirs, ours = (residual.clone(), residual) if has_residual else (None, None)
    expected, expected_stream = add_rms_norm_ref(x, theirs, weight, 1e-6)
    y, stream = add_rms_norm(x, ours, weight, 1e-6)
    assert_rounded_alike(y, expected)
    assert torch.equal(stream, expected_stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_kind", ["none", "narrow", "wide"])
@pytest.mark.parametrize("post_kind", ["none", "narrow", "wide"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_norms_before_the_sum_factors_and_wide_weights_round_alike(
    weight_kind: str, post_kind: str, scale: float, dtype: torch.dtype
) -> None:
    x, residual, weight = operands(3, 200, dtype)
    kinds = {"none": None, "narrow": weight, "wide": 1 + torch.randn(200, device=DEVICE) / 4}
    post = Post(kinds[post_kind], 1e-3, scale)
    expected, expected_stream = add_rms_norm_ref(x, residual.clone(), kinds[weight_kind], 1e-6, post)
    y, stream = add_rms_norm(x.clone(), residual, kinds[weight_kind], 1e-6, post)
    assert stream is residual and (y is stream) == (weight_kind == "none")
    assert_rounded_alike(stream, expected_stream)
    assert_rounded_alike(y, expected)


def test_a_wide_weight_is_rounded_once_with_its_product() -> None:
    x, _, _ = operands(50, 64, torch.float16)
    weight = 1 + torch.randn(64, device=DEVICE) / 4
    inverse_rms = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    for function in (add_rms_norm, add_rms_norm_ref):
        assert_rounded_alike(function(x, None, weight, 1e-6)[0], (x.float() * inverse_rms * weight).half())


@pytest.mark.parametrize("function", [add_rms_norm, add_rms_norm_ref])
def test_the_stream_is_added_in_place_and_x_is_left_alone(function) -> None:  # noqa: ANN001
    x, residual, weight = operands(5, 64, torch.float32)
    before, expected = x.clone(), x + residual
    _, stream = function(x, residual, weight, 1e-6)
    assert stream is residual and torch.equal(residual, expected) and torch.equal(x, before)
    y, stream = function(x, None, weight, 1e-6)
    assert stream is x and torch.equal(x, before) and y.data_ptr() != x.data_ptr()


def test_rows_may_be_slices_of_wider_ones() -> None:
    wide, weight = torch.randn(6, 3, 48, device=DEVICE), torch.randn(48, device=DEVICE)
    expected, expected_stream = add_rms_norm_ref(wide[:, 1], wide[:, 2].clone(), weight, 1e-6)
    y, stream = add_rms_norm(wide[:, 1], wide[:, 2], weight, 1e-6)
    torch.testing.assert_close(y, expected)
    assert torch.equal(stream, expected_stream)


def test_no_tokens_and_zeros_are_numbers() -> None:
    weight = torch.ones(64, device=DEVICE)
    y, stream = add_rms_norm(torch.empty(0, 64, device=DEVICE), None, weight, 1e-6)
    assert y.shape == stream.shape == (0, 64)
    assert add_rms_norm(torch.zeros(2, 64, device=DEVICE), None, weight, 1e-6)[0].eq(0).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_adds_again_at_every_replay() -> None:
    x, residual, weight = operands(5, 1024, torch.bfloat16)
    add_rms_norm(x, residual.clone(), weight, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, stream = add_rms_norm(x, residual, weight, 1e-6)
    for _ in range(3):
        expected, expected_stream = add_rms_norm_ref(x, residual.clone(), weight, 1e-6)
        graph.replay()
        assert_rounded_alike(y, expected)
        assert torch.equal(stream, expected_stream)
