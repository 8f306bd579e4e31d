"""The textbook test: a draft d stands with probability min(1, p(d) / q(d)), else max(p - q, 0) is drawn from.

p is the target's distribution after everything that a request asks for (penalties, biases, temperature,
filters), q the one that the draft was drawn from.  The output has the target's distribution exactly, but not
its tokens: they depend on the drafts.  Greedy rows still give argmax.  Every number drawn is a function of
(seed, position, purpose), and a position is decided once, so re-drafting a position reuses no noise.
Leviathan, Kalman, Matias 2023; Chen et al. 2023.

Legend: B rows, S logits, R logits of a part, K drafts a row, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.sample.noise import Purpose, gumbel, uniform
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import Column, LogitsBatch, Trait
from pellucid.sample.vocabulary import WHOLE_VOCABULARY
from pellucid.spec.base import Drafts, DraftShape
from pellucid.spec.draft_probs import DraftProbs
from pellucid.spec.verify import VerifyRows, check_is_chain, verify

# Elements of one [R, V] tensor: 64 MiB of each of half a dozen.
_SLICE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Trial:
    """Some logits and the draft behind each; int64 unless said otherwise."""

    logits: Tensor  # [R, V] float32, edited
    seeds: Tensor  # [R]
    positions: Tensor  # [R], of the token to be chosen
    temperatures: Tensor  # [R] float32; 0 is greedy
    drafts: Tensor  # [R], any id where there is no draft
    has_draft: Tensor  # [R] bool
    q: Tensor  # [R, V] float32, what each draft was drawn from; anything where there is none
    own: Tensor  # [R], what the sampler draws: the token where there is no draft, or where all is certain


class StandardVerifier:
    """Keeps what each draft was drawn from, slot by slot, until its verification."""

    def __init__(self, sampler: Sampler, num_drafts: int) -> None:
        self.sampler, self.num_drafts = sampler, num_drafts
        # Of [slots, K]; made when a proposer first brings some, so one that is certain costs nothing.
        self.probs: DraftProbs | None = None

    @classmethod
    def of(cls, config: SpeculativeConfig, sampler: Sampler, shape: DraftShape) -> Self:
        check_is_chain("standard", shape)
        return cls(sampler, shape.num_drafts)

    def keep(self, slots: Tensor, drafts: Drafts) -> None:
        if drafts.probs is None:
            return
        blocks, probs = drafts.probs.blocks, drafts.probs.probs
        if self.probs is None:
            shape = len(self.sampler.state.table), self.num_drafts
            self.probs = DraftProbs(
                blocks.new_zeros((*shape, blocks.shape[2])), probs.new_zeros((*shape, probs.shape[2]))
            )
        self.probs.blocks[slots, : blocks.shape[1]] = blocks
        self.probs.probs[slots, : probs.shape[1]] = probs

    def __call__(
        self, logits: Tensor, batch: LogitsBatch, rows: VerifyRows, token_ids: Tensor
    ) -> SampleOutput:
        if rows.max_drafts == 0 or Trait.RANDOM not in batch.traits:
            return verify(self.sampler(logits, batch, token_ids), rows)  # where all is certain: argmax
        sampled = self.sampler.choose(
            logits, batch, token_ids, lambda edited: self._pick(edited, batch, rows)
        )
        # A rejected draft is never what is drawn instead, so the walk of equal tokens finds who stands.
        return verify(sampled, rows)

    def _pick(self, logits: Tensor, batch: LogitsBatch, rows: VerifyRows) -> Tensor:
        """[S] int32: the draft behind each logit if it stands, else what is drawn; a part at a time."""
        own = self.sampler.draw(logits, batch, WHOLE_VOCABULARY).long()
        params, codes = self.sampler.state.params(batch.slots), self.sampler.state.codes
        node, has_draft = rows.nodes()
        drafts = rows.inputs.long().roll(-1)
        picked = []
        size = max(1, _SLICE_ELEMENTS // logits.shape[1])
        for start in range(0, len(logits), size):
            part = slice(start, start + size)
            trial = Trial(
                logits=logits[part],
                seeds=params.ints(Column.SEED)[part],
                positions=batch.positions[part],
                temperatures=params.floats(Column.TEMPERATURE)[part],
                drafts=drafts[part],
                has_draft=has_draft[part],
                q=self._drawn_from(batch.slots[part], node[part], drafts[part], logits.shape[1]),
                own=own[part],
            )
            picked.append(pick(trial, codes))
        return torch.cat(picked).int()

    def _drawn_from(self, slots: Tensor, node: Tensor, drafts: Tensor, vocab_size: int) -> Tensor:
        """[R, V]: what the draft behind each node was drawn from; all of it the draft if that was certain."""
        if self.probs is None:
            sure = torch.zeros((len(drafts), vocab_size), dtype=torch.float32, device=drafts.device)
            return sure.scatter_(1, drafts[:, None], 1.0)
        at = slots, node.clamp(max=self.num_drafts - 1)
        return DraftProbs(self.probs.blocks[at], self.probs.probs[at]).dense(vocab_size)


def pick(trial: Trial, codes: Tensor) -> Tensor:
    """[R] int64: the token at each logit.  codes: [V] of `token_codes`."""
    is_random = trial.temperatures > 0
    temperature = trial.temperatures.where(is_random, 1.0)[:, None]
    p = torch.softmax(trial.logits / temperature, dim=-1)
    draft = trial.drafts[:, None]
    chance = uniform(trial.seeds, trial.positions, Purpose.ACCEPT)
    stands = chance * trial.q.gather(1, draft)[:, 0] < p.gather(1, draft)[:, 0]
    rest = temperature * residual(p, trial.q).log()
    noise = gumbel(trial.seeds, trial.positions, codes, Purpose.RESIDUAL)
    drawn = noise.mul_(temperature).add_(rest).argmax(-1)
    return trial.drafts.where(stands, drawn).where(trial.has_draft & is_random, trial.own)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalized: what is left to draw from once a draft of q has been rejected.

    Where rounding leaves nothing, p and q are the same, and p is as good.
    """
    rest = (p - q).clamp_(min=0)
    return rest.where(rest.amax(-1, keepdim=True) > 0, p)
