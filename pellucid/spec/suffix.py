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
from pellucid.spec.drafter import Drafter
from pellucid.spec.echoes import KEPT, TEXTS

Ints = NDArray[np.int32]
VOTES = 16  # M
NEAR = 64  # places of a row at which a CPU compares all tokens; VOTES at least
LONGEST_MATCH = 12  # tokens that are compared
POOL_PLACES = KEPT  # W: of a longer text the last ones
MOST_POOL_TOKENS = 2 * TEXTS * KEPT  # N * W: each is looked at in every step, for every row


class SuffixProposer:
    """Proposes a chain."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.shape = DraftShape(config.num_speculative_tokens)
        num = min(config.suffix_decoding_max_cached_requests, MOST_POOL_TOKENS // POOL_PLACES)
        self.needs = Needs(drafter=Drafter.READS_TEXTS if num else Drafter.READS_TEXT)
        self.longest = min(config.suffix_decoding_max_tree_depth, LONGEST_MATCH)
        self._pool = torch.zeros(num, POOL_PLACES, dtype=torch.int32)
        self._lengths = torch.zeros(num, dtype=torch.int64)
        self._next = 0  # of the pool to be written
        # What a CPU looks at: the pool without gaps; each text's last token, which nothing follows, is -1.
        self._followed, self._places = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)

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
        if slots and not token_ids.is_cuda:
            place, lengths = np.arange(POOL_PLACES), self._lengths.numpy()[:, None]
            self._places = np.flatnonzero(place < lengths)
            followed = np.where(place < lengths - 1, self._pool.numpy(), np.int32(-1))
            self._followed = followed.reshape(-1)[self._places]

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:
        if known.token_ids.is_cuda:
            return Drafts(vote(*self._found(known.token_ids[fwd.slots], known)))
        return Drafts(torch.from_numpy(vote_on_host(*self._found_on_host(known))))

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

    def _found_on_host(self, known: Known) -> tuple[Ints, NDArray[np.bool_]]:
        """The same on a CPU, which compares all tokens only at places that agree in the first ones."""
        back, ahead = np.arange(self.longest + 1), np.arange(1, self.shape.num_drafts + 1)
        newest = np.maximum(known.newest.numpy(), 0)
        texts = known.token_ids.numpy()[known.host_slots, : newest.max() + 1 + len(ahead)]
        last = np.take_along_axis(texts, np.maximum(newest[:, None] - back, 0), 1)
        last[:, -1] = -2  # no token is that: a match ends here
        pool = self._pool.view(-1).numpy()
        own = self.longest + len(self._followed)  # a row's own text is behind the pool
        start = np.full(self.longest, -1, dtype=np.int32)
        seen = np.concatenate((start, self._followed, texts[0]))
        near = np.zeros((len(texts), NEAR), dtype=np.int64)
        tokens = np.full((*near.shape, len(back)), -1, dtype=np.int32)  # up to these places, the newest first
        for row, at in enumerate(newest.tolist()):
            text = seen[: own + at]
            text[own:] = texts[row, :at]
            places = likely_places(text, last[row, :-1])
            near[row, : len(places)] = places
            tokens[row, : len(places)] = text[places[:, None] + self.longest - back]
        num = (tokens != last[:, None]).argmax(-1)  # [B, NEAR], that agree
        rows, best = np.arange(len(texts))[:, None], np.argsort(-num, axis=1, kind="stable")[:, :VOTES]
        places = np.concatenate((self._places, len(pool) + np.arange(texts.shape[1])))
        num, votes = num[rows, best], places[near[rows, best, None]]
        ahead = votes + ahead  # [B, M, k]
        follow = texts[rows[..., None], np.clip(ahead - len(pool), 0, texts.shape[1] - 1)]
        if len(pool):
            follow = np.where(votes < len(pool), pool[np.minimum(ahead, len(pool) - 1)], follow)
        return follow, (num > 0) & (num == num[:, :1])


def likely_places(text: Ints, last: Ints) -> NDArray[np.int64]:
    """Places among which the longest matches are, the last one first, NEAR at most: of equal ones the last.

    text: [longest + P], of which P are places.  last: [longest], the newest token first.
    """
    agrees = text[len(last) :] == last[0]
    num = np.count_nonzero(agrees)
    for back in range(1, len(last)):
        if num <= NEAR:
            break
        longer = agrees & (text[len(last) - back : -back] == last[back])
        num = np.count_nonzero(longer)
        agrees = longer if num else agrees
    return agrees.nonzero()[0][: -1 - NEAR : -1]


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


def vote_on_host(follow: Ints, votes: NDArray[np.bool_]) -> Ints:
    """What `vote` returns, on a CPU: all that one of those says who have always said what most did."""
    rows, chosen = np.arange(len(follow)), votes.argmax(-1)
    for token in follow.transpose(2, 0, 1).copy():
        same = votes[:, :, None] & (token[:, :, None] == token[:, None, :])  # [B, M, M]
        chosen = (same.sum(1, dtype=np.int8) * votes).argmax(-1)
        votes = votes & same[rows, chosen]
    return follow[rows, chosen]
