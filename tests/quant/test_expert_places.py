"""However a checkpoint holds its experts, every rank has the same slices of them in the same places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.kernels.packed.packed_weight import GroupCodes
from pellucid.quant.base import WHOLE, Coords
from pellucid.quant.codes import U4, Codes, Group, Scales
from pellucid.quant.expert_places import AddedOnce, AllInOne, OneByOne
from pellucid.quant.experts import CodesOfExperts

E, HIDDEN, DIM = 3, 4, 5


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


GATE, UP, DOWN = random(E, HIDDEN, DIM), random(E, HIDDEN, DIM) + 1, random(E, DIM, HIDDEN)
FORMS = {
    "one by one": (OneByOne(2, "out"), [m[e] for e in range(E) for m in (GATE, UP)]),
    "merged": (
        AllInOne(num_merged=2, split="out", first=0, num_experts=E),
        [torch.cat([GATE, UP], 1)],
    ),
    "by turns, inputs first": (
        AllInOne(num_merged=2, split="out", first=0, num_experts=E, by_turns=True, transposed=True),
        [torch.stack([GATE, UP], 2).flatten(1, 2).transpose(1, 2)],
    ),
    "a tensor a matrix": (
        AllInOne(num_merged=2, num_tensors=2, split="out", first=0, num_experts=E),
        [GATE, UP],
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coords", [WHOLE, Coords(0, 2), Coords(1, 2)], ids=["all", "first", "second"])
def test_gate_and_up_lie_by_turns(form: str, coords: Coords) -> None:
    place, tensors = FORMS[form]
    local = HIDDEN // coords.size
    mine = slice(coords.rank * local, (coords.rank + 1) * local)
    param = torch.zeros(E, 2 * local, DIM)
    for part, tensor in enumerate(tensors):
        assert place.whole(tuple(param.shape), part, coords) == tuple(tensor.shape)
        place(param, part, tensor, coords)
    assert torch.equal(param[:, 0::2], GATE[:, mine]) and torch.equal(param[:, 1::2], UP[:, mine])


@pytest.mark.parametrize("transposed", [False, True])
def test_down_is_cut_along_its_inputs(transposed: bool) -> None:
    place = AllInOne(num_merged=1, split="in", first=0, num_experts=E, transposed=transposed)
    param = torch.zeros(E, DIM, 2)
    place(param, 0, DOWN.transpose(1, 2) if transposed else DOWN, Coords(1, 2))
    assert torch.equal(param, DOWN[:, :, 2:])
    each = OneByOne(1, "in")
    for expert in range(E):
        each(param, expert, DOWN[expert], Coords(0, 2))
    assert torch.equal(param, DOWN[:, :, :2])


def test_a_rank_may_have_some_experts_whole() -> None:
    place = AllInOne(num_merged=2, split="out", first=1, num_experts=E)
    param = torch.zeros(2, 2 * HIDDEN, DIM)
    place(param, 0, torch.cat([GATE, UP], 1), WHOLE)
    assert torch.equal(param[:, 0::2], GATE[1:]) and torch.equal(param[:, 1::2], UP[1:])


FORMS_OF_CODES: dict[str, tuple[OneByOne | AllInOne, list[Tensor]]] = {
    "one by one": FORMS["one by one"],
    "merged": FORMS["merged"],
    "by turns": (
        AllInOne(num_merged=2, split="out", first=0, num_experts=E, by_turns=True),
        [torch.stack([GATE, UP], 2).flatten(1, 2)],
    ),
    "a tensor a matrix": FORMS["a tensor a matrix"],
}


def codes_of(tensor: Tensor) -> Codes:
    """[N, K] or [E, N, K], whose numbers are whole anyway."""
    scale = torch.ones(*tensor.shape[:-1], 1)
    q = tensor.mul(4).round().add(8).clamp(0, 15).to(torch.uint8)
    zero = torch.full_like(scale, 8).to(torch.uint8)
    return Codes(q=q, code=U4, group=Group(1, 16), scale=Scales(scale), zero=Scales(zero))


@pytest.mark.parametrize("form", FORMS_OF_CODES)
@pytest.mark.parametrize("coords", [WHOLE, Coords(1, 2)], ids=["all", "second"])
def test_codes_are_kept_matrix_by_matrix(form: str, coords: Coords) -> None:
    inner, tensors = FORMS_OF_CODES[form]
    place, local = CodesOfExperts(inner), HIDDEN // coords.size
    param = torch.zeros(E, 2 * local, DIM, dtype=torch.uint8)
    for part, tensor in enumerate(tensors):
        place.keep(param, part, codes_of(tensor), coords)
    mine = slice(coords.rank * local, (coords.rank + 1) * local)
    for expert in range(E):
        for i, matrix in enumerate((GATE, UP)):
            kept = place.found[expert, i]
            assert isinstance(kept, GroupCodes)
            assert torch.equal(kept.dequantized(), codes_of(matrix[expert, mine]).dequantized())


def test_codes_of_some_experts_are_cut_along_their_inputs() -> None:
    weight = random(E, 6, 64)
    place = CodesOfExperts(AllInOne(num_merged=1, split="in", first=1, num_experts=E))
    place.keep(torch.zeros(2, 6, 32, dtype=torch.uint8), 0, codes_of(weight), Coords(1, 2))
    kept = place.found[1, 0]
    assert isinstance(kept, GroupCodes)
    assert torch.equal(kept.dequantized(), codes_of(weight).dequantized()[2, :, 32:])


def test_biases_of_slices_are_slices_and_of_sums_the_first_ranks() -> None:
    bias = random(E, 2 * HIDDEN)
    place = AllInOne(num_merged=2, split="out", first=0, num_experts=E, by_turns=True)
    param = torch.zeros(E, HIDDEN)
    place(param, 0, bias, Coords(1, 2))
    assert torch.equal(param, bias[:, HIDDEN:])
    for rank, every_rank, expected in ((0, False, bias), (1, False, bias * 0), (1, True, bias)):
        param = torch.full_like(bias, 7.0)
        AddedOnce(0, E, every_rank)(param, 0, bias, Coords(rank, 2))
        assert torch.equal(param, expected)


def test_biases_of_experts_by_themselves_go_where_those_of_all_do() -> None:
    gate, up, down = random(E, HIDDEN), random(E, HIDDEN) + 1, random(E, DIM)
    place, coords = OneByOne(2, "out"), Coords(1, 2)
    param = torch.zeros(E, HIDDEN)
    for part, bias in enumerate(bias for both in zip(gate, up, strict=True) for bias in both):
        assert place.whole(tuple(param.shape), part, coords) == (HIDDEN,)
        place(param, part, bias, coords)
    assert torch.equal(param[:, ::2], gate[:, 2:]) and torch.equal(param[:, 1::2], up[:, 2:])
    for rank, every_rank in ((0, False), (1, False), (1, True)):
        param = torch.full_like(down, 7.0)
        for expert in range(E):
            AddedOnce(0, None, every_rank)(param, expert, down[expert], Coords(rank, 2))
        assert torch.equal(param, down if every_rank or rank == 0 else down * 0)


def test_a_wrong_shape_is_told() -> None:
    place, _ = FORMS["merged"]
    with pytest.raises(ValueError, match=r"has shape \(3, 8, 6\), this model expects \(3, 8, 5\)"):
        place(torch.zeros(E, 2 * HIDDEN, DIM), 0, torch.zeros(E, 2 * HIDDEN, DIM + 1), WHOLE)
