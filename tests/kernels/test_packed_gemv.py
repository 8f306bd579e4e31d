"""Packed matrices with few rows on a Hopper GPU, and on a CPU that plays one, against plain arithmetic."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.attention.hopper_prefill import is_hopper
from pellucid.kernels.packed import packed_gemv as real
from pellucid.kernels.packed.packed_gemv import GemvTile
from pellucid.kernels.packed.packed_matmul import packed_matmul_ref
from pellucid.kernels.packed.packed_weight import Numbers, packed
from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from tests.diagonal import diagonal
from tests.kernels.emulator import emulated
from tests.kernels.test_packed_matmul import KINDS, TOLERANCE, Kind, codes, rows, weight_of

HAS_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
TABLE = next(kind for kind in KINDS if kind[0] is Numbers.TABLE)
TILES = [GemvTile(4, 8), GemvTile(8, 2), GemvTile(4, 4), GemvTile(2, 16)]


def multiply(
    module: ModuleType, kind: Kind, dtype: torch.dtype, tile: GemvTile, shape: tuple[int, int]
) -> None:
    """Multiply with a kernel, and compare."""
    num_out, num_in = shape
    weight = weight_of(kind, num_out, num_in, dtype)
    x, bias = rows(1, num_in, dtype), rows(1, num_out, dtype)[0]
    y = module.packed_gemv(x, weight, tile, bias=bias)
    expected = packed_matmul_ref(x, weight, bias=bias)
    torch.testing.assert_close(y.float(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


def gated(module: ModuleType, tile: GemvTile, act: str) -> None:
    parts = [replace(codes(KINDS[1], 96, 560), q=codes(KINDS[0], 96, 560 + i).q[:, :560]) for i in range(2)]
    weight = packed(parts, torch.bfloat16, gated=True)
    x, bias = rows(1, 560, torch.bfloat16), rows(1, 192, torch.bfloat16)[0]
    y = module.packed_gemv(x, weight, tile, bias=bias, act=act)
    expected = silu_mul_ref(packed_matmul_ref(x, weight, bias=bias), act)
    torch.testing.assert_close(y.float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "tile"),
    [*((kind, TILES[0]) for kind in KINDS), *((KINDS[0], tile) for tile in TILES[1:]), (TABLE, TILES[1])],
    ids=str,
)
def test_products_match(kind: Kind, dtype: torch.dtype, tile: GemvTile) -> None:
    for shape in ((200, 1096), (640, 2048)):
        multiply(real, kind, dtype, tile, shape)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gated_products_match(tile: GemvTile, act: str) -> None:
    gated(real, tile, act)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@diagonal({"kind": KINDS, "dtype": [torch.bfloat16, torch.float16]})
def test_codes_of_all_kinds_match_where_hopper_is_played(kind: Kind, dtype: torch.dtype) -> None:
    tile = GemvTile(8 if dtype == torch.float16 and kind == TABLE else 4, 2)
    multiply(emulated("packed.packed_gemv"), kind, dtype, tile, (72, 560))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [(40, 1096), (64, 2048)], ids=str)
def test_tiles_of_all_forms_match_where_hopper_is_played(tile: GemvTile, shape: tuple[int, int]) -> None:
    multiply(emulated("packed.packed_gemv"), KINDS[0], torch.bfloat16, tile, shape)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_gated_products_match_where_hopper_is_played(tile: GemvTile, act: str) -> None:
    gated(emulated("packed.packed_gemv"), tile, act)


FAULTS = {
    "the scales of another group": ("at = ptr + lane + chunk * CHUNK // GROUP * LANES", "at = ptr + lane"),
    "all warps multiply the same": ("chunk = step * WARPS + warp", "chunk = step * WARPS + warp * 0"),
    "x does not end": ("mask=k < K // 2, other=0", "mask=k < K // 2, other=0x3F803F80"),
    "another part's scales": ("(block * NUM_GROUPS * LANES + part * 8)", "block * NUM_GROUPS * LANES"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_faults_would_be_noticed(fault: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        multiply(emulated("packed.packed_gemv", fault), KINDS[0], torch.bfloat16, GemvTile(4, 4), (40, 1096))
