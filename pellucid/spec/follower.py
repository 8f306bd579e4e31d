"""Drafts of a head that goes on from the target's states: its KV follows what the target computes.

At place t it is fed token t + 1 and the target's state of place t.  So in each step the head first runs over
the step's own tokens, once it is known what stands of them; the last that stands gives the first draft.  Then
it goes on alone: at the next place it is fed its own draft and its own features of the place before.  KV of a
draft that falls is written again by the step that computes its place.
Legend: B rows, T tokens, F features of a token.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.models.head import BuiltHead, HeadPlan, Lender
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, DraftShape, Known, Needs
from pellucid.spec.chain import Chain
from pellucid.spec.draws import draw_for
from pellucid.spec.passes import Passes, last_standing


class Follower:
    """A head, and how its tokens are chosen."""

    def __init__(self, built: BuiltHead, sampler: Sampler, rejection_sample_method: str) -> None:
        self.built = built
        self.chain = Chain(sampler.state, draw_for(rejection_sample_method, sampler))

    def propose(self, fwd: ForwardInput, sampled: SampleOutput, known: Known, states: Tensor) -> Drafts:
        """states: [T, ..], of the step's tokens."""
        features = self.built.run(Passes.over(fwd, known), states)
        passes = Passes.behind(fwd, known, ahead=1)
        features = features[last_standing(fwd, sampled, known)]

        def guess(index: int, tokens: Tensor | None) -> Tensor:
            nonlocal features
            if tokens is not None:
                features = self.built.run(passes.next(index, tokens), features)
            return self.built.model.logits(features)

        return self.chain.draw(known, passes, guess)


class HeadProposer:
    """Proposes a chain by such a head.  Each kind of head says how it is built, and what it is fed."""

    needs = Needs(hidden=True)

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config, self.shape = config, DraftShape(config.num_speculative_tokens)
        self._follower: Follower | None = None

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(config)

    def plan(self, lender: Lender, factory: ModelFactory) -> HeadPlan:
        """How the head is built.  Raises ValueError for one that does not fit the target."""
        raise NotImplementedError

    def states(self, hidden: Tensor, taps: Tensor | None) -> Tensor:
        """Of what it needs of the target that which the head is fed, [T, ..]."""
        return hidden

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltHead, ...]:
        built = factory.build_head(self.plan(factory.lender(target), factory), target)
        self._follower = Follower(built, sampler, self.config.rejection_sample_method)
        return (built,)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        assert self._follower is not None, "load() was not called"
        return self._follower.propose(fwd, sampled, known, self.states(hidden, taps))
