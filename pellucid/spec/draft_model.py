"""Drafts from a smaller model of the same tokenizer, one token after another.

Its KV cache has the target's block tables and lengths.  In a step with prompt chunks, or one that wants no
drafts, it first computes all that the target has computed; then it goes on alone, with one query a row.  So
the KV of whatever is committed is there, whether or not drafts were wanted or accepted.  Where every row is
its last known token and drafts behind it, it has fed itself all but one of them in the step before: the last
draft, or the token itself if there are none.  Whatever stood of them, the two newest tokens are all that may
be missing, so they are the first pass.
Legend: B rows, T tokens, V vocab.  Leviathan, Kalman, Matias 2023; Chen et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, DraftShape, Known, Needs
from pellucid.spec.chain import Chain
from pellucid.spec.draws import draw_for
from pellucid.spec.padded_vocabulary import PaddedVocabulary
from pellucid.spec.passes import Passes


@dataclass(frozen=True, slots=True)
class Drafter:
    """The loaded model, and how its tokens are chosen."""

    built: BuiltModel
    chain: Chain
    vocabulary: PaddedVocabulary

    def follow(self, fwd: ForwardInput) -> None:
        """Compute all that the target has computed, for its KV."""
        self.built.run(self.vocabulary.feed(fwd))

    def logits(self, fwd: ForwardInput) -> Tensor:
        """[S, V], of the tokens that `fwd` samples."""
        hidden = self.built.run(self.vocabulary.feed(fwd))
        return self.vocabulary.logits(self.built.model.logits(fwd.sampled(hidden)))


class DraftModelProposer:
    """Proposes a chain."""

    needs = Needs()

    def __init__(self, config: SpeculativeConfig) -> None:
        self.shape = DraftShape(config.num_speculative_tokens)
        self._rejection_sample_method = config.rejection_sample_method
        self._drafter: Drafter | None = None

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(config)

    @property
    def drafter(self) -> Drafter:
        assert self._drafter is not None, "load() was not called"
        return self._drafter

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltModel, ...]:
        """Build the checkpoint that `model` in speculative_config names."""
        built = factory.build_draft()
        chain = Chain(sampler.state, draw_for(self._rejection_sample_method, sampler))
        self._drafter = Drafter(built, chain, PaddedVocabulary(built.vocab_size, target.vocab_size))
        return (built,)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        drafter = self.drafter
        if known.has_chunks:
            drafter.follow(fwd)
        passes = Passes.behind(fwd, known, num_query=1 if known.has_chunks else 2)

        def guess(index: int, tokens: Tensor | None) -> Tensor:
            return drafter.logits(passes.first() if tokens is None else passes.next(index, tokens))

        return drafter.chain.draw(known, passes, guess)
