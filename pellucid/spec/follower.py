"""Drafts of a head that goes on from the target's states: its KV follows what the target computes.

At place t it is fed token t + 1 and the target's state of place t.  So in each step the head first runs over
the step's own tokens, once it is known what stands of them; the last that stands gives the first draft.  Then
it goes on alone: at the next place it is fed its own draft and its own features of the place before.  KV of a
draft that falls is written again by the step that computes its place.
Legend: B rows, T tokens, F features of a token.
"""

from __future__ import annotations

from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.models.head import BuiltHead
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, Known
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
