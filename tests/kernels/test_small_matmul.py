"""Products of few rows: every kernel against float64, and bits that know nothing of their company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.kernels.products.own_products import OwnProducts
from pellucid.kernels.products.round_rows import rounded_bytes_ref
from pellucid.kernels.products.small_matmul import Scales, small_matmul, small_matmul_ref
from pellucid.kernels.products.tiles import Gemv, SplitK, Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
GEMV = Gemv(4, 128, 4)
# What is written in Gluon has no interpreter.
FEW = [pytest.param(tile, marks=GPU) for tile in (GEMV, Gemv(2, 256, 4), Gemv(16, 1024, 1))]
MANY = [SplitK(32, 64, 1, 4, 3), SplitK(16, 64, 3, 4, 3), SplitK(32, 64, 8, 4, 3)]


def operands(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias, such that results are about 1."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
    bias = torch.randn(num_out, generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


def multiply(x: Tensor, weight: Tensor, tile: Tile, **more: Tensor | Scales | str) -> Tensor:
    """One product into garbage, whose counters must come back as zeros."""
    dtype = torch.float32 if x.itemsize == 1 else x.dtype
    width = len(weight) // 2 if "act" in more else len(weight)
    out = torch.full((len(x), width), torch.nan, dtype=dtype, device=DEVICE)
    arrivals = torch.zeros(-(-len(weight) // tile.block_n), dtype=torch.int32, device=DEVICE)
    small_matmul(x, weight, out, tile, arrivals=arrivals, **more)
    assert not arrivals.any()
    return out


@pytest.mark.parametrize("tile", FEW + MANY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=GPU)])
@pytest.mark.parametrize("shape", [(1, 70, 304), (3, 33, 520), (4, 64, 256)])
def test_few_rows_match(tile: Tile, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, weight, bias = operands(*shape, dtype)
    how = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(multiply(x, weight, tile).float(), small_matmul_ref(x, weight), **how)
    biased = multiply(x, weight, tile, bias=bias).float()
    torch.testing.assert_close(biased, small_matmul_ref(x, weight, bias=bias), **how)


@pytest.mark.parametrize("tile", MANY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=GPU)])
@pytest.mark.parametrize("num_rows", [5, 16, 17, 64])
def test_more_rows_match(tile: Tile, dtype: torch.dtype, num_rows: int) -> None:
    x, weight, bias = operands(num_rows, 70, 520, dtype)
    y = multiply(x, weight, tile, bias=bias).float()
    expected = small_matmul_ref(x, weight, bias=bias)
    torch.testing.assert_close(y, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tile", FEW + MANY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=GPU)])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_gated_product_matches(tile: Tile, dtype: torch.dtype, act: str, has_bias: bool) -> None:
    x, weight, bias = operands(3, 70, 520, dtype)
    more = {"bias": bias} if has_bias else {}
    y = multiply(x, weight, tile, act=act, **more).float()
    expected = small_matmul_ref(x, weight, act=act, **more)
    torch.testing.assert_close(y, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    apart = silu_mul_ref(multiply(x, weight, tile, **more), act).float()
    torch.testing.assert_close(y, apart, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tile", [FEW[0], MANY[1]], ids=str)
def test_a_row_has_the_same_bits_in_any_company(tile: Tile) -> None:
    num_rows = 4 if isinstance(tile, Gemv) else 15
    x, weight, _ = operands(num_rows, 70, 520, torch.float16)
    together = multiply(x, weight, tile)
    x[1] = 6e4  # whatever a neighbour holds
    beside = multiply(x, weight, tile)
    assert torch.equal(beside[[0, 2, 3]], together[[0, 2, 3]]) and not torch.equal(beside[1], together[1])
    assert torch.equal(multiply(x[2:3], weight, tile), together[2:3])


@pytest.mark.parametrize("tile", [FEW[0], MANY[1]], ids=str)
def test_rows_may_be_a_slice_of_wider_ones(tile: Tile) -> None:
    x, weight, _ = operands(3, 70, 512, torch.float32)
    narrow = weight[:, :256].contiguous()
    assert torch.equal(multiply(x[:, :256], narrow, tile), multiply(x[:, :256].contiguous(), narrow, tile))


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("tile", [SplitK(32, 64, 4, 4, 3), SplitK(32, 128, 1, 4, 3)], ids=str)
@pytest.mark.parametrize("act", [None, "silu"])
def test_fp8_is_multiplied_with_its_scales(group: int | None, tile: SplitK, act: str | None) -> None:
    x, weight, bias = operands(3, 70, 520, torch.float32)
    x *= torch.logspace(-2, 2, 520, device=DEVICE)
    x, x_scale = rounded_bytes_ref(x, group or 520)
    weight, weight_scale = rounded_bytes_ref(weight, group or 520)
    scales = Scales(weight_scale, x_scale, group)
    expected = small_matmul_ref(x, weight, bias=bias, scales=scales)
    expected = expected if act is None else silu_mul_ref(expected, act)
    more = {"act": act} if act else {}
    y = multiply(x, weight.contiguous(), tile, bias=bias, scales=scales, **more)
    tolerance = 1e-3 if DEVICE == "cuda" else 1e-5  # products of FP8 numbers are exact, sums nearly
    torch.testing.assert_close(y, expected, atol=tolerance * expected.std().item(), rtol=tolerance)


@pytest.mark.parametrize("tile", [SplitK(32, 64, 4, 4, 3), SplitK(32, 128, 1, 4, 3)], ids=str)
def test_rows_with_scales_of_groups_have_the_same_bits_in_any_company(tile: SplitK) -> None:
    x, weight, _ = operands(16, 70, 520, torch.float32)
    (x, x_scale), (weight, weight_scale) = rounded_bytes_ref(x, 128), rounded_bytes_ref(weight, 128)
    scales, few = (Scales(weight_scale, scale, 128) for scale in (x_scale, x_scale[5:9]))
    together = multiply(x.contiguous(), weight.contiguous(), tile, scales=scales)
    assert torch.equal(multiply(x[5:9], weight.contiguous(), tile, scales=few), together[5:9])


def test_a_layers_products_take_the_kernel_of_their_rows_or_none() -> None:
    x, weight, bias = operands(16, 70, 520, torch.float32)
    products = OwnProducts(weight, {1: MANY[0], 4: MANY[1], 8: None, 12: MANY[2]})
    for num_rows in (0, 5, 8, 13, 16):
        assert products(x[:num_rows], weight, bias=bias) is None
    for num_rows, tile in ((1, MANY[0]), (2, MANY[1]), (4, MANY[1]), (9, MANY[2])):
        expected = multiply(x[:num_rows], weight, tile, bias=bias)
        assert torch.equal(products(x[:num_rows], weight, bias=bias), expected)


def test_too_many_rows_for_a_kernel_are_refused() -> None:
    x, weight, _ = operands(5, 8, 64, torch.float32)
    with pytest.raises(AssertionError, match="5 rows"):
        multiply(x, weight, GEMV)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (6144, 4096)])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 64, 256])
def test_large_shapes_match_and_replay_in_a_graph(shape: tuple[int, int], num_rows: int) -> None:
    x, weight, _ = operands(num_rows, *shape, torch.bfloat16)
    tiles: list[Tile] = [SplitK(64, 64, 2, 4, 3)]
    if num_rows <= 64:
        tiles += [SplitK(32, 256, 4, 4, 3), SplitK(64, 64, 8, 4, 4)]
    if num_rows <= 4:
        tiles += [Gemv(4, 1024, 4), Gemv(8, 2048, 4), Gemv(2, 2048, 8)]
    for tile in tiles:
        out = torch.empty(num_rows, shape[0], dtype=torch.bfloat16, device="cuda")
        arrivals = torch.zeros(shape[0], dtype=torch.int32, device="cuda")
        small_matmul(x, weight, out, tile, arrivals=arrivals)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                small_matmul(x, weight, out, tile, arrivals=arrivals)
        for scale in (1, 2):
            x.mul_(scale)
            out.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(out.float(), small_matmul_ref(x, weight), atol=2e-2, rtol=1e-2)
        x.mul_(0.5)
        assert not arrivals.any()
