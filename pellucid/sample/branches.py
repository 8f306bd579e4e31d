"""Where a logit's known tokens lie in its slot's row: at their positions, unless drafts are a tree.

Drafts of a tree lie behind the last committed token one after another, whatever their depth, so the text
before a logit is the committed tokens and then some of those.  Legend: S logits, R rows of a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Branches(Protocol):
    """The way to every logit's text."""

    def places(self, positions: Tensor) -> Tensor:
        """[R or 1, n] positions of each logit's text -> [R or 1, n], where in the slot's row they lie."""
        ...

    def take(self, index: Tensor) -> Branches:
        """Those of some of the logits."""
        ...


class InOrder:
    """Every token lies at its position."""

    def places(self, positions: Tensor) -> Tensor:
        return positions

    def take(self, index: Tensor) -> InOrder:
        return self


IN_ORDER = InOrder()


@dataclass(frozen=True, slots=True)
class TreeBranches:
    """Behind position `roots`, each logit's text goes on with the drafts of its own path."""

    roots: Tensor  # [R] int64: the last committed token's position
    paths: Tensor  # [R, D] int64: the drafts at depth 1, 2, .. on the way to the logit's own node; then any

    def places(self, positions: Tensor) -> Tensor:
        depth = positions - self.roots[:, None]
        index = (depth - 1).clamp(0, self.paths.shape[1] - 1)
        return positions.where(depth <= 0, self.roots[:, None] + self.paths.gather(1, index))

    def take(self, index: Tensor) -> TreeBranches:
        return TreeBranches(self.roots[index], self.paths[index])
