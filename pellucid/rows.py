"""A step's rows on the device: how much of each is computed, and what the slots hold of them.

The worker ships the first; kernels gather the second, and write behind it what the step has yielded.
Legend: T tokens, B rows, S logits to sample, P prompt positions to score, M blocks a row, L places in a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pellucid.worker.inputs import StepCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """A step's counts, on the host and, int64 each, on the device.

    Tokens and logits behind the last row's are padding: token 0 at place 0 of the last slot, in block 0.
    Of a recorded step the host may know less: bounds, or no more than the first logits' rows.
    """

    counts: StepCounts
    num_tokens: int  # T, with padding behind the rows
    slots: Tensor  # [B]
    num_query: Tensor  # [B]
    num_drafts: Tensor  # [B], of its tokens, at the end
    num_sampled: Tensor  # [B]
    cu_query: Tensor  # [B + 1]: row b computes tokens cu_query[b] .. cu_query[b + 1]
    cu_logits: Tensor  # [B + 1]: row b samples logits cu_logits[b] .. cu_logits[b + 1], of its last tokens
    logits_index: Tensor  # [S], the tokens whose logits are sampled
    score_index: Tensor  # [P], the tokens at whose places known tokens are scored
    score_slots: Tensor  # [P]

    @property
    def num_logits(self) -> int:
        """S, with padding."""
        return len(self.logits_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotViews:
    """What the slots hold, as kernels see it."""

    token_ids: Tensor  # [slots, L] int32
    num_computed: Tensor  # [slots] int64
    limits: Tensor  # [slots] int64, tokens
    block_tables: tuple[Tensor, ...]  # [slots, M] int32 each
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees that some rows' drafts are, each its own: node 0 is the last token before them."""

    # [slots, N] int8: of a slot's drafts 1, 2, .. the node before each, which comes before it.
    parents: Tensor
    slots: Tensor  # [B] int64
    depth: int  # of the deepest draft that a tree may have


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRows:
    """The same of the step's rows, tokens and logits: where each stands before the step runs."""

    slots: Tensor  # [B] int64
    num_query: Tensor  # [B] int64
    starts: Tensor  # [B] int64, tokens computed before the step
    roots: Tensor  # [B] int64, the place of the last token before the drafts
    room: Tensor  # [B] int64, law 3: most tokens the row may yield, its limit less what is known
    samples: Tensor  # [B] bool: the row has logits to sample, for it reaches its last known token
    seq_lens: Tensor  # [B] int32, tokens computed with the step's; 1 of a row without any: it has a key
    cu_seqlens_q: Tensor  # [B + 1] int32, cu_query
    block_tables: tuple[Tensor, ...]  # [B, M] int32 each
    input_ids: Tensor  # [T] int32
    places: Tensor  # [T] int64, where tokens lie in their slots: at their positions, unless drafts are a tree
    slot_mappings: tuple[Tensor, ...]  # per table: [T] int64, block * block_size + offset
    logit_slots: Tensor  # [S] int64
    logit_places: Tensor  # [S] int64, behind the token that was fed there
    logit_inputs: Tensor  # [S] int32, the token that was fed
