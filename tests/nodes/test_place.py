"""Places: every rank has a device of its own, and those that share layers are neighbours."""

from __future__ import annotations

from itertools import product

import pytest

from pellucid.config import ParallelConfig
from pellucid.dist.mesh import Mesh
from pellucid.nodes.place import Place, arrange


def test_tensor_parallel_ranks_are_neighbours_then_stages_then_engines() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert arrange(parallel)[:5] == [
        Place(device=0, dp=0, pp=0, tp=0),
        Place(device=1, dp=0, pp=0, tp=1),
        Place(device=2, dp=0, pp=1, tp=0),
        Place(device=3, dp=0, pp=1, tp=1),
        Place(device=4, dp=1, pp=0, tp=0),
    ]


@pytest.mark.parametrize("tp,pp,dp", list(product((1, 2, 3), repeat=3)))
def test_a_place_is_the_meshs_of_the_same_rank(tp: int, pp: int, dp: int) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp)
    for engine in range(dp):
        places = [place for place in arrange(parallel) if place.dp == engine]
        for rank, place in enumerate(places):
            mesh = Mesh(pp=pp, tp=tp, rank=rank)
            assert (place.pp, place.tp) == (mesh.rank_of("pp"), mesh.rank_of("tp"))
            assert place.device == (parallel.first_gpu(engine) or 0) + rank
