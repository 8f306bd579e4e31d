"""Drafts from texts, the request's own and finished ones: what most often followed the last few tokens.

Prompt lookup takes the newest occurrence of an n-gram; here all of the longest match vote, token by token,
and answers that are done go on helping.  No weights; texts lie on the device, and no step waits for the host.
Oliaro, Jia, Campos, Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024.
Legend: B rows, L places of a text, N finished texts, W places of one of these, M matches that vote, k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.models.head import BuiltHead
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, DraftShape, Known, Needs

Ints = NDArray[np.int32]
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
        if not texts.is_cuda:
            return Drafts(vote(*self._found_on_host(texts.numpy(), known.newest.tolist())))
        return Drafts(vote(*self._found(texts, known)))

    def _found(self, texts: Tensor, known: Known) -> tuple[Tensor, Tensor]:
        """What follows the longest matches, [B, M, k], and which of them vote, [B, M] bool."""
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
        return follow, scores == scores.amax(-1, keepdim=True)

    def _found_on_host(self, texts: Ints, newest: list[int]) -> tuple[Tensor, Tensor]:
        """The same on a CPU, which looks only at places that have the newest token."""
        pool, lengths = self._pool.flatten().numpy(), self._lengths.numpy()
        ends = (np.arange(len(lengths)) * POOL_PLACES + lengths - 1).repeat(POOL_PLACES)
        place = np.arange(len(pool))
        follow = np.zeros((len(texts), VOTES, self.shape.num_drafts), dtype=np.int32)
        votes = np.zeros(follow.shape[:2], dtype=bool)
        back, ahead = np.arange(self.longest), np.arange(1, 1 + self.shape.num_drafts)
        for row, (text, at) in enumerate(zip(texts, newest, strict=True)):
            last = text[np.maximum(at - back, 0)]
            others = np.flatnonzero((pool == last[0]) & (place < ends))
            own = np.flatnonzero(text[: max(at, 0)] == last[0])
            found = [matched(pool, others, others % POOL_PLACES, last), matched(text, own, own, last)]
            most = max(num.max(initial=0) for num in found)
            tokens = [
                whole[np.minimum(places[num == most][:, None] + ahead, len(whole) - 1)]
                for whole, places, num in zip((pool, text), (others, own), found, strict=True)
            ]
            best = np.concatenate(tokens)[: -1 - VOTES : -1]  # the last ones, before others
            follow[row, : len(best)], votes[row, : len(best)] = best, True
        return torch.from_numpy(follow), torch.from_numpy(votes)


def matched(
    text: Ints, places: NDArray[np.int64], starts: NDArray[np.int64], last: Ints
) -> NDArray[np.int64]:
    """How many tokens up to each of these places, where the newest one is, are those of `last`.

    starts: of each place, how many tokens are before it.
    """
    back = np.arange(1, len(last))
    agrees = (text[places[:, None] - back] == last[1:]) & (back <= starts[:, None])
    return 1 + np.logical_and.accumulate(agrees, axis=1).sum(axis=1)


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
