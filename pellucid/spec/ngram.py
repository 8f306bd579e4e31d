"""Drafts from the text itself: what followed the last few tokens when they occurred before (prompt lookup).

No weights and no state; found on the device in the slots' token ids, so no step waits for the host.
Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.kernels.slots.prompt_lookup import prompt_lookup, prompt_lookup_ref
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.platform import has_triton
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, DraftShape, Known, Needs
from pellucid.spec.drafter import Drafter


class NgramProposer:
    """Looks up the longest run of `shortest` to `longest` last tokens that occurred before."""

    needs = Needs(drafter=Drafter.READS_TEXT)

    def __init__(self, num_drafts: int, *, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest, (shortest, longest)
        self.shape = DraftShape(num_drafts)
        self.shortest, self.longest = shortest, longest

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(
            config.num_speculative_tokens, shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max
        )

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltModel, ...]:
        """There is nothing to load."""
        return ()

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        look_up = prompt_lookup if known.newest.is_cuda and has_triton() else prompt_lookup_ref
        return Drafts(
            look_up(
                known.token_ids,
                fwd.slots,
                known.newest,
                num=self.shape.num_drafts,
                shortest=self.shortest,
                longest=self.longest,
            )
        )
