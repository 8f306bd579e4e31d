"""The one verifier: for chains and trees of drafts, greedy and sampled, whatever proposed them.

The target's own token is drawn at every draft's place, with the noise of that place; a draft is accepted if
and only if it is that token.  So the output is token for token what it would be without drafts.  Imports no
proposer.  Legend: B rows, S logits, K tokens a row can yield.  Node 0 of a row is its last committed token,
nodes 1.. are its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRows:
    """The rows of a step: which logits each owns, and what was fed there."""

    # [B + 1] integers, device: row b owns logits cu_logits[b] .. cu_logits[b + 1], one a node, or none.
    cu_logits: Tensor
    inputs: Tensor  # [S] int32, device: the token fed where each logit was computed; read for drafts alone
    room: Tensor  # [B] integers, device: most tokens a row may yield, its limit less what is committed
    samples: Tensor  # [B] bool, device: whether the row yields tokens at all
    max_drafts: int = 0  # host: most drafts of any row
    # Host: the parents of drafts 1, 2, ..; None is a chain.  A row with fewer drafts has the first of them.
    parents: tuple[int, ...] | None = None

    @property
    def max_new(self) -> int:
        """K: most tokens that a row can yield."""
        if self.parents is None or self.max_drafts == 0:
            return 1 + self.max_drafts
        return 1 + depth_of(self.parents)


def verify(sampled: Sampled, rows: VerifyRows) -> SampleOutput:
    """Accept drafts and gather each row's new tokens: the accepted ones, then the target's own next.

    sampled: the target's token at each of the S logits.
    """
    num_rows, num_logits = len(rows.room), len(sampled.tokens)
    if num_logits == 0:
        zeros = torch.zeros((num_rows, rows.max_new), dtype=torch.int32, device=rows.room.device)
        return SampleOutput(tokens=zeros, num_new=zeros[:, 0])
    if rows.parents is None or rows.max_drafts == 0:
        return _verify_chain(sampled, rows)
    return _verify_tree(sampled, rows, rows.parents)


def _verify_chain(sampled: Sampled, rows: VerifyRows) -> SampleOutput:
    start, count = _owned(rows)
    node = torch.arange(1 + rows.max_drafts, device=start.device)
    places = _places(start, node, len(sampled.tokens))
    if rows.max_drafts == 0:
        return _output(sampled, rows, places, torch.ones_like(start), path=None)
    tokens = sampled.tokens[places]
    # The draft at node j + 1 stands if the target's token at node j is the same and all before it stand.
    is_draft = node[1:] < count[:, None]
    stands = (tokens[:, :-1] == rows.inputs[places[:, 1:]]) & is_draft
    num_new = 1 + stands.int().cumprod(-1).sum(-1)
    return _output(sampled, rows, places, num_new, path=None)


def _verify_tree(sampled: Sampled, rows: VerifyRows, parents: tuple[int, ...]) -> SampleOutput:
    start, count = _owned(rows)
    children = children_of(parents, start.device)
    node = torch.zeros_like(start)
    stands = torch.ones_like(start, dtype=torch.bool)
    num_new = torch.zeros_like(start)
    path = []
    for _ in range(rows.max_new):
        path.append(node)
        num_new = num_new + stands
        candidates = children[node]  # [B, most children], -1 is none
        fed = rows.inputs[_places(start, candidates, len(sampled.tokens))]
        target = sampled.tokens[_places(start, node[:, None], len(sampled.tokens))]
        agrees = (fed == target) & (candidates > 0) & (candidates < count[:, None])
        first = agrees.int().argmax(-1, keepdim=True)
        # A row that has failed stays at its node, and so fails again.
        stands = agrees.any(-1)
        node = torch.where(stands, candidates.gather(1, first)[:, 0], node)
    nodes = torch.stack(path, dim=1)
    return _output(sampled, rows, _places(start, nodes, len(sampled.tokens)), num_new, path=nodes.int())


@lru_cache(maxsize=16)
def children_of(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """[nodes, most children] int64: the children of every node in order, -1 where there are no more."""
    lists: list[list[int]] = [[] for _ in range(1 + len(parents))]
    for child, parent in enumerate(parents, start=1):
        lists[parent].append(child)
    widest = max(map(len, lists))
    return torch.tensor([row + [-1] * (widest - len(row)) for row in lists], dtype=torch.int64, device=device)


def depth_of(parents: tuple[int, ...]) -> int:
    """The depth of the deepest draft; 0 without drafts.  Parents come before their children."""
    depths = [0]
    for child, parent in enumerate(parents, start=1):
        assert 0 <= parent < child, f"draft {child} has parent {parent}, which must come before it"
        depths.append(depths[parent] + 1)
    return max(depths)


def _owned(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """Each row's first logit and number of logits: [B] int64, [B] int64."""
    cu_logits = rows.cu_logits.long()
    return cu_logits[:-1], cu_logits[1:] - cu_logits[:-1]


def _places(start: Tensor, nodes: Tensor, num_logits: int) -> Tensor:
    """[B, n] int64: the logits of `nodes` [B, n] or [n]; any valid place for nodes that do not exist."""
    return (start[:, None] + nodes).clamp_(0, num_logits - 1)


def _output(
    sampled: Sampled, rows: VerifyRows, places: Tensor, num_new: Tensor, *, path: Tensor | None
) -> SampleOutput:
    """Cut every row to its room, and to nothing where it has no logits or does not sample."""
    _, count = _owned(rows)
    yields = rows.samples & (count > 0)
    num_new = torch.minimum(num_new, rows.room.clamp(min=0)) * yields
    logprobs = None if sampled.logprobs is None else sampled.logprobs.take(places)
    return SampleOutput(tokens=sampled.tokens[places], num_new=num_new.int(), logprobs=logprobs, path=path)
