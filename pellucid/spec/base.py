"""The door for proposers: whatever guesses the next tokens, cheaply, for the target to verify.

A proposer only proposes.  What is accepted, and that the output stays the target's, is verify.py's.
Legend: B rows, S logits, D model dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from torch import Tensor, nn

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.kv.specs import KVGroupSpec
from pellucid.sample.output import SampleOutput
from pellucid.spec.tree import depth_of

if TYPE_CHECKING:
    from pellucid.models.builder import Builder


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How a row's drafts hang together; the same for every row and step of an engine."""

    num_drafts: int
    parents: tuple[int, ...] | None = None  # of drafts 1, 2, ..; node 0 is the committed token; None: a chain

    @property
    def max_new(self) -> int:
        """Most tokens that one verification can yield."""
        return 1 + (self.num_drafts if self.parents is None else depth_of(self.parents))

    @property
    def tree_depth(self) -> int:
        """The depth of the deepest draft; 0 for chains, which need no masks."""
        return 0 if self.parents is None else depth_of(self.parents)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer wants to see of the target's forward pass."""

    hidden: bool = False  # the last hidden states, before the head
    taps: tuple[str, ...] = ()  # names of layers whose output it reads


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens, valid ids all: where there is nothing to propose, any id will do."""

    tokens: Tensor  # [B, num_drafts] int32, device
    probs: Tensor | None = None  # [B, num_drafts, V] float32: what each was drawn from; None: it was certain


@dataclass(frozen=True, slots=True)
class Known:
    """The text of every row, once the step's new tokens are in it."""

    token_ids: Tensor  # [slots, L] int32, device; `fwd.slots` names the rows'; not to be changed
    lengths: Tensor  # [B] int64, device: tokens that are known; of a prompt, up to the next one to compute


class Proposer(Protocol):
    """One file a method.  Runs on the worker, on every row of every step, so that its own KV has no holes."""

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """The proposer that the user asked for."""
        ...

    @property
    def shape(self) -> DraftShape: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def prefix_lookback(self) -> int:
        """Tokens before the end of a prefix-cache hit that must be seen again."""
        ...

    def kv_specs(self) -> list[KVGroupSpec]:
        """KV groups of its own, after the target's."""
        ...

    def load(self, target: nn.Module, b: Builder) -> None:
        """Build and load weights; may share the target's embedding and head."""
        ...

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor | None,
        taps: Mapping[str, Tensor],
    ) -> Drafts:  # fmt: skip
        """Propose what follows each row's new tokens.  hidden: [T, D], if it is needed."""
        ...


class NullProposer:
    """Proposes nothing."""

    shape = DraftShape(0)
    needs = Needs()
    prefix_lookback = 0

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls()

    def kv_specs(self) -> list[KVGroupSpec]:
        return []

    def load(self, target: nn.Module, b: Builder) -> None:
        """There is nothing to load."""

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor | None,
        taps: Mapping[str, Tensor],
    ) -> Drafts:  # fmt: skip
        return Drafts(sampled.tokens[:, :0])
