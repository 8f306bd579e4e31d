"""`fwd`: everything one forward pass knows besides weights, the argument of models, layers and attention.

The worker's inputs build it; there is no global context.  Tensors are persistent buffers on the device, so a
captured graph may read them again.  Legend: T tokens, B rows, M blocks a row, S logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from pellucid.taps import Taps


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Who sees whom among the drafts of a row, when they are a tree.  Their KV lies at consecutive places.

    A query sees every place before its row's first draft, as far as its window reaches, and of the drafts
    those that it has a bit for.
    """

    ancestors: Tensor  # [T] int64: bit i is the row's draft i + 1; a draft has its own bit, other tokens none
    first_drafts: Tensor  # [B] int32: the place of each row's first draft, its length if it has none


# From queries a row, queries a tile, and how many of each row's last queries are wanted to [num_tiles, 2]
# int32: each tile's row and its first query there.
MakeTiles = Callable[[Sequence[int], int, Sequence[int]], np.ndarray]


class TileMaps(Protocol):
    """Where a recorded forward finds which tile of queries is of which row: rows change, this stays."""

    def get(self, tile_queries: int, make: MakeTiles, *, all_wanted: bool) -> Tensor:
        """[num_tiles, 2] int32 on the device, of what `make` says of the rows that are no decodes.

        all_wanted: of all queries, not only of those whose logits are sampled.
        """
        ...


@dataclass(slots=True, kw_only=True)
class ForwardInput:
    """One step's rows, packed without padding: row i owns tokens cu_seqlens_q[i] .. cu_seqlens_q[i + 1]."""

    # Set by worker.inputs, on the device:
    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64, in the text: drafts of a tree that are equally deep share one
    slots: Tensor  # [B] int64, each row's slot
    cu_seqlens_q: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32, tokens with KV once this step's are written
    block_tables: tuple[Tensor, ...]  # [B, M] int32 each; a layer knows which is its own
    slot_mappings: tuple[Tensor, ...]  # per table: [T] int64, block * block_size + offset of each token
    logits_index: Tensor  # [S] int64, tokens whose logits are sampled
    tree: TreeMask | None = None  # None: drafts are a chain, and all is causal
    all_wanted: bool = True  # else nobody reads hidden states but those whose logits are sampled

    # Known to the host without asking the device:
    query_lens: list[int] = field(default_factory=list)  # per row
    num_sampled: list[int] = field(default_factory=list)  # per row, so many of its last tokens
    max_keys: list[int] = field(default_factory=list)  # no row has more tokens with KV; none: any number
    max_query: int = 1
    num_common: int = 0  # tokens of a step that other engines take part in: the most of all; 0: none does
    block_size: int = 0  # tokens
    tiles: TileMaps | None = None  # of a forward that is recorded for any rows: lengths are then bounds

    # Set by the attention backend's metadata(), per block table:
    attn: tuple[object, ...] = ()

    # Set by a feature: of each token its adapter's place in the banks, -1 for none; None: no token has one.
    adapters: Tensor | None = None  # [T] int32
    # Set by a feature: what the head takes of each token beside its hidden state.
    of_head: tuple[Tensor, ...] = ()  # [T] each

    taps: Taps = field(default_factory=Taps)  # filled while the model runs

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    def wanted(self, x: Tensor) -> Tensor:
        """Of x [T, D] the rows that are read behind the last layer: all, or [S, D], but one at least."""
        if self.all_wanted:
            return x
        return self.sampled(x) if len(self.logits_index) else x[:1]

    def adapters_of(self, x: Tensor) -> Tensor | None:
        """Of the tokens of x, all [T, D] or those that are `wanted`; None: none has an adapter."""
        if self.adapters is None or len(x) == self.num_tokens:
            return self.adapters
        return self.wanted(self.adapters)

    def sampled(self, x: Tensor) -> Tensor:
        """Of x, all rows [T, D] or those that are `wanted`, the ones whose logits are sampled, [S, D]."""
        return x if len(self.logits_index) == len(x) else x[self.logits_index]
