"""A drafter's own passes: what it sees of a chain, from each row's newest known tokens on.

Legend: B rows, n queries of a row in the first pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from pellucid.forward import ForwardInput, MakeTiles, TreeMask
from pellucid.kernels.slots.draft_places import Behind, DraftPlaces, draft_places, draft_places_ref
from pellucid.kernels.slots.gather_rows import owners
from pellucid.platform import has_triton
from pellucid.sample.output import SampleOutput
from pellucid.spec.base import Known
from pellucid.taps import Taps

MOST_IN_BLOCK = 64  # queries, the bits of a TreeMask


@dataclass(frozen=True, slots=True)
class Passes:
    """The same rows as in a step, a pass for every draft; each has its token from the one before."""

    fwd: ForwardInput  # the step's
    num_query: int  # n
    places: DraftPlaces
    ahead: int = 0  # 1: a place is fed the token behind it, so the newest known one was fed with the step

    @classmethod
    def behind(
        cls, fwd: ForwardInput, known: Known, *, num_query: int = 1, ahead: int = 0, num_more: int = 0
    ) -> Self:
        """As many passes as drafts are wanted, and `num_more`.

        num_query: n, 1 or 2 tokens that are fed first, the newest known one the last.  With 2 a row that has
        nothing new goes on behind what the step has fed: it never goes back to what is published.
        """
        make = draft_places if known.newest.is_cuda and has_triton() else draft_places_ref
        behind = Behind(
            slots=fwd.slots,
            newest=known.newest,
            token_ids=known.token_ids,
            positions=fwd.positions,
            cu_seqlens_q=fwd.cu_seqlens_q,
            block_tables=fwd.block_tables,
            block_size=fwd.block_size,
        )
        return cls(fwd, num_query, make(behind, num_query, known.num_wanted + num_more), ahead)

    @staticmethod
    def over(fwd: ForwardInput, known: Known) -> ForwardInput:
        """The step's own tokens once more, at each place the token behind it.  Of a tree: `straightened`."""
        _, row = owners(fwd.cu_seqlens_q, fwd.num_tokens)
        behind = (fwd.positions + 1).clamp(max=known.token_ids.shape[1] - 1)
        return replace(fwd, input_ids=known.token_ids[fwd.slots[row], behind], all_wanted=True, attn=())

    def first(self) -> ForwardInput:
        """The input of the first pass, `num_query` queries a row."""
        return self._input(0, self.places.input_ids, self.num_query)

    def next(self, index: int, tokens: Tensor) -> ForwardInput:
        """The input of pass `index`, at least 1, one query a row: tokens [B] int32, of the pass before."""
        return self._input(index - self.ahead, tokens, 1)

    def at_once(self, mask: int) -> ForwardInput:
        """The input of one pass for all drafts, a query for each: the newest token, then `mask` alone."""
        places, num, num_rows = self.places, len(self.places.positions), self.fwd.num_rows
        input_ids = places.input_ids.new_full((num_rows, num), mask)
        input_ids[:, 0] = places.input_ids
        device = input_ids.device
        return replace(
            self.first(),
            input_ids=input_ids.flatten(),
            positions=torch.stack(places.positions, dim=1).flatten(),
            cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num,
            seq_lens=places.seq_lens[-1],
            slot_mappings=tuple(
                torch.stack(mapping, dim=1).flatten() for mapping in zip(*places.slot_mappings, strict=True)
            ),
            logits_index=torch.arange(num_rows * num, device=device),
            query_lens=[num] * num_rows,
            num_sampled=[num] * num_rows,
            max_query=num,
            tiles=EvenTiles(num_rows, num, device),
        )

    def block(self, mask: int) -> ForwardInput:
        """The same, where all queries of a row see each other."""
        fwd, num = self.at_once(mask), len(self.places.positions)
        assert num <= MOST_IN_BLOCK, f"a block of {num} queries, for which there are {MOST_IN_BLOCK} bits"
        all_bits = (1 << num) - 1 if num < MOST_IN_BLOCK else -1
        ancestors = torch.full_like(fwd.positions, all_bits)
        return replace(fwd, tree=TreeMask(ancestors, self.places.positions[0].int()))

    def drawn(self, index: int) -> Tensor:
        """[B] int64: the positions of the tokens that pass `index` is to draw."""
        return self.places.drawn[index]

    def _input(self, index: int, tokens: Tensor, num_query: int) -> ForwardInput:
        places, kind = self.places, min(index, 1)
        return replace(
            self.fwd,
            input_ids=tokens,
            positions=places.positions[index],
            cu_seqlens_q=places.cu_seqlens_q[kind],
            seq_lens=places.seq_lens[index],
            slot_mappings=places.slot_mappings[index],
            logits_index=places.logits_index[kind],
            all_wanted=False,
            tree=None,
            query_lens=[num_query] * self.fwd.num_rows,
            num_sampled=[1] * self.fwd.num_rows,
            max_query=num_query,
            attn=(),
            taps=Taps(),
        )


def straightened(fwd: ForwardInput, sampled: SampleOutput, known: Known) -> tuple[ForwardInput, Tensor]:
    """A step with trees as if what stands of each had been a chain: places are positions, and all is causal.

    Returns the input, and of each place which of the step's tokens stands there, [T] int64; behind what
    stands any.
    """
    token, row = owners(fwd.cu_seqlens_q, fwd.num_tokens)
    token, is_token = token.long(), token < fwd.cu_seqlens_q[-1]
    places = (token + (fwd.seq_lens - fwd.cu_seqlens_q[1:])[row]).where(is_token, 0)
    source = token
    if sampled.path is not None:
        depth = places - (known.newest - sampled.num_new)[row]
        node = sampled.path[row, depth.clamp(0, sampled.path.shape[1] - 1)]
        stands = is_token & (depth > 0) & (depth < sampled.num_new[row])
        source = (token - depth + node).where(stands, token)
    return replace(fwd, positions=places, tree=None, attn=()), source


@dataclass(frozen=True, slots=True)
class EvenTiles:
    """Tiles of rows that have equally many queries, made on the device, since a recording copies nothing."""

    num_rows: int
    num_query: int
    device: torch.device

    def get(self, tile_queries: int, make: MakeTiles, *, all_wanted: bool) -> Tensor:
        """[num_tiles, 2] int32, in the order of `prefill_tiles`."""
        num = -(-self.num_query // tile_queries)
        starts = torch.arange(num - 1, -1, -1, dtype=torch.int32, device=self.device) * tile_queries
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.device)
        both = rows[:, None].expand(-1, num), starts.expand(self.num_rows, -1)
        return torch.stack(both, dim=-1).flatten(0, 1)


def last_standing(fwd: ForwardInput, sampled: SampleOutput, known: Known) -> Tensor:
    """[B] int64: among the step's tokens each row's last that stands; of padding any token.

    The place behind it is the newest known token's, which has not been computed yet.
    """
    first = fwd.cu_seqlens_q[:-1].long()
    starts = fwd.seq_lens - fwd.cu_seqlens_q.diff()
    index = first + known.newest - 1 - starts
    if sampled.path is not None:  # of a tree the accepted nodes do not lie side by side
        depth = (sampled.num_new.long() - 1).clamp(min=0)
        index += sampled.path.gather(1, depth[:, None])[:, 0] - depth
    return torch.maximum(index, first).clamp(max=fwd.num_tokens - 1)
