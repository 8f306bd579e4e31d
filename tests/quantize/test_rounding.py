"""Codes that are nearest, in every format that is written: what is stored is what was meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.quant.codes import E2M1, E4M3, LUT4, S8, U2, U3, U4, WHOLE_MATRIX, Code, Group
from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import LayerFormat, MatrixShape
from pellucid.quant.rounding import NF4_NUMBERS, best_grid, grid_of, in_groups, rounded, squares
from tests.quant.formats import tensors

G32 = Group(1, 32)


def packed(code: Code, *options: str) -> LayerFormat:
    return LayerFormat(layout="ct-pack", code=code, group=G32, options=frozenset(options))


FORMATS = {  # and how far off numbers are, of their group's largest
    "int2": (packed(U2), 0.45),
    "int3": (packed(U3, "asym"), 0.2),
    "int4": (packed(U4), 0.1),
    "int4, zeros": (packed(U4, "asym"), 0.1),
    "int7": (packed(S8, "7_bits"), 0.01),
    "int8 groups": (packed(S8, "asym"), 0.005),
    "gptq": (LayerFormat(layout="gptq", code=U4, group=G32), 0.1),
    "gptq int8": (LayerFormat(layout="gptq", code=S8, group=G32), 0.005),
    "awq": (LayerFormat(layout="awq", code=U4, group=G32), 0.1),
    "int8 rows": (LayerFormat(layout="scaled", code=S8), 0.005),
    "fp8 rows": (LayerFormat(layout="scaled", code=E4M3), 0.04),
    "fp8 matrix": (LayerFormat(layout="scaled", code=E4M3, group=WHOLE_MATRIX), 0.04),
    "fp8 blocks": (LayerFormat(layout="fp8-blocks", code=E4M3, group=Group(16, 48)), 0.04),
    "nf4": (LayerFormat(layout="bnb4", code=LUT4, group=Group(1, 64), options=frozenset({"nf4"})), 0.16),
    "mxfp4": (LayerFormat(layout="mxfp4", code=E2M1, group=G32), 0.34),
    "nvfp4": (LayerFormat(layout="nvfp4", code=E2M1, group=Group(1, 16)), 0.2),
}


def matrix(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)) / 8


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_what_was_meant_and_near(name: str) -> None:
    format, bound = FORMATS[name]
    weight = matrix(40, 128)
    codes = rounded(weight, format)
    layout = layout_of(format)
    read = layout.decode(layout.encode(codes, format), format, MatrixShape(40, 128))  # type: ignore[attr-defined]
    assert torch.equal(read.q.view(torch.uint8), codes.q.view(torch.uint8))
    numbers = codes.dequantized()
    assert torch.equal(read.dequantized(), numbers)
    # Clipping gives up a group's largest: of those that are not, none is further off than half a step.
    largest = weight.abs().max()
    off = (numbers - weight).abs().flatten().sort().values
    assert off[int(0.95 * len(off))] <= bound * largest
    assert (numbers - weight).square().mean() < (bound * largest) ** 2


def test_the_table_of_nf4_is_the_tools() -> None:
    assert torch.equal(torch.tensor(NF4_NUMBERS), tensors()["bnb-nf4/weight.quant_map"])


@pytest.mark.parametrize("code", [U2, U3, U4])
def test_clips_are_searched_for_each_group(code: Code) -> None:
    groups, format = in_groups(matrix(16, 256), Group(1, 64)), packed(code)
    whole, best = grid_of(groups, format), best_grid(groups, format)
    lost, least = (squares(grid.numbers(grid.round(groups)) - groups) for grid in (whole, best))
    assert (least <= lost).all() and least.sum() < 0.95 * lost.sum()
    assert (best.scale <= whole.scale).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_numbers_that_scales_can_hardly_hold_stay_finite(name: str) -> None:
    format, _ = FORMATS[name]
    weight = torch.zeros(40, 128)
    weight[0] = 1e-9
    weight[1] = 1e4
    numbers = rounded(weight, format).dequantized()
    assert numbers.isfinite().all() and (numbers[2:].abs() < 1).all()
    assert abs(numbers[1, 0] / 1e4 - 1) < 0.34


def test_a_last_group_may_be_short() -> None:
    weight = matrix(8, 72)
    numbers = rounded(weight, packed(U4)).dequantized()
    assert torch.equal(numbers[:, :64], rounded(weight[:, :64], packed(U4)).dequantized())
    assert (numbers - weight).abs().max() < 0.1


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "nvfp4"])
def test_rows_of_parts_of_groups_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="40 inputs are not whole .* ignore these layers"):
        rounded(matrix(8, 40), FORMATS[name][0])
