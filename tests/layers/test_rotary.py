"""Rotary embedding: what turns, by how much, and what passes.  Scalings are in the parity tests."""

from __future__ import annotations

import pytest
import torch

from pellucid.kernels.attention.qkv_rope import turn
from pellucid.layers.rope import RopeConfig
from pellucid.layers.rotary import rotary_table


def make_rope(rotary_dim: int, kind: str = "default", factor: float = 1.0) -> RopeConfig:
    return RopeConfig(
        kind=kind,
        theta=100.0,
        rotary_dim=rotary_dim,
        max_position_embeddings=64,
        factor=factor,
        original_max_position_embeddings=32,
    )


def table(rotary_dim: int) -> torch.Tensor:
    return rotary_table(make_rope(rotary_dim), max_len=64)


def test_a_table_is_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = table(8)
    monkeypatch.setattr("pellucid.layers.rotary.SLICE", 10)
    assert torch.equal(table(8), whole)


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_each_pair_turns_by_its_own_angle_and_the_rest_passes(rotary_dim: int) -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64).float()
    positions = torch.tensor([0, 5, 63])
    half = rotary_dim // 2
    expected = x.clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = torch.tensor(position * 100.0 ** (-2 * i / rotary_dim))
            a, b = x[token, :, i], x[token, :, i + half]
            expected[token, :, i] = a * angle.cos() - b * angle.sin()
            expected[token, :, i + half] = b * angle.cos() + a * angle.sin()
    torch.testing.assert_close(turn(x, positions, table(rotary_dim)), expected, rtol=0, atol=1e-5)


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 8)

    def score(query_at: int, key_at: int) -> torch.Tensor:
        return (
            turn(q, torch.tensor([query_at]), table(8)).mul(turn(k, torch.tensor([key_at]), table(8))).sum()
        )

    torch.testing.assert_close(score(9, 4), score(59, 54), rtol=0, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_half_precision_is_turned_in_float32_and_rounded_once() -> None:
    x = torch.randn(5, 2, 8).bfloat16()
    positions = torch.arange(5) * 7
    turned = turn(x, positions, table(8))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, turn(x.float(), positions, table(8)).bfloat16())


@pytest.mark.parametrize(
    ("kind", "reach", "stretched"),
    [("default", 64, 64), ("llama3", 64, 64), ("linear", 64, 256), ("dynamic", 64, 256), ("yarn", 128, 128)],
)
def test_how_far_each_kind_reaches(kind: str, reach: int, stretched: int) -> None:
    config = make_rope(8, kind, factor=4.0)
    assert (config.reach, config.stretched) == (reach, stretched)


def test_room_for_drafts_changes_no_angle() -> None:
    config = make_rope(8, kind="dynamic", factor=4.0)
    table = rotary_table(config, 64)
    longer = rotary_table(config, 64, num_spec=5)
    assert len(longer) == 69 and torch.equal(longer[:64], table)
