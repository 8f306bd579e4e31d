"""Which drafts are accepted: one walk for chains and trees, greedy and sampled, whatever proposed them.

A token is chosen at every draft's place, and a draft is accepted if and only if it is that token.  How it is
chosen is the verifier's: `StrictVerifier` draws the target's own, with the noise of that place, so the output
is what it would be without drafts: token for token in float32, and up to the rounding of logits in another
step otherwise; standard.py and synthetic.py choose in other ways.  Imports no proposer.

Legend: B rows, S logits, K tokens a row can yield, V vocab.  Node 0 of a row is its last committed token,
nodes 1.. are its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.kernels.gather_rows import owners
from pellucid.kernels.verify_chain import chain_places, verify_chain, verify_chain_ref
from pellucid.platform import has_triton
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampled, Sampler
from pellucid.sample.state import LogitsBatch
from pellucid.spec.tree import children_of, max_new

if TYPE_CHECKING:
    from pellucid.spec.base import Drafts, DraftShape


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
        return max_new(self.parents, self.max_drafts)

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Of each logit: its node within its row, [S] int64, and whether a chain's draft comes next, bool."""
        start, count = _owned(self)
        logit, row = owners(self.cu_logits, len(self.inputs))
        node = logit - start[row]
        return node, node + 1 < count[row]


class Verifier(Protocol):
    """How drafts are judged; one file a method, made once."""

    @classmethod
    def of(cls, config: SpeculativeConfig, sampler: Sampler, shape: DraftShape) -> Self:
        """Raises ValueError if the method cannot judge drafts of this shape."""
        ...

    def __call__(
        self, logits: Tensor, batch: LogitsBatch, rows: VerifyRows, token_ids: Tensor
    ) -> SampleOutput:
        """Choose a token at each of the S logits, and of those what each row keeps.

        logits: [S, this rank's share of V], any float type.  token_ids: [num_slots, max_len] int32.
        """
        ...

    def keep(self, slots: Tensor, drafts: Drafts) -> None:
        """Remember of these slots' [B] drafts what their verification, in a later step, must know."""
        ...


class StrictVerifier:
    """A draft stands if it is the token that the target draws: the output does not change by a token."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    @classmethod
    def of(cls, config: SpeculativeConfig, sampler: Sampler, shape: DraftShape) -> Self:
        return cls(sampler)

    def __call__(
        self, logits: Tensor, batch: LogitsBatch, rows: VerifyRows, token_ids: Tensor
    ) -> SampleOutput:
        return verify(self.sampler(logits, batch, token_ids), rows)

    def keep(self, slots: Tensor, drafts: Drafts) -> None:
        """The tokens lie in the slots; more is not needed."""


def check_is_chain(method: str, shape: DraftShape) -> None:
    """Raise ValueError if the drafts are a tree, of which this method can make nothing."""
    if shape.parents is not None:
        raise ValueError(
            f"rejection_sample_method {method!r} judges chains of drafts, the proposer drafts trees; "
            "use 'strict'"
        )


def verify(sampled: Sampled, rows: VerifyRows) -> SampleOutput:
    """Accept drafts and gather each row's new tokens: the accepted ones, then the one chosen after them.

    sampled: the token chosen at each of the S logits.
    """
    if rows.parents is None or rows.max_drafts == 0:
        return _verify_chain(sampled, rows)
    if len(sampled.tokens) == 0:
        zeros = torch.zeros((len(rows.room), rows.max_new), dtype=torch.int32, device=rows.room.device)
        return SampleOutput(tokens=zeros, num_new=zeros[:, 0])
    return _verify_tree(sampled, rows, rows.parents)


def _verify_chain(sampled: Sampled, rows: VerifyRows) -> SampleOutput:
    chosen, max_new = sampled.tokens, 1 + rows.max_drafts
    walk = verify_chain if chosen.is_cuda and has_triton() else verify_chain_ref
    flat = walk(chosen, rows.inputs, rows.cu_logits, rows.room, rows.samples, max_new=max_new)
    tokens, num_new = flat.split([len(rows.room) * max_new, len(rows.room)])
    logprobs, is_stuck = sampled.logprobs, sampled.is_stuck
    if logprobs is not None or is_stuck is not None:
        places = chain_places(rows.cu_logits, len(chosen), max_new)
        logprobs = None if logprobs is None else logprobs.take(places)
        is_stuck = None if is_stuck is None else is_stuck[places]
    return SampleOutput(
        tokens=tokens.view(-1, max_new), num_new=num_new, logprobs=logprobs, is_stuck=is_stuck, flat=flat
    )


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
    places = _places(start, nodes, len(sampled.tokens))
    # Cut every row to its room, and to nothing where it has no logits or does not sample.
    num_new = torch.minimum(num_new, rows.room.clamp(min=0)) * (rows.samples & (count > 0))
    return SampleOutput(
        tokens=sampled.tokens[places],
        num_new=num_new.int(),
        logprobs=None if sampled.logprobs is None else sampled.logprobs.take(places),
        is_stuck=None if sampled.is_stuck is None else sampled.is_stuck[places],
        path=nodes.int(),
    )


def _owned(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """Each row's first logit and number of logits: [B] int64, [B] int64."""
    cu_logits = rows.cu_logits.long()
    return cu_logits[:-1], cu_logits[1:] - cu_logits[:-1]


def _places(start: Tensor, nodes: Tensor, num_logits: int) -> Tensor:
    """[B, n] int64: the logits of `nodes` [B, n] or [n]; any valid place for nodes that do not exist."""
    return (start[:, None] + nodes).clamp_(0, num_logits - 1)
