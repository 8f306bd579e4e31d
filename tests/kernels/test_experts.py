"""Routing, sorting, grouped products: each against its reference, in the shapes that go wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.experts.experts import (
    FEW_TOKENS,
    TILES,
    ExpertWeights,
    Gating,
    More,
    Pairs,
    added_up,
    mix_experts,
    mix_experts_ref,
    rows_for,
)
from pellucid.kernels.experts.routing import (
    Chosen,
    Parts,
    Routing,
    Share,
    Uniform,
    logit_parts,
    most_tiles,
    route,
    route_ref,
    sort_pairs,
    sort_pairs_ref,
)
from pellucid.kernels.pointwise.rms_norm import add_rms_norm
from pellucid.layers.addend import Addend
from pellucid.layers.leaf import FUSED
from pellucid.layers.norm import add_norm
from tests.diagonal import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SILU = Gating("silu")


def logits_of(num_tokens: int, num_experts: int) -> Tensor:
    torch.manual_seed(num_tokens + num_experts)
    return torch.randn(num_tokens, num_experts, device=DEVICE)


def assert_chosen_alike(actual: Chosen, expected: Chosen) -> None:
    assert actual.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(actual.weights.cpu(), expected.weights.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 8, 160), (9, 70, 640), (40, 3, 200)], ids=str)
@pytest.mark.parametrize("is_wide", [False, True], ids=["float16", "float32"])
def test_logits_in_parts_are_those_of_the_library(shape: tuple[int, int, int], is_wide: bool) -> None:
    num_tokens, num_experts, dim = shape
    torch.manual_seed(0)
    x = torch.randn(num_tokens, dim, device=DEVICE).half()
    weight, added = torch.randn(num_experts, dim, device=DEVICE), torch.randn(num_experts, device=DEVICE)
    weight, added = (weight, added) if is_wide else (weight.half(), added.half())
    parts = logit_parts(x, weight, added)
    assert parts is not None and parts.dtype == weight.dtype
    expected = x.float() @ weight.float().T + added.float()
    torch.testing.assert_close(parts.sums.sum(0) + added, expected, rtol=1e-4, atol=1e-4)
    routing, share = Routing(num_experts, 2), Share(0, num_experts)
    assert_chosen_alike(route(parts, routing, share), route_ref(parts, routing, share))
    assert_chosen_alike(route(parts, routing, share), route_ref(parts.total(), routing, share))


def test_sums_of_parts_are_rounded_behind_the_bias() -> None:
    sums = torch.full((2, 1, 2), 0.5, device=DEVICE)
    added = torch.tensor([0.0, 2.0**-9], device=DEVICE).bfloat16()
    for dtype, best in ((torch.float32, 1), (torch.bfloat16, 0)):  # there the two are equal
        parts = Parts(sums, added, dtype)
        assert route(parts, Routing(2, 1), Share(0, 2)).ids.tolist() == [[best]]
        assert route_ref(parts, Routing(2, 1), Share(0, 2)).ids.tolist() == [[best]]


ROUTINGS = {
    "softmax": Routing(8, 2, renormalise=False),
    "softmax of the best": Routing(8, 2),
    "an odd number": Routing(7, 3, scale=2.5),
    "all": Routing(4, 4),
    "sigmoid": Routing(8, 3, "sigmoid", floor=1e-20, scale=2.5),
    "groups by the best": Routing(12, 3, groups=4, top_groups=2, renormalise=False, scale=16.0),
    "groups by the two best": Routing(16, 4, "sigmoid", groups=4, top_groups=2, group_score="top2"),
    "groups of one": Routing(4, 2, "sigmoid", groups=4, top_groups=3, group_score="top2"),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_every_router_chooses_as_its_reference_does(name: str, biased: bool) -> None:
    routing = ROUTINGS[name]
    logits = logits_of(9, routing.num_experts)
    bias = torch.rand(routing.num_experts, device=DEVICE) if biased else None
    share = Share(0, routing.num_experts)
    assert_chosen_alike(
        route(logits, routing, share, bias=bias), route_ref(logits, routing, share, bias=bias)
    )


def test_what_is_padding_or_on_another_rank_goes_to_nobody() -> None:
    routing, share = Routing(6, 3), Share(2, 3)
    end = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    chosen = route(logits_of(6, 6), routing, share, end=end)
    assert_chosen_alike(chosen, route_ref(logits_of(6, 6), routing, share, end=end))
    assert (chosen.ids[4:] == share.num).all() and (chosen.ids[:4] != share.num).any()


def test_equal_scores_go_to_the_lower_number() -> None:
    logits = torch.zeros(2, 5, device=DEVICE)
    assert route(logits, Routing(5, 3), Share(0, 5)).ids.tolist() == [[0, 1, 2]] * 2
    assert route_ref(logits, Routing(5, 3), Share(0, 5)).ids.tolist() == [[0, 1, 2]] * 2


def test_dummy_routing_is_uniform_and_a_function_of_token_and_place() -> None:
    routing, share, num_tokens = Routing(8, 2), Share(0, 8), 96
    token_ids = torch.randint(100, (num_tokens,), dtype=torch.int32, device=DEVICE)
    uniform = Uniform(token_ids, torch.arange(num_tokens, device=DEVICE), salt=3)
    logits = torch.zeros(num_tokens, 8, device=DEVICE)
    chosen = route(logits, routing, share, uniform=uniform)
    assert_chosen_alike(chosen, route_ref(logits, routing, share, uniform=uniform))
    counts = chosen.ids.flatten().bincount(minlength=8)
    assert counts.min() > 8 and counts.max() < 48


PLACES = {
    "random": lambda: torch.randint(6, (20, 3)),
    "one expert": lambda: torch.full((17, 1), 2),
    "nobody": lambda: torch.full((5, 2), 5),
    "one pair": lambda: torch.tensor([[3]]),
    "the last one": lambda: torch.full((33, 1), 4),
    "full tiles": lambda: torch.arange(5).repeat(16)[:, None],
}


@pytest.mark.parametrize("name", PLACES)
def test_pairs_are_sorted_stably_and_cut_into_tiles(name: str) -> None:
    torch.manual_seed(0)
    ids = PLACES[name]().clamp(max=5).int().to(DEVICE)
    chosen = Chosen(ids, torch.ones(ids.shape, device=DEVICE))
    actual, expected = sort_pairs(chosen, 5, 16, has_places=True), sort_pairs_ref(chosen, 5, 16)
    num_known = int(expected.starts[-1])
    is_known = ids.flatten() < 5
    assert actual.places is not None and expected.places is not None
    assert actual.places[is_known].tolist() == expected.places[is_known].tolist()
    assert actual.starts.tolist() == expected.starts.tolist()
    assert actual.order[:num_known].tolist() == expected.order[:num_known].tolist()
    assert_tiles_alike(actual.tiles, expected.tiles, 5)


def assert_tiles_alike(actual: Tensor, expected: Tensor, nobody: int) -> None:
    """Where nobody's tiles begin does not count."""
    assert actual[:, 0].tolist() == expected[:, 0].tolist()
    known = expected[:, 0] < nobody
    assert actual[:, 1].cpu()[known].tolist() == expected[:, 1][known].tolist()


def test_more_pairs_than_a_program_counts_at_a_time() -> None:
    torch.manual_seed(0)
    ids = torch.randint(4, (3000, 3), dtype=torch.int32, device=DEVICE)
    chosen = Chosen(ids, torch.ones(ids.shape, device=DEVICE))
    actual, expected = sort_pairs(chosen, 3, 16), sort_pairs_ref(chosen, 3, 16)
    assert actual.order[: expected.starts[-1]].tolist() == expected.order[: expected.starts[-1]].tolist()
    assert_tiles_alike(actual.tiles, expected.tiles, 3)


def test_there_are_tiles_enough_for_whatever_comes() -> None:
    assert most_tiles(40, 5, 16) >= 2 + 5 - 1
    assert most_tiles(3, 128, 16) >= 3


def make_experts(num: int, dim: int, hidden: int, *, biased: bool = False) -> ExpertWeights:
    torch.manual_seed(num + dim + hidden)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5

    biases = (random(num, 2 * hidden), random(num, dim)) if biased else (None, None)
    return ExpertWeights(random(num, 2 * hidden, dim), random(num, dim, hidden), *biases)


def choose(num_tokens: int, num_experts: int, top_k: int) -> Chosen:
    """Distinct experts, or nobody."""
    ids = torch.stack([torch.randperm(num_experts + 1)[:top_k] for _ in range(num_tokens)])
    return Chosen(ids.int().to(DEVICE), torch.rand(num_tokens, top_k, device=DEVICE))


def assert_mixed_alike(
    x: Tensor, chosen: Chosen, experts: ExpertWeights, gating: Gating, **options: object
) -> None:
    actual = added_up(mix_experts(x, chosen, experts, gating, **options))  # pyright: ignore[reportArgumentType]
    expected = mix_experts_ref(x, chosen, experts, gating, **options)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)


GATINGS = [(SILU, False), (SILU, True), (Gating("gelu_tanh"), False), (Gating("silu", 0.5, 1.702), True)]


@diagonal({"num_tokens": [1, FEW_TOKENS, FEW_TOKENS + 1, 40], "gating,biased": GATINGS})
def test_few_tokens_and_many_are_mixed_as_the_reference_does(
    num_tokens: int, gating: Gating, biased: bool
) -> None:
    experts = make_experts(5, 48, 40, biased=biased)
    x = torch.randn(num_tokens, 48, device=DEVICE)
    assert_mixed_alike(x, choose(num_tokens, 5, 3), experts, gating)


@pytest.mark.parametrize("rows", TILES)
def test_every_tile(rows: int) -> None:
    num_tokens = {16: 16, 32: 30, 64: 60, 128: 130}[rows]
    assert rows_for(num_tokens * 2, 4) == rows
    experts = make_experts(4, 144, 80)
    assert_mixed_alike(torch.randn(num_tokens, 144, device=DEVICE), choose(num_tokens, 4, 2), experts, SILU)


@pytest.mark.parametrize("num_tokens", [3, 21])
def test_all_tokens_on_one_expert_or_nobody(num_tokens: int) -> None:
    experts, x = make_experts(3, 32, 16), torch.randn(num_tokens, 32, device=DEVICE)
    weights = torch.rand(num_tokens, 1, device=DEVICE)
    for expert in (0, 2, 3):
        ids = torch.full((num_tokens, 1), expert, dtype=torch.int32, device=DEVICE)
        assert_mixed_alike(x, Chosen(ids, weights), experts, SILU)


@pytest.mark.parametrize("num_tokens", [2, 19])
@pytest.mark.parametrize("gated", [False, True], ids=["as it is", "gated"])
def test_more_is_added_and_inputs_may_be_weighed(num_tokens: int, gated: bool) -> None:
    experts, x = make_experts(3, 32, 16), torch.randn(num_tokens, 32, device=DEVICE)
    more = More(torch.randn_like(x), torch.randn(num_tokens, 1, device=DEVICE) if gated else None)
    chosen = choose(num_tokens, 3, 2)
    assert_mixed_alike(x, chosen, experts, SILU, more=more)
    assert_mixed_alike(x, chosen, experts, SILU, more=more, weighs_input=True)


@pytest.mark.parametrize("num_tokens", [3, 9])
def test_experts_that_nobody_goes_to_are_not_read(num_tokens: int) -> None:
    experts, x = make_experts(4, 32, 16), torch.randn(num_tokens, 32, device=DEVICE)
    experts.gate_up[1::2] = float("nan")
    experts.down[1::2] = float("nan")
    ids = (2 * torch.randint(2, (num_tokens, 1))).int().to(DEVICE)
    ids[0] = 4
    chosen = Chosen(ids, torch.rand(num_tokens, 1, device=DEVICE))
    assert added_up(mix_experts(x, chosen, experts, SILU)).isfinite().all()
    assert mix_experts_ref(x, chosen, experts, SILU).isfinite().all()


def test_no_tokens_give_none() -> None:
    experts = make_experts(3, 32, 16)
    chosen = route(torch.empty(0, 3, device=DEVICE), Routing(3, 2), Share(0, 3))
    assert added_up(mix_experts(torch.empty(0, 32, device=DEVICE), chosen, experts, SILU)).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("has_more", [False, True], ids=["alone", "with a shared one"])
def test_a_norm_that_adds_pairs_up_gives_the_same_bits_as_both_apart(
    dtype: torch.dtype, has_more: bool
) -> None:
    torch.manual_seed(0)
    num_tokens, top_k, num_experts, dim = 3, 2, 4, 72
    ids = torch.randint(num_experts + 1, (num_tokens, top_k), dtype=torch.int32, device=DEVICE)
    rows, values, stream = (
        torch.randn(n, dim, device=DEVICE).to(dtype) for n in (num_tokens * top_k, num_tokens, num_tokens)
    )
    more = More(values, torch.randn(num_tokens, 1, device=DEVICE).to(dtype)) if has_more else None
    chosen = Chosen(ids, torch.rand(num_tokens, top_k, device=DEVICE))
    pairs = Pairs(rows, chosen, num_experts, weighs_input=False, more=more)
    kept = stream.clone()
    for weight in (torch.randn(dim, device=DEVICE), None):  # None: the sum alone is handed out
        normalized, added = add_norm(Addend(pairs), stream, weight, 1e-5, FUSED)
        expected, sums = add_rms_norm(pairs.sum(), kept, weight, 1e-5)
        assert torch.equal(normalized, expected) and torch.equal(added, sums) and added is stream
