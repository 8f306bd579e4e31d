"""Linear layers whose inputs ranks divide among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.dist.collectives import ALONE, SingleRank
from pellucid.layers.addend import Addend


class Twins(SingleRank):
    """Two ranks that hold the same."""

    size = 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_parts_of_two_sums_are_parts_of_the_sum_of_both() -> None:
    group, (x, y) = Twins(), torch.randn(2, 3, 4)
    both = Addend(x, group) + Addend(y, group)
    torch.testing.assert_close(both.sum(), 2 * (x + y))


def test_only_sums_over_the_same_ranks_are_added() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(AssertionError, match="ranks"):
        _ = Addend(x, Twins()) + Addend(x, ALONE)
