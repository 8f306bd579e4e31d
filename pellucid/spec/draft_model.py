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
from pellucid.models.build import BuiltModel, Workshop
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import SamplingState
from pellucid.spec.base import Drafts, DraftShape, Known, Needs
from pellucid.spec.draws import DraftDraw, Drawn, draw_for


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

    def load(self, target: BuiltModel, shop: Workshop, sampler: Sampler) -> tuple[BuiltModel, ...]:
        """Build the checkpoint that `model` in speculative_config names."""
        built = shop.build_draft()
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
    newest = known.newest
    step = _first_pass(fwd, known, newest)
    batch = drafter.state.batch(known.host_slots, fwd.slots, newest)
    written = torch.where(known.samples, fwd.slots, known.spare)
    chain: list[Drawn] = []
    for i in range(1, known.num_wanted + 1):
        if chain:
            step = step.next(chain[-1].tokens)
        hidden = drafter.built.run(step)
        last = hidden.view(len(newest), -1, hidden.shape[-1])[:, -1]
        logits = drafter.built.model.logits(last.contiguous())
        places = newest + i
        chain.append(drafter.draw(logits, replace(batch, positions=places), known.token_ids))
        known.token_ids[written, places] = chain[-1].tokens  # where the penalties of the next one look
    probs = [drawn.probs for drawn in chain if drawn.probs is not None]
    return Drafts(
        torch.stack([drawn.tokens for drawn in chain], dim=1),
        probs=torch.stack(probs, dim=1) if probs else None,
    )


def _first_pass(fwd: ForwardInput, known: Known, newest: Tensor) -> ForwardInput:
    """The newest token [B], behind the one before it where the step's own tokens have not been computed."""
    places = newest[:, None]
    if not known.has_chunks:
        # A row at its limit, or of padding, has nothing new.  It never goes back to what is published.
        first = fwd.positions[fwd.cu_seqlens_q[:-1].long()]
        places = torch.maximum(newest, first + 1)[:, None] + torch.arange(-1, 1, device=newest.device)
    return fwd.restart(known.token_ids[fwd.slots[:, None], places], places)
