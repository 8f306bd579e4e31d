"""Packed matrices on a Hopper GPU, and on a CPU that plays one, against plain arithmetic."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.attention.hopper_prefill import is_hopper
from pellucid.kernels.packed.packed_hopper import packed_hopper, tile_for
from pellucid.kernels.packed.packed_matmul import packed_matmul_ref
from pellucid.kernels.packed.packed_products import PackedProducts
from pellucid.kernels.packed.packed_weight import packed
from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.kernels.products.hopper_matmul import num_arrivals
from pellucid.kernels.products.tiles import Wgmma
from tests.diagonal import diagonal
from tests.kernels.emulator import emulated
from tests.kernels.test_packed_matmul import KINDS, TOLERANCE, Kind, codes, rows, weight_of

HAS_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
ALL = KINDS
TILES = [
    Wgmma(64, 16, 1, 4),
    Wgmma(128, 16, 2, 4),
    Wgmma(192, 32, 4, 4),
    Wgmma(128, 64, 2, 6),
    Wgmma(192, 128, 1, 4),
]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "tile"),
    [*((kind, TILES[1]) for kind in ALL), *((ALL[0], tile) for tile in TILES)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 200, 1096), (17, 640, 2048), (150, 320, 1088)], ids=str)
def test_products_match(kind: Kind, dtype: torch.dtype, tile: Wgmma, shape: tuple[int, int, int]) -> None:
    num_rows, num_out, num_in = shape
    weight = weight_of(kind, num_out, num_in, dtype)
    x, bias = rows(num_rows, num_in, dtype), rows(1, num_out, dtype)[0]
    arrivals = torch.zeros(num_arrivals(num_out, num_rows, tile), dtype=torch.int32, device="cuda")
    y = packed_hopper(x, weight, tile, bias=bias, arrivals=arrivals)
    assert not arrivals.any()
    expected = packed_matmul_ref(x, weight, bias=bias)
    torch.testing.assert_close(y.float(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    assert torch.equal(packed_hopper(x, weight, tile, bias=bias, arrivals=arrivals), y)


def multiply(
    module: ModuleType, kind: Kind, dtype: torch.dtype, tile: Wgmma, shape: tuple[int, int, int]
) -> None:
    """Multiply with an emulated kernel, and compare."""
    num_rows, num_out, num_in = shape
    weight = weight_of(kind, num_out, num_in, dtype)
    x, bias = rows(num_rows, num_in, dtype), rows(1, num_out, dtype)[0]
    arrivals = torch.zeros(num_arrivals(num_out, num_rows, tile), dtype=torch.int32)
    y = module.packed_hopper(x, weight, tile, bias=bias, arrivals=arrivals)
    assert not arrivals.any()
    expected = packed_matmul_ref(x, weight, bias=bias)
    torch.testing.assert_close(y.float(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@diagonal({"kind": ALL, "dtype": [torch.bfloat16, torch.float16]})
def test_codes_of_all_kinds_match_where_hopper_is_played(kind: Kind, dtype: torch.dtype) -> None:
    multiply(emulated("packed.packed_hopper"), kind, dtype, Wgmma(128, 16, 2, 2), (5, 200, 560))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("tile", [Wgmma(64, 16, 1, 3), Wgmma(192, 32, 4, 2), Wgmma(128, 64, 1, 2)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_tiles_of_all_forms_match_where_hopper_is_played(tile: Wgmma, seed: int) -> None:
    multiply(emulated("packed.packed_hopper", seed=seed), KINDS[0], torch.bfloat16, tile, (40, 136, 1096))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tile", [Wgmma(64, 16, 1, 3), Wgmma(192, 32, 4, 2)], ids=str)
def test_gated_products_match_where_hopper_is_played(tile: Wgmma, act: str) -> None:
    parts = [
        replace(codes(KINDS[1], 96, 560), q=torch.randint(16, (96, 560)).to(torch.uint8)) for _ in range(2)
    ]
    weight = packed(parts, torch.bfloat16, gated=True)
    x, bias = rows(5, 560, torch.bfloat16), rows(1, 192, torch.bfloat16)[0]
    arrivals = torch.zeros(num_arrivals(192, 5, tile), dtype=torch.int32)
    y = emulated("packed.packed_hopper").packed_hopper(x, weight, tile, bias=bias, act=act, arrivals=arrivals)
    expected = silu_mul_ref(packed_matmul_ref(x, weight, bias=bias), act)
    torch.testing.assert_close(y.float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_rows", [1, 20, 130, 300])
def test_layers_of_gates_match_gated_and_not(num_rows: int) -> None:
    weight = packed([codes(KINDS[1], 320, 1088)] * 2, torch.bfloat16, gated=True)
    x, bias = rows(num_rows, 1088, torch.bfloat16), rows(1, 640, torch.bfloat16)[0]
    expected, product = packed_matmul_ref(x, weight, bias=bias), PackedProducts(weight)
    torch.testing.assert_close(product(x, bias).float(), expected, atol=2e-2, rtol=2e-2)
    gated = product.gated(x, "silu", bias)
    assert (gated is None) == (num_rows > 256)
    if gated is not None:
        torch.testing.assert_close(gated.float(), silu_mul_ref(expected, "silu"), atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_layers_of_prompts_are_gated_in_their_product() -> None:
    weight = packed([codes(KINDS[1], 3072, 1088)] * 2, torch.bfloat16, gated=True)
    x = rows(2100, 1088, torch.bfloat16)
    gated = PackedProducts(weight).gated(x, "silu")
    assert gated is not None
    expected = silu_mul_ref(packed_matmul_ref(x, weight), "silu")
    torch.testing.assert_close(gated.float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "shape", [(64, 64), (96, 256), (6144, 4096), (4096, 12288), (24576, 4096), (152064, 4096)]
)
def test_every_shape_has_a_tile_that_fits(shape: tuple[int, int], bits: int) -> None:
    for num_rows in (1, 16, 32, 64, 128, 256):
        tile = tile_for(num_rows, *shape, 132, bits)
        programs = -(-num_rows // tile.rows) * -(-shape[0] // tile.block_n) * tile.splits
        assert tile.splits == 1 or programs <= 132
        stage = tile.block_n * 16 * bits + 2 * tile.rows * 128
        assert tile.stages * stage <= 220 << 10, "shared memory"
        assert tile.stages * 1024 * bits % (tile.rows // tile.splits * 128) == 0, "room for results"


FAULTS = {
    "numbers of codes before they have come": (
        "mbarrier.wait(bars.index(next_stage), (step + 1) // STAGES & 1, pred=step + 1 < num_steps)",
        "",
    ),
    "copies do not wait for room": (
        "mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1)",
        "",
    ),
    "the scales of another group": (
        "load_all(tables, at, first + step + 2,",
        "load_all(tables, at, 0,",
    ),
    "programs are given the same range": ("first = total * split // SPLITS", "first = total * 0"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_faults_would_be_noticed(fault: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(3):
            module = emulated("packed.packed_hopper", fault, seed=seed)
            multiply(module, KINDS[0], torch.bfloat16, Wgmma(64, 16, 2, 2), (5, 64, 1096))
