"""How a row's drafts lie behind its last committed token: a chain in order of text, a tree in order of nodes.

The tokens and the KV of n drafts take the n places behind the last committed one (node 0) either way.  In a
chain a token's place is its position.  In a tree several drafts may share a position, not all of them see
each other, and when one path of them has been accepted, its KV must move together.
Legend: T tokens, B rows, S logits, K tokens a row can yield, n nodes, D depth of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pellucid.attention.base import AttentionBackend, AttentionLayer
from pellucid.forward import TreeMask
from pellucid.sample.branches import IN_ORDER, Branches, TreeBranches
from pellucid.sample.output import SampleOutput
from pellucid.spec.tree import ancestor_bits, depth_of, depths_of, paths_of
from pellucid.worker.slots import RowState


class DraftLayout(Protocol):
    """One shape of drafts.  All on the device; nothing waits for it."""

    def arrange(self, places: Tensor, rows: RowState) -> tuple[Tensor, TreeMask | None]:
        """Positions [T] of the rows' tokens at `places` [T], and who sees whom."""
        ...

    def branches(self, places: Tensor, at: Tensor, row_of: Tensor, rows: RowState) -> Branches:
        """The way to the text before the logits of tokens `at` [S], of rows `row_of` [S]; places: [T]."""
        ...

    def settle(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """Move the KV of accepted drafts to where their positions say.

        block_tables: of the rows, per KV group [B, M].  roots: [B], the place of each row's node 0.
        """
        ...


class ChainLayout:
    """Places are positions, and what is accepted lies where it belongs."""

    def arrange(self, places: Tensor, rows: RowState) -> tuple[Tensor, TreeMask | None]:
        return places, None

    def branches(self, places: Tensor, at: Tensor, row_of: Tensor, rows: RowState) -> Branches:
        return IN_ORDER

    def settle(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """There is nothing to move."""


class TreeLayout:
    """Trees of one shape.  A row with fewer drafts than the tree has the first of them."""

    def __init__(
        self, parents: tuple[int, ...], device: torch.device, *, layers: Sequence[AttentionLayer],
        backend: AttentionBackend, block_sizes: tuple[int, ...],
    ) -> None:  # fmt: skip
        """layers: those whose KV a verification writes, with the caches that they have when it runs.

        block_sizes: tokens, per KV group.
        """
        self.layers, self.backend, self.block_sizes = layers, backend, block_sizes
        depth = depth_of(parents)
        paths = [path + [0] * (depth - len(path)) for path in paths_of(parents)]
        self.depths = torch.tensor(depths_of(parents), device=device)  # [n]
        self.ancestors = torch.tensor(ancestor_bits(parents), device=device)  # [n]
        self.paths = torch.tensor(paths, device=device)  # [n, D]

    def arrange(self, places: Tensor, rows: RowState) -> tuple[Tensor, TreeMask | None]:
        roots = rows.roots
        node = places - roots.repeat_interleave(rows.query_lens, output_size=len(places))
        of_tree = node.clamp(min=0)
        positions = places.where(node <= 0, places - of_tree + self.depths[of_tree])
        return positions, TreeMask(self.ancestors[of_tree], (roots + 1).to(torch.int32))

    def branches(self, places: Tensor, at: Tensor, row_of: Tensor, rows: RowState) -> Branches:
        roots = rows.roots[row_of]
        return TreeBranches(roots, self.paths[(places[at] - roots).clamp(min=0)])

    def settle(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """A row's new tokens but the last are accepted drafts: the one at depth i goes to i behind node 0.

        A step without any drafts tells no path, and has nothing to move.
        """
        if output.path is None:
            return
        depth = torch.arange(1, output.path.shape[1], device=output.path.device)
        moves = (depth < output.num_new[:, None]) & (output.path[:, 1:] != depth)
        ways = [(roots[:, None] + node).where(moves, 0) for node in (output.path[:, 1:], depth)]
        for group, (table, size) in enumerate(zip(block_tables, self.block_sizes, strict=True)):
            sources, targets = (
                (table.gather(1, way // size).long() * size + way % size).where(moves, 0) for way in ways
            )
            for layer in self.layers:
                if layer.group == group:
                    self.backend.move(layer.kv_cache, sources, targets)
