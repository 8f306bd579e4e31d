"""Mixtures of packed experts: the kernels for any GPU and, where Hopper is played, Hopper's."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.attention.hopper_prefill import is_hopper
from pellucid.kernels.experts import packed_experts
from pellucid.kernels.experts.experts import ExpertWeights, Gating, More, added_up, mix_experts_ref
from pellucid.kernels.experts.packed_experts import (
    PackedExperts,
    gather_pairs,
    mix_packed,
    mix_packed_ref,
    pack_experts,
    sort_rows,
    unpacked_ref,
    write_numbers,
)
from pellucid.kernels.experts.routing import Chosen, sort_pairs, sort_pairs_ref
from pellucid.kernels.packed.packed_weight import GroupCodes
from tests.kernels.emulator import emulated
from tests.kernels.test_packed_matmul import DEVICE, KINDS, Kind, codes

HAS_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
SILU, CLAMPED = Gating("silu"), Gating("silu", 0.5, 1.702)
MXFP4 = KINDS[6]


def make(
    kind: Kind, num: int, dim: int, hidden: int, dtype: torch.dtype, *, biased: bool = False
) -> PackedExperts:
    generator = torch.Generator().manual_seed(num + dim)

    def shuffled(num_out: int, num_in: int) -> GroupCodes:
        """Experts that are not all alike."""
        made = codes(kind, num_out, num_in)
        order = torch.randperm(num_out, generator=generator).to(DEVICE)
        some = {
            name: None if (value := getattr(made, name)) is None else value[order]
            for name in ("q", "scale", "zero", "offset")
        }
        return GroupCodes(
            **some,  # pyright: ignore[reportArgumentType]
            numbers=made.numbers, bits=made.bits, group=made.group, middle=made.middle,
            table=made.table,
        )  # fmt: skip

    gate_up = pack_experts(
        [(shuffled(hidden, dim), shuffled(hidden, dim)) for _ in range(num)], dtype, gated=True
    )
    down = pack_experts([(shuffled(dim, hidden),) for _ in range(num)], dtype)
    bias = (torch.randn(num, 2 * hidden), torch.randn(num, dim)) if biased else (None, None)
    biases = [None if each is None else each.to(DEVICE, dtype) for each in bias]
    return PackedExperts(
        gate_up=gate_up, down=down, num_experts=num, hidden=hidden, dim=dim,
        gate_up_bias=biases[0], down_bias=biases[1],
    )  # fmt: skip


def choose(num_tokens: int, num_experts: int, top_k: int) -> Chosen:
    """Distinct experts, or nobody."""
    torch.manual_seed(num_tokens)
    ids = torch.stack([torch.randperm(num_experts + 1)[:top_k] for _ in range(num_tokens)])
    return Chosen(ids.int().to(DEVICE), torch.rand(num_tokens, top_k, device=DEVICE))


def rows(num_tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, dim, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)


def vars_of(plain: ExpertWeights) -> tuple[Tensor | None, ...]:
    return plain.gate_up, plain.down, plain.gate_up_bias, plain.down_bias


def assert_mixed_alike(
    x: Tensor, chosen: Chosen, experts: PackedExperts, gating: Gating, **options: object
) -> None:
    actual = added_up(mix_packed(x, chosen, experts, gating, **options))  # pyright: ignore[reportArgumentType]
    plain = unpacked_ref(experts)
    wide = ExpertWeights(*(None if each is None else each.float() for each in vars_of(plain)))  # pyright: ignore[reportArgumentType]
    expected = mix_experts_ref(x.float(), chosen, wide, gating, **options)  # pyright: ignore[reportArgumentType]
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
    again = added_up(mix_packed(x, chosen, experts, gating, **options))  # pyright: ignore[reportArgumentType]
    assert torch.equal(actual, again)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_codes_of_all_kinds_are_mixed_as_the_reference_does(kind: Kind) -> None:
    experts = make(kind, 3, 80, 40, torch.float32)
    assert_mixed_alike(rows(5, 80, torch.float32), choose(5, 3, 2), experts, SILU)


@pytest.mark.parametrize("num_tokens", [1, 4, 21, 150])
@pytest.mark.parametrize("gating", [SILU, CLAMPED], ids=str)
def test_few_tokens_and_many(num_tokens: int, gating: Gating) -> None:
    experts = make(MXFP4, 4, 96, 64, torch.float32, biased=True)
    assert_mixed_alike(rows(num_tokens, 96, torch.float32), choose(num_tokens, 4, 3), experts, gating)


def test_more_is_added_and_inputs_may_be_weighed() -> None:
    experts, x = make(KINDS[0], 3, 64, 32, torch.float32), rows(9, 64, torch.float32)
    more, chosen = More(torch.ones_like(x), torch.ones(9, 1, device=DEVICE)), choose(9, 3, 2)
    assert_mixed_alike(x, chosen, experts, SILU, more=more)
    assert_mixed_alike(x, chosen, experts, SILU, weighs_input=True)


def test_numbers_of_some_experts_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x, chosen = make(MXFP4, 5, 64, 40, torch.float32), rows(40, 64, torch.float32), choose(40, 5, 2)
    expected = mix_packed_ref(x, chosen, experts, SILU)
    monkeypatch.setattr(packed_experts, "ROWS_UNPACKED", 1)
    monkeypatch.setattr(packed_experts, "SCRATCH_BYTES", 2 * 2 * 64 * 40 * 4)
    torch.testing.assert_close(added_up(mix_packed(x, chosen, experts, SILU)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hidden", [32, 40])
def test_numbers_are_those_of_plain_experts(hidden: int) -> None:
    experts = make(KINDS[1], 3, 72, hidden, torch.float16)
    plain = unpacked_ref(experts)
    assert torch.equal(write_numbers(experts.gate_up, 1, 3, 3, 2 * hidden), plain.gate_up[1:])
    assert torch.equal(write_numbers(experts.down, 0, 2, 3, 72), plain.down[:2])


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
@pytest.mark.parametrize("mix", [mix_packed, mix_packed_ref])
def test_tokens_whose_experts_are_elsewhere_give_zeros(mix, num_tokens: int) -> None:  # noqa: ANN001
    experts = make(MXFP4, 2, 32, 40, torch.float32)
    ids = torch.full((num_tokens, 2), 2, dtype=torch.int32, device=DEVICE)
    mixed = mix(rows(num_tokens, 32, torch.float32), Chosen(ids, ids.float()), experts, SILU)
    assert torch.equal(added_up(mixed), torch.zeros(num_tokens, 32, device=DEVICE))


@pytest.mark.parametrize(("num_tokens", "tile"), [(1, 16), (9, 16), (40, 16), (200, 64)])
def test_rows_are_sorted_as_the_reference_sorts_pairs(num_tokens: int, tile: int) -> None:
    x, chosen, num = rows(num_tokens, 72, torch.float32), choose(num_tokens, 7, 5), 7
    places, sorted_x = sort_rows(x, chosen, num, tile, weighs_input=True)
    expected = sort_pairs_ref(chosen, num, tile)
    assert torch.equal(places.starts, expected.starts)
    known = int(expected.starts[-1])
    order = places.order[:known].long()
    assert torch.equal(order, expected.order[:known].long())
    assert torch.equal(sorted_x[:known], x[order // 5] * chosen.weights.flatten()[order, None])
    first, others = places.tiles[:num], places.tiles[num:]
    counts = expected.starts.diff()
    assert torch.equal(first[:, 0], torch.arange(num).int().where(counts > 0, num))
    assert torch.equal(first[:, 1], expected.starts[:-1])
    assert bool((others[:, 0] <= num).all())

    def of_anybody(tiles: Tensor) -> list[list[int]]:
        return sorted(tiles[tiles[:, 0] < num].tolist())

    assert of_anybody(places.tiles) == of_anybody(expected.tiles)


@pytest.mark.parametrize("weighs_input", [False, True])
def test_rows_are_gathered_in_the_order_of_places(weighs_input: bool) -> None:
    x, chosen = rows(40, 72, torch.float32), choose(40, 6, 5)
    places = sort_pairs(chosen, 6, 16, has_places=True)
    order = places.order[: int(places.starts[-1])].long()
    expected = x[order // 5] * (chosen.weights.flatten()[order, None] if weighs_input else 1)
    actual = gather_pairs(x, chosen, places, weighs_input=weighs_input)
    assert 0 < len(order) < len(actual)
    assert torch.equal(actual[: len(order)], expected)


def played(monkeypatch: pytest.MonkeyPatch, *faults: tuple[str, str], seed: int = 0) -> None:
    """Have Hopper's kernel run where a CPU plays such a GPU."""
    own = emulated("experts.packed_experts_hopper", *faults, seed=seed)
    monkeypatch.setitem(sys.modules, "pellucid.kernels.experts.packed_experts_hopper", own)
    is_there = SimpleNamespace(is_hopper=True, shared_memory=None, reaches=lambda *_: False)
    monkeypatch.setattr(packed_experts, "platform_of", lambda _: is_there)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("kind", "num_tokens", "gating"),
    [
        *((MXFP4, 1, CLAMPED), (MXFP4, 2, CLAMPED), (MXFP4, 9, SILU)),
        *((KINDS[1], 40, SILU), (KINDS[5], 6, CLAMPED)),
        pytest.param(MXFP4, 512, SILU, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_hoppers_kernel_matches_where_it_is_played(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, num_tokens: int, gating: Gating
) -> None:
    played(monkeypatch)
    experts = make(kind, 3, 136, 48, torch.bfloat16, biased=True)
    assert (experts.down.raised > 0) == (kind == MXFP4)
    assert_mixed_alike(rows(num_tokens, 136, torch.bfloat16), choose(num_tokens, 3, 2), experts, gating)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("counts", [(40, 24), (10, 54), (100, 60)])
def test_of_a_tile_as_many_rows_are_copied_and_multiplied_as_its_expert_has(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]
) -> None:
    """Tiles of 64 and of 128 rows, in one to four parts; of inputs two tiles, and one."""
    played(monkeypatch)
    ids = torch.arange(2, dtype=torch.int32).repeat_interleave(torch.tensor(counts))[:, None]
    x, chosen = rows(sum(counts), 128, torch.bfloat16), Chosen(ids, torch.rand(len(ids), 1))
    assert_mixed_alike(x, chosen, make(MXFP4, 2, 128, 48, torch.bfloat16), SILU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("seed", [0, 1])
def test_codes_that_were_copied_for_nobody_are_waited_for(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    played(monkeypatch, seed=seed)
    experts, ids = make(MXFP4, 5, 136, 48, torch.bfloat16), torch.full((20, 1), 2, dtype=torch.int32)
    chosen = Chosen(ids, torch.rand(20, 1))
    assert_mixed_alike(rows(20, 136, torch.bfloat16), chosen, experts, SILU)


FAULTS = {
    "another expert's codes": ("first_block = known * NUM_BLOCKS + block", "first_block = block"),
    "copies do not wait for room": (
        "mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1)\n            mbarrier.expect",
        "mbarrier.expect",
    ),
    "x does not wait for room": (
        "mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1)\n        copy_rows",
        "copy_rows",
    ),
    "rows of the next expert": ("is_own = at < end", "is_own = at < place + rows"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_faults_would_be_noticed(monkeypatch: pytest.MonkeyPatch, fault: tuple[str, str]) -> None:
    experts, x = make(MXFP4, 3, 1800, 48, torch.bfloat16), rows(9, 1800, torch.bfloat16)
    played(monkeypatch, fault)
    with pytest.raises(AssertionError):
        assert_mixed_alike(x, choose(9, 3, 2), experts, SILU)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 30, 300])
def test_hoppers_kernel_matches(kind: Kind, num_tokens: int) -> None:
    experts = make(kind, 6, 320, 200, torch.bfloat16, biased=True)
    assert_mixed_alike(rows(num_tokens, 320, torch.bfloat16), choose(num_tokens, 6, 4), experts, CLAMPED)
