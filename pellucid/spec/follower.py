"""Drafts of a head that goes on from the target's states: its KV follows what the target computes.

At place t it is fed token t + 1 and the target's state of place t.  So in each step the head first runs over
the step's own tokens, once it is known what stands of them; the last that stands gives the first draft.  Then
it goes on alone: at the next place it is fed its own draft and its own features of the place before.  KV of a
draft that falls is written again by the step that computes its place.
Legend: B rows, T tokens, F features of a token.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.models.head import BuiltHead, HeadPlan, Lender
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, Known, Needs
from pellucid.spec.chain import Chain
from pellucid.spec.grow import Grower
from pellucid.spec.loaded import LoadedProposer
from pellucid.spec.passes import Passes, last_standing, straightened


class Follower:
    """A head, and how its tokens are chosen."""

    def __init__(self, built: BuiltHead, sampler: Sampler, config: SpeculativeConfig) -> None:
        self.built = built
        self.chain = Chain.of(config, sampler)
        self.grower: Grower | None = None
        if config.grows:
            self.grower = Grower(
                run=built.run,
                logits=lambda features: sampler.vocabulary.whole(built.model.logits(features)),
                width=config.speculative_eagle_topk,
                depth=config.tree_depth,
            )

    def propose(self, fwd: ForwardInput, sampled: SampleOutput, known: Known, states: Tensor) -> Drafts:
        """states: [T, ..], of the step's tokens."""
        if fwd.tree is not None:
            fwd, source = straightened(fwd, sampled, known)
            states, sampled = states[source], replace(sampled, path=None)
        features = self.built.run(Passes.over(fwd, known), states)
        features = features[last_standing(fwd, sampled, known)]
        if self.grower is not None:
            return self.grower.grow(fwd, known, features)
        passes = Passes.behind(fwd, known, ahead=1)

        def guess(index: int, tokens: Tensor | None) -> Tensor:
            nonlocal features
            if tokens is not None:
                features = self.built.run(passes.next(index, tokens), features)
            return self.built.model.logits(features)

        return self.chain.draw(known, passes, guess)


class HeadProposer(LoadedProposer):
    """Proposes chains or trees by such a head.  Each kind says how it is built, and what it is fed."""

    needs = Needs(hidden=True)
    follower: Follower

    def plan(self, lender: Lender, factory: ModelFactory) -> HeadPlan:
        """How the head is built.  Raises ValueError for one that does not fit the target."""
        raise NotImplementedError

    def states(self, hidden: Tensor, taps: Tensor | None) -> Tensor:
        """Of what it needs of the target that which the head is fed, [T, ..]."""
        return hidden

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltHead, ...]:
        plan = self.plan(factory.lender(target), factory)
        built = factory.build_head(plan, target, tree_depth=self.shape.tree_depth)
        self.follower = Follower(built, sampler, self.config)
        return (built,)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        return self.follower.propose(fwd, sampled, known, self.states(hidden, taps))
