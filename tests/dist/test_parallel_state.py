"""vLLM's names for where a rank is: they say what the mesh says, and sum where the groups do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pellucid.dist import parallel_state as state
from pellucid.dist.collectives import ALONE, Links
from pellucid.dist.mesh import Mesh


class Twins:
    """A group of two whose ranks always say the same; the second one is here."""

    rank, size, mailbox = 1, 2, None

    def all_reduce(self, x: Tensor) -> Tensor:
        return 2 * x

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x, 10 * x])

    def minimum(self, value: int) -> int:
        return value


@pytest.fixture
def ranks() -> Iterator[None]:
    """The second tensor-parallel rank of the last of two stages."""
    state.remember(Links(mesh=Mesh(pp=2, tp=2, rank=3), world=ALONE, tp=Twins()))
    yield
    state.remember(None)


def test_without_others_all_are_the_first_of_one() -> None:
    assert not state.model_parallel_is_initialized()
    for group in (state.get_world_group(), state.get_tp_group(), state.get_pp_group(), state.get_dp_group()):
        assert (group.rank_in_group, group.world_size, group.next_rank, group.prev_rank) == (0, 1, 0, 0)
        assert group.is_first_rank and group.is_last_rank
    x = torch.arange(6.0).view(2, 3)
    assert state.tensor_model_parallel_all_gather(x).equal(x)
    assert state.tensor_model_parallel_all_reduce(x).equal(x)


@pytest.mark.usefixtures("ranks")
def test_every_axis_has_its_own_neighbours() -> None:
    assert state.get_tensor_model_parallel_rank() == 1 and state.get_tensor_model_parallel_world_size() == 2
    stages = state.get_pp_group()
    assert (stages.ranks, stages.rank_in_group, stages.is_last_rank) == ((1, 3), 1, True)
    assert (stages.prev_rank, stages.next_rank, stages.first_rank) == (1, 1, 1)
    assert state.get_pipeline_model_parallel_rank() == 1
    assert [*state.get_world_group().ranks] == [0, 1, 2, 3] and state.get_dp_group().world_size == 1
    with pytest.raises(AssertionError, match="stages of a pipeline have channels"):
        stages.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_what_is_gathered_lies_along_the_dimension(dim: int) -> None:
    x = torch.arange(6.0).view(2, 3)
    assert state.tensor_model_parallel_all_gather(x, dim).equal(torch.cat([x, 10 * x], dim))
    assert state.tensor_model_parallel_all_reduce(x).equal(2 * x)
