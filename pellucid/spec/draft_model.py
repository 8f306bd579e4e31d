"""Drafts from a smaller model of the same vocabulary, one token after another.

Its KV cache has the target's block tables and lengths.  In a step with prompt chunks, or one that wants no
drafts, it first computes all that the target has computed; then it goes on alone, with one query a row.  So
the KV of whatever is committed is there, whether or not drafts were wanted or accepted.  Where every row is
its last known token and drafts behind it, it has fed itself all but one of them in the step before: the last
draft, or the token itself if there are none.  Whatever stood of them, the two newest tokens are all that may
be missing, so they are the first pass.
Legend: B rows, T tokens, V vocab.  Leviathan, Kalman, Matias 2023; Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import READ_TEXT, SamplingState
from pellucid.spec.base import Drafts, DraftShape, Known, Needs
from pellucid.spec.draws import DraftDraw, Drawn, draw_for
from pellucid.spec.passes import Passes


@dataclass(frozen=True, slots=True)
class Drafter:
    """The loaded model, and how its tokens are chosen."""

    built: BuiltModel
    state: SamplingState
    draw: DraftDraw


class DraftModelProposer:
    """Proposes a chain."""

    needs = Needs()
    prefix_lookback = 0  # a prefix hit holds the blocks of both models

    def __init__(self, num_drafts: int, rejection_sample_method: str) -> None:
        self.shape = DraftShape(num_drafts)
        self._rejection_sample_method = rejection_sample_method
        self._drafter: Drafter | None = None

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(config.num_speculative_tokens, config.rejection_sample_method)

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltModel, ...]:
        """Build the checkpoint that `model` in speculative_config names."""
        built = factory.build_draft()
        self._drafter = Drafter(built, sampler.state, draw_for(self._rejection_sample_method, sampler))
        return (built,)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor | None,
        taps: Mapping[str, Tensor],
    ) -> Drafts:  # fmt: skip
        drafter = self._drafter
        assert drafter is not None, "load() was not called"
        if known.has_chunks or not known.num_wanted:
            drafter.built.run(fwd)  # for its KV: of chunks, and of a last draft that nobody has computed yet
        if not known.num_wanted:
            return Drafts(sampled.tokens[:, :0])
        return _chain(drafter, fwd, known)


def _chain(drafter: Drafter, fwd: ForwardInput, known: Known) -> Drafts:
    """Draw `num_wanted` tokens behind the known ones, each from the model's logits behind the one before."""
    passes = Passes.behind(fwd, known, num_query=1 if known.has_chunks else 2)
    batch = drafter.state.batch(known.host_slots, fwd.slots, passes.drawn(0))
    step, chain = passes.first(), list[Drawn]()
    for i in range(known.num_wanted):
        if chain:
            step = passes.next(i, chain[-1].tokens)
            if batch.features & READ_TEXT:
                _write(known, fwd.slots, passes.drawn(i - 1), chain[-1].tokens)
        hidden = drafter.built.run(step)
        logits = drafter.built.model.logits(step.sampled(hidden))
        chain.append(drafter.draw(logits, replace(batch, positions=passes.drawn(i)), known.token_ids))
    probs = [drawn.probs for drawn in chain if drawn.probs is not None]
    return Drafts(
        torch.stack([drawn.tokens for drawn in chain], dim=1),
        probs=torch.stack(probs, dim=1) if probs else None,
    )


def _write(known: Known, slots: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Put a draft of each row where the next ones are to see it."""
    known.token_ids[torch.where(known.samples, slots, known.spare), places] = tokens
