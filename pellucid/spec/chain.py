"""Drafts one after another: each is drawn from logits behind the one before, whatever makes them.

Legend: B rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import READ_TEXT, SamplingState
from pellucid.spec.base import Drafts, Known
from pellucid.spec.draft_probs import DraftProbs
from pellucid.spec.draws import DraftDraw, Drawn, draw_for
from pellucid.spec.passes import Passes

# From the number of a draft and the one before it, [B] int32 or None for the first, to its logits [B, V].
Guess = Callable[[int, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Chain:
    """How a drafter's tokens are chosen."""

    state: SamplingState
    choose: DraftDraw

    @classmethod
    def of(cls, config: SpeculativeConfig, sampler: Sampler) -> Self:
        """sampler: draws the target's tokens."""
        return cls(sampler.state, draw_for(config.rejection_sample_method, sampler))

    def draw(self, known: Known, passes: Passes, guess: Guess) -> Drafts:
        """As many drafts as are wanted."""
        slots = passes.fwd.slots
        batch = self.state.batch(known.host_slots, slots, passes.drawn(0))
        chain = list[Drawn]()
        for i in range(known.num_wanted):
            before = chain[-1].tokens if chain else None
            if before is not None and batch.traits & READ_TEXT:
                _write(known, slots, passes.drawn(i - 1), before)
            logits = guess(i, before)
            chain.append(self.choose(logits, replace(batch, positions=passes.drawn(i)), known.token_ids))
        probs = [drawn.probs for drawn in chain if drawn.probs is not None]
        tokens = torch.stack([drawn.tokens for drawn in chain], dim=1)
        if not probs:
            return Drafts(tokens)
        blocks, chances = (
            torch.stack(parts, dim=1) for parts in zip(*((p.blocks, p.probs) for p in probs), strict=True)
        )
        return Drafts(tokens, probs=DraftProbs(blocks, chances))


def _write(known: Known, slots: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Put a draft of each row where the next ones are to see it."""
    known.token_ids[torch.where(known.samples, slots, known.spare), places] = tokens
