"""How a drafter with logits chooses its tokens: as the target would, or on its own.

Knows neither what made the logits nor what will verify the drafts.  Legend: B rows, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pellucid.sample.noise import Purpose, gumbel_of, keys
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import Column, LogitsBatch, Trait
from pellucid.spec.draft_probs import DraftProbs, ids_of, likeliest


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for every row."""

    tokens: Tensor  # [B] int32
    probs: DraftProbs | None = None  # of [B]: what each was drawn from; None: it was certain


class DraftDraw(Protocol):
    """A way to choose."""

    def __call__(self, logits: Tensor, batch: LogitsBatch, token_ids: Tensor) -> Drawn:
        """Choose from `logits` [B, V], this rank's share of V.

        batch: whose logits they are, and the positions to be drawn.  token_ids: [slots + 1, L] int32, with
        the drafts before these positions.
        """
        ...


class AlikeDraw:
    """By the request's own parameters with the target's noise, so that alike logits give the same token."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(self, logits: Tensor, batch: LogitsBatch, token_ids: Tensor) -> Drawn:
        silent = replace(
            batch,
            traits=batch.traits & ~Trait.LOGPROBS,
            rows={trait: rows for trait, rows in batch.rows.items() if trait is not Trait.LOGPROBS},
        )
        return Drawn(self.sampler(logits, silent, token_ids).tokens)


class OwnDraw:
    """From softmax(logits / T) with noise of its own: what the textbook's rejection test wants to see.

    Of the likeliest blocks of tokens alone (draft_probs.py), so that what was drawn from can be kept.
    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(self, logits: Tensor, batch: LogitsBatch, token_ids: Tensor) -> Drawn:
        state = self.sampler.state
        params = state.params(batch.slots)
        temperature = params.floats(Column.TEMPERATURE)[:, None]
        is_greedy = temperature == 0
        scaled = self.sampler.vocabulary.whole(logits).float() / torch.where(is_greedy, 1.0, temperature)
        blocks, kept = likeliest(scaled)
        ids = ids_of(blocks)
        codes = state.codes[ids.clamp(max=scaled.shape[1] - 1)]
        noise = gumbel_of(keys(params.ints(Column.SEED), batch.positions, Purpose.DRAFT), codes)
        chosen = torch.where(is_greedy, kept, kept + noise).argmax(-1, keepdim=True)
        certain = torch.zeros_like(kept).scatter_(1, chosen, 1.0)
        probs = DraftProbs(blocks, torch.where(is_greedy, certain, kept.softmax(-1)))
        return Drawn(ids.gather(1, chosen)[:, 0].int(), probs)


def draw_for(rejection_sample_method: str, sampler: Sampler) -> DraftDraw:
    """What suits the way in which drafts are accepted."""
    return OwnDraw(sampler) if rejection_sample_method == "standard" else AlikeDraw(sampler)
