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
from pellucid.kernels.sampling.verify_chain import Chance, take_by_chance, take_by_chance_ref
from pellucid.platform import has_triton
from pellucid.sample.noise import Purpose
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import Column, LogitsBatch
from pellucid.spec.base import Drafts, DraftShape
from pellucid.spec.verify import VerifyRows, check_is_chain, verify


class SyntheticVerifier:
    """Each draft stands with its position's probability, given that those before it stand."""

    def __init__(self, sampler: Sampler, rates: tuple[float, ...]) -> None:
        """rates: the share of verifications in which the first, the first two, .. drafts stand."""
        self.sampler = sampler
        before = (1.0, *rates)
        conditional = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
        # By node; behind the last one there is no draft.
        self.rates = torch.tensor([*conditional, 0.0], device=sampler.state.device)
        on_gpu = self.rates.is_cuda and has_triton()
        self._take = take_by_chance if on_gpu else take_by_chance_ref

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
        chance = Chance(
            rates=self.rates,
            seeds=self.sampler.state.table[:, Column.SEED],
            slots=batch.slots,
            positions=batch.positions,
            purpose=int(Purpose.ACCEPT),
        )
        fed = rows.inputs

        def revise(own: Tensor) -> Tensor:
            nonlocal fed
            taken, fed = self._take(own, rows.inputs, rows.cu_logits, chance)
            return taken

        sampled = self.sampler(logits, batch, token_ids, revise)
        return verify(sampled, replace(rows, inputs=fed))
