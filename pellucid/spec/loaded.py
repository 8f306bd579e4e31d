"""What proposers share that draft with the weights of a checkpoint."""

from __future__ import annotations

from typing import Self

from pellucid.config import SpeculativeConfig
from pellucid.spec.base import DraftShape, Needs


class LoadedProposer:
    """Proposes drafts of the shape that the user asked for.  What load() makes is there from then on."""

    needs = Needs()

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config, self.shape = config, DraftShape(config.num_speculative_tokens, config.tree_depth)

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(config)
