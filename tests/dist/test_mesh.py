"""The grid of ranks: neighbours share a layer, and every rank is in one group of each axis."""

from __future__ import annotations

import itertools

import pytest

from pellucid.dist.mesh import AXES, Mesh


def test_the_tensor_parallel_ranks_of_a_stage_are_neighbours() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2, rank=5)
    assert [mesh.ranks(axis) for axis in AXES] == [(1, 5), (5, 7), (4, 5)]
    assert [mesh.rank_of(axis) for axis in AXES] == [1, 0, 1]


@pytest.mark.parametrize("dp,pp,tp", list(itertools.product((1, 2, 3), repeat=3)))
def test_groups_of_an_axis_hold_every_rank_once(dp: int, pp: int, tp: int) -> None:
    for axis in AXES:
        mesh = Mesh(dp=dp, pp=pp, tp=tp)
        groups = mesh.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(dp * pp * tp))
        assert {len(group) for group in groups} == {mesh.size_of(axis)}
        for rank in range(mesh.world):
            here = Mesh(dp=dp, pp=pp, tp=tp, rank=rank)
            assert here.ranks(axis)[here.rank_of(axis)] == rank
