"""Acceptance by chance at given rates, to measure speed where drafts mean nothing, as with dummy weights.

What comes out is not the target's text.  Drafts that stand by chance are taken as they are; behind them comes
the target's own token, as ever, so a step costs what it costs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.sample.noise import Purpose, uniform
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import Column, LogitsBatch
from pellucid.spec.base import Drafts, DraftShape
from pellucid.spec.verify import VerifyRows, check_is_chain, verify

NO_TOKEN = -1


class SyntheticVerifier:
    """Each draft stands with its position's probability, given that those before it stand."""

    def __init__(self, sampler: Sampler, rates: tuple[float, ...]) -> None:
        """rates: the share of verifications in which the first, the first two, .. drafts stand."""
        self.sampler = sampler
        before = (1.0, *rates)
        conditional = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
        # By node; behind the last one there is no draft.
        self.rates = torch.tensor([*conditional, 0.0], device=sampler.state.device)

    @classmethod
    def of(cls, config: SpeculativeConfig, sampler: Sampler, shape: DraftShape) -> Self:
        check_is_chain("synthetic", shape)
        return cls(sampler, config.acceptance_rates)

    def keep(self, slots: Tensor, drafts: Drafts) -> None:
        """Chance asks nothing of drafts."""

    def __call__(
        self, logits: Tensor, batch: LogitsBatch, rows: VerifyRows, token_ids: Tensor
    ) -> SampleOutput:
        if rows.max_drafts == 0:
            return verify(self.sampler(logits, batch, token_ids), rows)
        node, has_draft = rows.nodes()
        seeds = self.sampler.state.params(batch.slots).ints(Column.SEED)
        rates = self.rates[node.clamp(max=len(self.rates) - 1)]  # padding may have any number of logits
        stands = has_draft & (uniform(seeds, batch.positions, Purpose.ACCEPT) < rates)
        drafts = rows.inputs.roll(-1)
        sampled = self.sampler(logits, batch, token_ids, revise=lambda own: drafts.where(stands, own))
        # One that falls must fall even if it happens to be the target's own token.
        inputs = rows.inputs.masked_fill(~stands.roll(1), NO_TOKEN)
        return verify(sampled, replace(rows, inputs=inputs))
