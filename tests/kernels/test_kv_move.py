"""Moving keys and values within the paged cache, against one place after the other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.attention.kv_move import kv_move, kv_move_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_moves(num_rows: int, num_moves: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Rows that each keep some drafts of their own stretch of places, as a verification does."""
    rng = random.Random(num_rows)
    sources, targets = [], []
    for row in range(1, num_rows + 1):
        root, num_kept = row * (num_nodes + 3), rng.randint(0, num_moves)
        kept = sorted(rng.sample(range(1, num_nodes + 1), num_kept))
        spare = [0] * (num_moves - num_kept)
        sources.append([root + node for node in kept] + spare)
        targets.append([root + 1 + i for i in range(num_kept)] + spare)
    return torch.tensor(sources, device=DEVICE), torch.tensor(targets, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_it_is_one_place_after_the_other(dtype: torch.dtype, head_dim: int) -> None:
    cache = torch.randn(12, 2, 3, 16, head_dim, device=DEVICE).to(dtype)
    expected = cache.clone()
    sources, targets = random_moves(12, 5, 9)
    assert (sources != targets).any() and (sources > 0).any()
    kv_move(cache, sources, targets)
    kv_move_ref(expected, sources, targets)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_no_moves_are_no_work() -> None:
    cache = torch.zeros(1, 2, 1, 16, 16, device=DEVICE)
    none = torch.zeros((3, 0), dtype=torch.int64, device=DEVICE)
    kv_move(cache, none, none)
