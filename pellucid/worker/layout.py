"""How a row's drafts lie behind its last committed token: a chain in order of text, a tree in order of nodes.

The tokens and the KV of n drafts take the n places behind the last committed one (node 0) either way.  In a
chain a token's place is its position.  In a tree several drafts may share a position, not all of them see
each other, and when one path of them has been accepted, its KV must move together.
Legend: T tokens, B rows, S logits, K tokens a row can yield, n nodes, D depth of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pellucid.attention.base import AnyBackend, AttentionLayer, LatentLayer
from pellucid.forward import TreeMask
from pellucid.kernels.gather_rows import owners
from pellucid.rows import SlotRows
from pellucid.sample.branches import IN_ORDER, Branches, TreeBranches
from pellucid.sample.output import SampleOutput
from pellucid.spec.tree import ancestor_bits, depth_of, depths_of, paths_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Where a step's tokens and logits are in their texts."""

    positions: Tensor  # [T] int64
    logit_positions: Tensor  # [S] int64, of the tokens to be chosen
    tree: TreeMask | None = None  # who sees whom
    branches: Branches = IN_ORDER  # the way to the text before each logit


class DraftLayout(Protocol):
    """One shape of drafts.  All on the device; nothing waits for it."""

    def arrange(self, rows: SlotRows, logits_index: Tensor) -> Arranged:
        """From places to positions.  logits_index: [S], the tokens whose logits are sampled."""
        ...

    def move_accepted(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """Move the KV of accepted drafts to where their positions say.

        block_tables: of the rows, [B, M] each.  roots: [B], the place of each row's node 0.
        """
        ...


class ChainLayout:
    """Places are positions, and what is accepted lies where it belongs."""

    def arrange(self, rows: SlotRows, logits_index: Tensor) -> Arranged:
        return Arranged(positions=rows.places, logit_positions=rows.logit_places)

    def move_accepted(self, block_tables: tuple[Tensor, ...], roots: Tensor, output: SampleOutput) -> None:
        """There is nothing to move."""


class TreeLayout:
    """Trees of one shape.  A row with fewer drafts than the tree has the first of them."""

    def __init__(
        self, parents: tuple[int, ...], device: torch.device, *,
        layers: Sequence[AttentionLayer | LatentLayer], backend: AnyBackend, block_size: int,
    ) -> None:  # fmt: skip
        """layers: those whose KV a verification writes, with the caches that they have when it runs."""
        self.layers, self.backend, self.block_size = layers, backend, block_size
        depth = depth_of(parents)
        paths = [path + [0] * (depth - len(path)) for path in paths_of(parents)]
        self.depths = torch.tensor(depths_of(parents), device=device)  # [n]
        self.ancestors = torch.tensor(ancestor_bits(parents), device=device)  # [n]
        self.paths = torch.tensor(paths, device=device)  # [n, D]

    def arrange(self, rows: SlotRows, logits_index: Tensor) -> Arranged:
        places = rows.places
        _, row = owners(rows.cu_seqlens_q, len(places))
        roots = rows.roots[row]
        node = (places - roots).clamp(min=0)
        positions = places - node + self.depths[node]
        return Arranged(
            positions=positions,
            logit_positions=positions[logits_index] + 1,
            tree=TreeMask(self.ancestors[node], (rows.roots + 1).to(torch.int32)),
            branches=TreeBranches(roots[logits_index], self.paths[node[logits_index]]),
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
