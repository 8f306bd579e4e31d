"""The grid of ranks: neighbours share a layer, and every rank is in one group of each axis."""

from __future__ import annotations

import itertools

import pytest

from pellucid.dist.mesh import AXES, WHOLE_MODEL, Mesh, Stage


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


def test_each_layer_is_on_one_stage_and_the_ends_know_that_they_are() -> None:
    stages = [Stage(index, (2, 3)) for index in range(3)]
    assert [[layer for layer in range(5) if stage.holds(layer)] for stage in stages] == [[0, 1], [2], [3, 4]]
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    assert WHOLE_MODEL.is_first and WHOLE_MODEL.is_last and WHOLE_MODEL.holds(99)
