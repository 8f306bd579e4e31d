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
from pellucid.kernels.sampling.trees import verify_tree, verify_tree_ref
from pellucid.kernels.sampling.verify_chain import node_places, verify_chain, verify_chain_ref
from pellucid.kernels.slots.gather_rows import owners
from pellucid.platform import has_triton
from pellucid.rows import Trees
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampled, Sampler
from pellucid.sample.state import LogitsBatch

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
    trees: Trees | None = None  # None: all are chains.  A row with fewer drafts has the first of its tree

    @property
    def max_new(self) -> int:
        """K: most tokens that a row can yield."""
        return 1 + (self.max_drafts if self.trees is None else min(self.max_drafts, self.trees.depth))

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Of each logit: its node within its row, [S] int64, and whether a chain's draft comes next, bool."""
        cu_logits = self.cu_logits.long()
        start, count = cu_logits[:-1], cu_logits.diff()
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
    if shape.tree_depth:
        raise ValueError(
            f"rejection_sample_method {method!r} judges chains of drafts, the proposer drafts trees; "
            "use 'strict'"
        )


def verify(sampled: Sampled, rows: VerifyRows) -> SampleOutput:
    """Accept drafts and gather each row's new tokens: the accepted ones, then the one chosen after them.

    sampled: the token chosen at each of the S logits.
    """
    chosen, max_new, num_rows = sampled.tokens, rows.max_new, len(rows.room)
    on_gpu, path = chosen.is_cuda and has_triton(), None
    args = (chosen, rows.inputs, rows.cu_logits, rows.room, rows.samples)
    if rows.trees is None or rows.max_drafts == 0:
        flat = (verify_chain if on_gpu else verify_chain_ref)(*args, max_new=max_new)
    else:
        walk = verify_tree if on_gpu else verify_tree_ref
        flat, path = walk(*args, trees=rows.trees, max_drafts=rows.max_drafts)
    tokens, num_new = flat.split([num_rows * max_new, num_rows])
    logprobs, is_stuck = sampled.logprobs, sampled.is_stuck
    if logprobs is not None or is_stuck is not None:
        nodes = torch.arange(max_new, device=chosen.device) if path is None else path
        places = node_places(rows.cu_logits, nodes, len(chosen))
        logprobs = None if logprobs is None else logprobs.take(places)
        is_stuck = None if is_stuck is None else is_stuck[places]
    return SampleOutput(
        tokens=tokens.view(-1, max_new), num_new=num_new, logprobs=logprobs, is_stuck=is_stuck, flat=flat,
        path=path,
    )  # fmt: skip
