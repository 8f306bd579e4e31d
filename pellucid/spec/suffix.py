"""Drafts from texts, the request's own and finished ones: what most often followed the last few tokens.

Prompt lookup takes the newest occurrence of an n-gram; here all of the longest match vote, token by token,
and answers that are done go on helping.  No weights; texts lie on the device, and no step waits for the host.
Oliaro, Jia, Campos, Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024.
Legend: B rows, L places of a text, N finished texts, W places of one of these, M matches that vote, k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.models.head import BuiltHead
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, DraftShape, Known, Needs

VOTES = 16  # M
LONGEST_MATCH = 12  # tokens that are compared
POOL_PLACES = 1024  # W: of a longer text the last ones
MOST_POOL_TOKENS = 1 << 15  # N * W: each is looked at in every step, for every row


class SuffixProposer:
    """Proposes a chain."""

    needs = Needs()

    def __init__(self, config: SpeculativeConfig) -> None:
        self.shape = DraftShape(config.num_speculative_tokens)
        num = min(config.suffix_decoding_max_cached_requests, MOST_POOL_TOKENS // POOL_PLACES)
        self.longest = min(config.suffix_decoding_max_tree_depth, LONGEST_MATCH)
        self._pool = torch.zeros(num, POOL_PLACES, dtype=torch.int32)
        self._lengths = torch.zeros(num, dtype=torch.int64)
        self._next = 0  # of the pool to be written

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(config)

    def load(
        self, target: BuiltModel, factory: ModelFactory, sampler: Sampler
    ) -> tuple[BuiltModel | BuiltHead, ...]:
        """There are no weights; the pool goes to the device."""
        self._pool, self._lengths = self._pool.to(factory.device), self._lengths.to(factory.device)
        return ()

    def retire(self, slots: Sequence[int], token_ids: Tensor, num_computed: Tensor) -> None:
        """Remember the texts of these slots, of each what is computed and the token behind it."""
        for slot in slots if len(self._pool) else ():
            num_tokens = num_computed[slot] + 1
            length = num_tokens.clamp(max=POOL_PLACES)
            places = num_tokens - length + torch.arange(POOL_PLACES, device=token_ids.device)
            self._pool[self._next] = token_ids[slot, places.clamp(max=token_ids.shape[1] - 1)]
            self._lengths[self._next] = length
            self._next = (self._next + 1) % len(self._pool)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:
        texts = known.token_ids[fwd.slots]
        back = (known.newest[:, None] - torch.arange(self.longest, device=texts.device)).clamp(min=0)
        last = texts.gather(1, back)  # [B, longest], the newest first
        pool = self._pool.flatten()
        num = self.shape.num_drafts
        own = matches(texts, known.newest, last)  # [B, L]
        others = matches(self._pool, self._lengths - 1, last[:, None]).flatten(1)  # [B, N * W]
        scores, votes = best_matches(torch.cat((others, own), dim=1))
        ahead = votes[..., None] + torch.arange(1, num + 1, device=texts.device)  # [B, M, k]
        of_own = (ahead - len(pool)).clamp(0, texts.shape[1] - 1)
        follow = texts.gather(1, of_own.flatten(1)).view(ahead.shape)
        if len(pool):
            of_pool = pool[ahead.clamp(max=len(pool) - 1)]
            follow = torch.where(votes[..., None] < len(pool), of_pool, follow)
        return Drafts(vote(follow, scores == scores.amax(-1, keepdim=True)))


def matches(texts: Tensor, newest: Tensor, last: Tensor) -> Tensor:
    """How many tokens up to each place are those up to the newest one; 0 where nothing follows.

    texts: [n, L], of which `newest` [n] are known.  last: [n, longest], or [B, 1, longest]: all for all.
    """
    place = torch.arange(texts.shape[1], device=texts.device)
    agrees = (place < newest[:, None]) & (texts == last[..., :1])
    num = agrees.int()
    for back in range(1, last.shape[-1]):
        shifted = torch.roll(texts, back, dims=1)
        agrees = agrees & (shifted == last[..., back : back + 1]) & (place >= back)
        num = num + agrees
    return num


def best_matches(num: Tensor) -> tuple[Tensor, Tensor]:
    """Of match lengths [B, P] the VOTES longest, the last ones before others: their lengths and places."""
    place = torch.arange(num.shape[1], device=num.device)
    key = num.long() * num.shape[1] + place
    best = key.topk(min(VOTES, num.shape[1]), dim=1).values
    return best // num.shape[1], best % num.shape[1]


def vote(follow: Tensor, votes: Tensor) -> Tensor:
    """[B, k] int32: at each step what most of those say who have said all before it.

    follow: [B, M, k].  votes: [B, M] bool.
    """
    drafts = []
    for token in follow.unbind(-1):
        said = ((token[:, :, None] == token[:, None, :]) & votes[:, None, :]).sum(-1) * votes
        chosen = token.gather(1, said.argmax(-1, keepdim=True))
        votes = votes & (token == chosen)
        drafts.append(chosen)
    return torch.cat(drafts, dim=1).int()
