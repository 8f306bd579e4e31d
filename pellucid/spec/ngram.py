"""Drafts from the text itself: what followed the last few tokens when they occurred before (prompt lookup).

No weights and no state; tensor operations on the slots' token ids, so no step waits for the host.
Legend: B rows, L columns of the token table.  Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, Workshop
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, DraftShape, Known, Needs


class NgramProposer:
    """Looks up the longest run of `shortest` to `longest` last tokens that occurred before."""

    needs = Needs()
    prefix_lookback = 0

    def __init__(self, num_drafts: int, *, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest, (shortest, longest)
        self.shape = DraftShape(num_drafts)
        self.shortest, self.longest = shortest, longest

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(
            config.num_speculative_tokens, shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max
        )

    def load(self, target: BuiltModel, shop: Workshop, sampler: Sampler) -> tuple[BuiltModel, ...]:
        """There is nothing to load."""
        return ()

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor | None,
        taps: Mapping[str, Tensor],
    ) -> Drafts:  # fmt: skip
        texts = known.token_ids[fwd.slots]
        return Drafts(look_up(texts, known.newest, self.shape.num_drafts, self.shortest, self.longest))


def look_up(texts: Tensor, newest: Tensor, num: int, shortest: int, longest: int) -> Tensor:
    """[B, num]: what followed the most recent occurrence of the longest n-gram that ends each text.

    texts: [B, L] token ids.  newest: [B] int64, the place of the last one that is known.  Where what followed
    ends with the text it goes round, as a text that repeats itself would.  Without a match, the last token.
    """
    ends = torch.arange(texts.shape[1], device=texts.device)  # e: an n-gram texts[:, e - n : e]
    newest = newest[:, None]
    matched = torch.zeros_like(texts)  # tokens that agree, going back from the end
    agrees = (ends > 0) & (ends <= newest)
    for back in range(1, longest + 1):
        last = texts.gather(1, (newest + 1 - back).clamp(min=0))
        here = torch.zeros_like(agrees)
        here[:, back:] = texts[:, : texts.shape[1] - back] == last
        agrees = agrees & here
        matched += agrees
    # The longest first, then the most recent.
    score = torch.where(matched >= shortest, matched.long() * len(ends) + ends, -1)
    best, at = score.max(1, keepdim=True)
    start = torch.where(best >= 0, at, newest)
    follows = start + torch.arange(num, device=texts.device) % (newest + 1 - start)
    return texts.gather(1, follows)
