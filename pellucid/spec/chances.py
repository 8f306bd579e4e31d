"""With what chance the drafts of a row stand, if a draft that follows one that stands does with a given rate.

The n-th draft of a chain stands with rate ** n.  Of a tree the drafts of one depth exclude each other: some
one of all that there could be stands with rate ** depth, and of these each next one with a third of the
chance of the one before.  Trees grow from their likeliest drafts, so the first few are the likeliest of all.
No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
THIRD = 1 / 3
STEPS = 64  # rates that are told apart


class Chances:
    """Of chains or trees of at most `most` drafts."""

    def __init__(self, most: int, tree_depth: int = 0) -> None:
        """tree_depth: of the deepest draft; 0 for chains."""
        self._is_tree = tree_depth > 0
        self._places = np.arange(1.0, 1 + most)
        kinds = [tree_drafts(rate / STEPS, most, tree_depth) for rate in range(1 + STEPS)]
        self._table = np.array([[chance for chance, _, _ in drafts] for drafts in kinds])  # [rates, most]
        # [1 + most], of the first n drafts of a tree: how deep they are, and which share of the chance of a
        # depth they have, at the first one.
        usual = kinds[3 * STEPS // 4]
        self._depth = np.array([max((d for _, d, _ in usual[:n]), default=0) for n in range(1 + most)])
        firsts = [sum(share for _, d, share in usual[:n] if d == 1) for n in range(1 + most)]
        self._share = np.array(firsts) if self._is_tree else np.ones(1 + most)

    def of(self, rates: Numbers) -> Numbers:
        """[rows, most]."""
        if not self._is_tree:
            return np.power(rates[:, None], self._places)
        return self._table[np.rint(rates * STEPS).astype(np.int64)]

    def tries(self, drafts: NDArray[np.int64], num_new: NDArray[np.int32]) -> Numbers | NDArray[np.int64]:
        """Of rows that have verified so many drafts, and yielded so many tokens: of how many it was seen
        whether they stand, so that of these a share stands that is the rate."""
        if not self._is_tree:
            return np.minimum(num_new, drafts)
        return np.minimum(num_new, self._depth[drafts]) * self._share[drafts]


def tree_drafts(rate: float, most: int, tree_depth: int) -> Sequence[tuple[float, int, float]]:
    """(chance, depth, share of its depth's chance), the likeliest first; of a chain share is 1."""
    if not tree_depth:
        return [(rate**n, n, 1.0) for n in range(1, 1 + most)]
    drafts = [
        (rate**depth * (1 - THIRD) * THIRD**place, depth, (1 - THIRD) * THIRD**place)
        for depth in range(1, 1 + tree_depth)
        for place in range(most)
    ]
    return sorted(drafts, key=lambda draft: (-draft[0], draft[1]))[:most]
