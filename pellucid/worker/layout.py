"""How a row's drafts lie behind its last committed token: a chain in order of text, a tree in order of nodes.

The tokens and the KV of n drafts take the n places behind the last committed one (node 0) either way.  In a
chain a token's place is its position.  In a tree several drafts may share a position, not all of them see
each other, and when one path of them has been accepted, its KV must move together.
Legend: T tokens, B rows, S logits, K tokens a row can yield.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pellucid.attention.base import AnyBackend, AttentionLayer, LatentLayer
from pellucid.forward import TreeMask
from pellucid.kernels.sampling.trees import tree_places, tree_places_ref
from pellucid.platform import has_triton
from pellucid.rows import SlotRows, StepRows
from pellucid.sample.branches import IN_ORDER, Branches, TreeBranches
from pellucid.sample.output import SampleOutput
from pellucid.worker.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Where a step's tokens and logits are in their texts."""

    positions: Tensor  # [T] int64
    logit_positions: Tensor  # [S] int64, of the tokens to be chosen
    tree: TreeMask | None = None  # who sees whom
    branches: Branches = IN_ORDER  # the way to the text before each logit


class DraftLayout(Protocol):
    """One shape of drafts.  All on the device; nothing waits for it."""

    def arrange(self, held: SlotRows, step: StepRows) -> Arranged:
        """From places to positions."""
        ...

    def move_accepted(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """Move the KV of accepted drafts to where their positions say.

        block_tables: of the rows, [B, M] each.  roots: [B], the place of each row's node 0.
        """
        ...


class ChainLayout:
    """Places are positions, and what is accepted lies where it belongs."""

    def arrange(self, held: SlotRows, step: StepRows) -> Arranged:
        return Arranged(positions=held.places, logit_positions=held.logit_places)

    def move_accepted(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """There is nothing to move."""


class TreeLayout:
    """Each row's tree is its own.  A row with fewer drafts than were made has the first of them."""

    def __init__(
        self, slots: Slots, *,
        layers: Sequence[AttentionLayer | LatentLayer], backend: AnyBackend, block_size: int,
    ) -> None:  # fmt: skip
        """layers: those whose KV a verification writes, with the caches that they have when it runs."""
        self.slots, self.layers, self.backend, self.block_size = slots, layers, backend, block_size
        on_gpu = slots.device.type == "cuda" and has_triton()
        self._places = tree_places if on_gpu else tree_places_ref

    def arrange(self, held: SlotRows, step: StepRows) -> Arranged:
        trees = self.slots.trees(held.slots)
        assert trees is not None, "drafts are chains"
        there = self._places(step, held, trees)
        return Arranged(
            positions=there.positions,
            logit_positions=there.logit_positions,
            tree=TreeMask(there.ancestors, (held.roots + 1).to(torch.int32)),
            branches=TreeBranches(there.logit_roots, there.paths),
        )

    def move_accepted(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """A row's new tokens but the last are accepted drafts: the one at depth i goes to i behind node 0.

        A step without any drafts tells no path, and has nothing to move.
        """
        if output.path is None:
            return
        depth = torch.arange(1, output.path.shape[1], device=output.path.device)
        moves = (depth < output.num_new[:, None]) & (output.path[:, 1:] != depth)
        ways = [(roots[:, None] + node).where(moves, 0) for node in (output.path[:, 1:], depth)]
        size = self.block_size
        for index, table in enumerate(block_tables):
            sources, targets = (
                (table.gather(1, way // size).long() * size + way % size).where(moves, 0) for way in ways
            )
            for layer in self.layers:
                if layer.table == index:
                    self.backend.move(layer.kv_cache, sources, targets)
