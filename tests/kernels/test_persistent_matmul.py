"""Gated products of prompts: against float64, whatever the tile; bits that know nothing of their company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.kernels.products.own_products import OwnProducts
from pellucid.kernels.products.persistent_matmul import persistent_matmul
from pellucid.kernels.products.tiles import Persistent

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
TILES = [Persistent(128, 16), Persistent(192, 11), Persistent(192, 2)]
# Outputs that no tile divides, inputs that no step does, fewer steps than stages, more tiles than programs.
CASES = [(1000, 1328, 1096), (129, 464, 4096), (77, 512, 128), (5000, 2560, 512)]


def operands(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """x and weight, such that results are about 1."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
    return [each.to("cuda" if IS_HOPPER else "cpu", dtype) for each in (x, weight)]


def multiply(x: Tensor, weight: Tensor, tile: Persistent, act: str = "silu") -> Tensor:
    """One product into garbage."""
    out = torch.full((len(x), len(weight) // 2), torch.nan, dtype=x.dtype, device=x.device)
    return persistent_matmul(x, weight, out, tile, act=act)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("act,dtype", [("silu", torch.bfloat16), ("gelu_tanh", torch.float16)], ids=str)
def test_products_match(tile: Persistent, act: str, dtype: torch.dtype) -> None:
    for num_rows, num_out, num_in in CASES:
        x, weight = operands(num_rows, num_out, num_in, dtype)
        expected = silu_mul_ref((x.double() @ weight.double().T).to(dtype), act)
        torch.testing.assert_close(multiply(x, weight, tile, act), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gates_may_be_far_from_zero(tile: Persistent) -> None:
    x, weight = operands(300, 512, 256)
    weight[:256] *= 100
    expected = silu_mul_ref((x.double() @ weight.double().T).to(x.dtype))
    torch.testing.assert_close(multiply(x, weight, tile), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(tile: Persistent) -> None:
    x, weight = operands(3000, 1328, 1096)
    together = multiply(x, weight, tile)
    x[1] = 6e4  # whatever a neighbour holds
    assert torch.equal(multiply(x, weight, tile)[2:], together[2:])
    assert torch.equal(multiply(x[2:800], weight, tile), together[2:800])
    assert torch.equal(multiply(x, weight, TILES[0])[2:], together[2:])


@pytest.mark.gpu
@HOPPER
def test_products_replay_in_a_graph() -> None:
    x, weight = operands(700, 1024, 512)
    products = OwnProducts(weight, {512: None, 2048: TILES[1]})
    assert products(x, weight, act="silu") is not None
    assert products(x, weight) is products(x[:512], weight, act="silu") is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(4):
            y = products(y, weight, act="silu")
    for _ in range(3):
        graph.replay()
        expected = x
        for _ in range(4):
            expected = multiply(expected, weight, TILES[1])
        assert torch.equal(y, expected)
        x.copy_(torch.randn_like(x))


def test_without_a_gate_and_elsewhere_the_library_multiplies() -> None:
    x, weight = operands(600, 512, 256)
    for tile in TILES:
        assert OwnProducts(weight, {2048: tile})(x, weight) is None
        x, weight = x.cpu(), weight.cpu()
        assert OwnProducts(weight, {2048: tile})(x, weight, act="silu") is None
