"""Products of 2 to 512 rows: against float64, whatever the tile; bits that know nothing of their company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.kernels.products.hopper_matmul import hopper_matmul, hopper_multiplies, num_arrivals
from pellucid.kernels.products.own_products import OwnProducts
from pellucid.kernels.products.round_rows import Rounded, rounded_bytes
from pellucid.kernels.products.small_matmul import Scales, small_matmul_ref
from pellucid.kernels.products.tiles import Wgmma

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
TILES = [
    Wgmma(64, 16, 1, 20),
    Wgmma(64, 16, 2, 8),
    Wgmma(192, 16, 1, 6),
    Wgmma(64, 32, 4, 8),
    Wgmma(128, 32, 4, 11),
    Wgmma(64, 64, 1, 8),
    Wgmma(64, 64, 2, 8),
    Wgmma(64, 64, 4, 8),
    Wgmma(64, 64, 8, 8),
    Wgmma(64, 128, 4, 8),
    Wgmma(128, 128, 2, 6),
    Wgmma(192, 64, 1, 6),
    Wgmma(192, 128, 1, 4),
    Wgmma(128, 256, 4, 4),
    Wgmma(192, 256, 1, 4),
    Wgmma(192, 256, 4, 4),
]
# Outputs that no tile divides, inputs that no step divides, fewer steps than stages.
SHAPES = [(464, 1096), (384, 512), (1024, 2048)]


def operands(num_rows: int, num_out: int, num_in: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias, such that results are about 1."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
    bias = torch.randn(num_out, generator=generator)
    return tuple(each.to(device, torch.bfloat16) for each in (x, weight, bias))


def multiply(x: Tensor, weight: Tensor, tile: Wgmma, **more: Tensor | str) -> Tensor:
    """One product into garbage, whose counters must come back as zeros."""
    width = len(weight) // 2 if "act" in more else len(weight)
    out = torch.full((len(x), width), torch.nan, dtype=x.dtype, device=x.device)
    arrivals = torch.zeros(num_arrivals(len(weight), len(x), tile), dtype=torch.int32, device=x.device)
    hopper_matmul(x, weight, out, tile, arrivals=arrivals, **more)
    assert not arrivals.any()
    return out


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("act", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_match(tile: Wgmma, shape: tuple[int, int], act: str | None, has_bias: bool) -> None:
    for num_rows in (1, tile.rows - 11, tile.rows, tile.rows + 5):
        x, weight, bias = operands(num_rows, *shape)
        if not hopper_multiplies(x, weight, tile, act):  # too many programs for one wave
            continue
        more = ({"bias": bias} if has_bias else {}) | ({"act": act} if act else {})
        expected = small_matmul_ref(x, weight, **more)
        torch.testing.assert_close(multiply(x, weight, tile, **more).float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(tile: Wgmma) -> None:
    x, weight, _ = operands(tile.rows + 9, 464, 1096)
    together = multiply(x, weight, tile)
    x[1] = 6e4  # whatever a neighbour holds
    assert torch.equal(multiply(x, weight, tile)[2:], together[2:])
    assert torch.equal(multiply(x[2:40], weight, tile), together[2:40])


@pytest.mark.gpu
@HOPPER
def test_rows_may_be_a_slice_of_wider_ones() -> None:
    x, weight, _ = operands(80, 384, 1024)
    narrow = weight[:, :512].contiguous()
    for tile in TILES:
        expected = multiply(x[:, :512].contiguous(), narrow, tile)
        assert torch.equal(multiply(x[:, :512], narrow, tile), expected)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products_replay_in_a_graph(tile: Wgmma) -> None:
    x, weight, _ = operands(tile.rows, 1024, 1024)
    products = OwnProducts(weight, {tile.rows: tile})
    assert products(x, weight) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(4):
            y = products(y, weight)
    for _ in range(3):
        graph.replay()
        expected = x
        for _ in range(4):
            expected = multiply(expected, weight, tile)
        assert torch.equal(y, expected)
        x.copy_(torch.randn_like(x))


GROUPED = [
    Wgmma(64, 16, 1, 20),
    Wgmma(64, 32, 4, 8),
    Wgmma(128, 64, 1, 8),
    Wgmma(192, 64, 2, 6),
    Wgmma(64, 128, 2, 8),
]


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", GROUPED, ids=str)
@pytest.mark.parametrize("shape", [(464, 1104), (1024, 2048)], ids=str)
@pytest.mark.parametrize("group", [None, 128, 256])
def test_fp8_is_multiplied_with_its_scales_whatever_the_company(
    tile: Wgmma, shape: tuple[int, int], group: int | None
) -> None:
    x, weight, bias = operands(tile.rows + 5, *shape)
    x *= torch.logspace(-1, 1, shape[1], device="cuda")
    x, weight = (Rounded(*rounded_bytes(each, group or shape[1]), each.dtype) for each in (x, weight))
    for act in (None, "silu"):
        results = []
        for part in (slice(None), slice(3, 9)):
            scales = Scales(weight.scales.contiguous(), x.scales[part], group)
            width = shape[0] // 2 if act else shape[0]
            out = torch.full((len(x.values[part]), width), torch.nan, dtype=torch.bfloat16, device="cuda")
            zeros = torch.zeros(num_arrivals(shape[0], len(out), tile), dtype=torch.int32, device="cuda")
            more = {"bias": bias, "scales": scales, "act": act, "arrivals": zeros}
            results.append(hopper_matmul(x.values[part], weight.values, out, tile, **more))
            assert not zeros.any()
        scales = Scales(weight.scales, x.scales, group)
        expected = small_matmul_ref(x.values, weight.values, bias=bias, scales=scales)
        expected = silu_mul_ref(expected, act) if act else expected
        size = expected.std().item()
        torch.testing.assert_close(results[0].float(), expected, atol=2e-2 * size, rtol=2e-2)
        assert torch.equal(results[1], results[0][3:9])


def test_elsewhere_the_library_multiplies() -> None:
    x, weight, _ = operands(80, 384, 512, device="cpu")
    for tile in TILES:
        assert not hopper_multiplies(x, weight, tile, None)
        assert OwnProducts(weight, {128: tile})(x, weight) is None
