"""PARD: a draft model that guesses several tokens in one pass, behind mask tokens that stand for them.

It is fed the newest known token and, for each further draft, one mask token; what it says at each of these
places is a draft.  Before that it computes all that the target has computed, so that the KV of whatever
stands is there; what mask tokens leave in the cache is provisional, and is written again.  So it takes two
passes, whatever the number of drafts.
An et al., "PARD: Accelerating LLM Inference with Low-Cost Parallel Draft Model Adaptation", 2025.
Legend: B rows, n drafts of a row, V vocab.
"""

from __future__ import annotations

from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.models.draft import mask_token
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, Known
from pellucid.spec.draft_model import DraftModelProposer
from pellucid.spec.passes import Passes


class PardProposer(DraftModelProposer):
    """Proposes a chain whose drafts do not know each other."""

    mask: int

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltModel, ...]:
        mask = mask_token(factory.draft_config)
        assert mask is not None, "the method is chosen by it"
        self.mask = mask
        return super().load(target, factory, sampler)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        draft = self.draft
        draft.follow(fwd)
        passes = Passes.behind(fwd, known)
        by_draft = draft.logits(passes.at_once(self.mask)).view(fwd.num_rows, known.num_wanted, -1)
        return draft.chain.draw(known, passes, lambda index, _: by_draft[:, index])
