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

from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, Known
from pellucid.spec.chain import Chain
from pellucid.spec.loaded import LoadedProposer
from pellucid.spec.padded_vocabulary import PaddedVocabulary
from pellucid.spec.passes import Passes


@dataclass(frozen=True, slots=True)
class DraftModel:
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


class DraftModelProposer(LoadedProposer):
    """Proposes a chain."""

    draft: DraftModel

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltModel, ...]:
        """Build the checkpoint that `model` in speculative_config names."""
        built = factory.build_draft()
        vocabulary = PaddedVocabulary(built.vocab_size, target.vocab_size)
        self.draft = DraftModel(built, Chain.of(self.config, sampler), vocabulary)
        return (built,)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        draft = self.draft
        if known.has_chunks:
            draft.follow(fwd)
        passes = Passes.behind(fwd, known, num_query=1 if known.has_chunks else 2)

        def guess(index: int, tokens: Tensor | None) -> Tensor:
            return draft.logits(passes.first() if tokens is None else passes.next(index, tokens))

        return draft.chain.draw(known, passes, guess)
