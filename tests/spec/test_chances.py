"""Drafts of trees share the chances of their depths, and teach the same rate however many there are."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.spec.chances import Chances, tree_drafts

RATE, MOST, DEPTH = 0.75, 16, 5


def depths_that_stand(num_drafts: int, num_rows: int) -> np.ndarray:
    """[rows]: how deep the path is that stands, of the first drafts of such trees."""
    rng, drafts = np.random.default_rng(num_drafts), tree_drafts(RATE, MOST, DEPTH)[:num_drafts]
    shares = [sum(share for _, d, share in drafts if d == depth) for depth in range(1, 1 + DEPTH)]
    return (rng.random((num_rows, DEPTH)) < RATE * np.array(shares)).cumprod(axis=1).sum(axis=1)


def test_a_chain_has_powers_of_its_rate() -> None:
    chain = Chances(3)
    assert chain.of(np.array([0.5, 1.0])).tolist() == [[0.5, 0.25, 0.125], [1, 1, 1]]
    assert list(chain.tries(np.array([3, 3]), np.array([2, 4], dtype=np.int32))) == [2, 3]


def test_a_whole_tree_yields_no_more_than_its_depths() -> None:
    chances = Chances(MOST, DEPTH).of(np.array([RATE]))[0]
    assert (np.diff(chances) <= 0).all()
    limit = sum(RATE**depth for depth in range(1, 1 + DEPTH))
    assert 0.85 * limit < chances.sum() < limit < sum(RATE**n for n in range(1, 1 + MOST)) - 0.5


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8, MOST])
def test_any_number_of_drafts_teaches_the_rate(num_drafts: int) -> None:
    stood = depths_that_stand(num_drafts, 20_000)
    drafts = np.full(len(stood), num_drafts)
    tries = Chances(MOST, DEPTH).tries(drafts, (1 + stood).astype(np.int32))
    assert stood.sum() / tries.sum() == pytest.approx(RATE, abs=0.13)
