"""The door for proposers: whatever guesses the next tokens, cheaply, for the target to verify.

A proposer only proposes.  What is accepted is the verifier's; with verify.py's, the default, the output stays
the target's whatever is proposed.
Legend: B rows, S logits, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import numpy as np
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.sample.output import SampleOutput
from pellucid.spec.draft_probs import DraftProbs
from pellucid.spec.drafter import Drafter

if TYPE_CHECKING:
    from pellucid.models.build import BuiltModel, ModelFactory
    from pellucid.models.head import BuiltHead
    from pellucid.sample.sampler import Sampler

    Built = BuiltModel | BuiltHead


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How many drafts a row may have, and whether they are a tree."""

    num_drafts: int
    tree_depth: int = 0  # of the deepest draft of any tree; 0: drafts are chains, which need no masks

    @property
    def depth(self) -> int:
        """Of the deepest draft."""
        return self.tree_depth or self.num_drafts

    @property
    def max_new(self) -> int:
        """Most tokens that one verification can yield."""
        return 1 + self.depth

    @property
    def num_parents(self) -> int:
        """Drafts of which must be told what is before them: those of trees."""
        return self.num_drafts if self.tree_depth else 0


NO_DRAFTS = DraftShape(0)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer wants to see of the target's forward pass, and what else its drafts come from."""

    hidden: bool = False  # the last hidden states, before the head
    taps: tuple[int, ...] = ()  # residual streams that enter these layers; n, of n layers, leaves the last
    drafter: Drafter = Drafter.STATELESS  # for planning; KEEPS_KV of whoever loads a model with caches


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens, valid ids all: where there is nothing to propose, any id will do."""

    tokens: Tensor  # [B, num_drafts] int32, device; a chain may be as short as what is wanted
    probs: DraftProbs | None = None  # of [B, num_drafts]: what each was drawn from; None: it was certain
    # [B, num_drafts] int8, of a tree: the node before each draft, 0 the newest token, i the i-th draft; it
    # comes before it, so the first few are a tree, too.  None: a chain.
    parents: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The text of every row, once the step's new tokens are in it, and what is wanted behind it."""

    # [slots + 1, L] int32, device; `fwd.slots` names the rows'.  Behind the known tokens of rows that sample
    # a proposer may write its drafts; nothing else is to be changed.
    token_ids: Tensor
    newest: Tensor  # [B] int64, device: the last known token's place; of a prompt, the next one's to compute
    samples: Tensor  # [B] bool, device: the row reaches its last known token; drafts of others are dropped
    host_slots: np.ndarray  # [B], fwd.slots on the host
    has_chunks: bool  # host: some row computed more than its last known token and the drafts behind it
    num_wanted: int  # drafts that the next step may verify, at most shape.num_drafts; 0: nobody wants any

    @property
    def spare(self) -> int:
        """The slot that takes what belongs to nobody."""
        return len(self.token_ids) - 1


class Proposer(Protocol):
    """One file a method.  Runs on the worker, on every row of each step behind which drafts are made."""

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """The proposer that the user asked for."""
        ...

    @property
    def shape(self) -> DraftShape: ...

    @property
    def needs(self) -> Needs:
        """Known once it is loaded."""
        ...

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[Built, ...]:
        """Build and load weights; may share the target's embedding and head.

        sampler: draws the target's tokens, for a proposer that wants to draw alike.
        Returns models and heads of its own; the worker gives them KV caches and block tables.
        """
        ...

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        """Propose what follows each row's new tokens; known.num_wanted is 1 at least.

        hidden: [T, D] behind the last norm, if it is needed.  taps: [T, len(needs.taps) * D], in that order.

        Part of what is recorded as a CUDA graph: reads nothing back and waits for nothing.  KV of its own may
        be written at the places of `fwd`, and of shape.num_drafts tokens from each row's newest known one on,
        and of as many more as SpeculativeConfig.num_extra says: there are blocks for so many.
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """A proposer that learns from finished texts."""

    def retire(self, slots: Sequence[int], token_ids: Tensor, num_computed: Tensor) -> None:
        """These slots' texts still lie there, and go: token_ids [slots + 1, L], num_computed [slots + 1]."""
        ...


class NullProposer:
    """Proposes nothing."""

    shape = NO_DRAFTS
    needs = Needs(drafter=Drafter.NONE)

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls()

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[Built, ...]:
        """There is nothing to load."""
        return ()

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        return Drafts(sampled.tokens[:, :0])


def check_needs(needs: Needs, method: str, model: object, *, num_stages: int) -> None:
    """Raise ValueError for layers that the target cannot show."""
    if not needs.taps:
        return
    taps = ", ".join(map(str, needs.taps))
    if num_stages > 1:
        raise ValueError(
            f"speculative method {method!r} reads what enters layers {taps}, which lie on several pipeline "
            "stages; use pipeline_parallel_size=1, or method eagle, mtp or medusa"
        )
    if not isinstance(model, Tappable):
        raise ValueError(
            f"speculative method {method!r} reads what enters layers {taps}, which {type(model).__name__} "
            "does not show; use method eagle, mtp or medusa"
        )
    if not all(0 <= tap <= model.num_layers for tap in needs.taps):
        raise ValueError(
            f"speculative method {method!r} reads what enters layers {taps}, but the model has "
            f"{model.num_layers}; check which of its layers the draft's config.json names"
        )


@runtime_checkable
class Tappable(Protocol):
    """A model that tells `fwd.taps` what enters each of its layers."""

    num_layers: int
