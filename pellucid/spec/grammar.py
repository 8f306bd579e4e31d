"""Drafts where a request's grammar leaves no choice, and nowhere else.

What the grammar forces is found on the host, by its own matcher (sample/grammars/forced.py), once the token
before it is known, and comes to the slots with the plan that verifies it (features/grammar/).  So it is
there beside the drafts of any proposer that drafts chains; with this one there are no others.
"""

from __future__ import annotations

from typing import Self

from pellucid.config import SpeculativeConfig
from pellucid.spec.base import DraftShape, NullProposer


class GrammarProposer(NullProposer):
    """Has room for what grammars force, and proposes nothing itself."""

    def __init__(self, num_drafts: int) -> None:
        self.shape = DraftShape(num_drafts)

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(config.num_speculative_tokens)
