"""Trees of drafts as numbers: who descends from whom.  Knows nothing of tokens.

Node 0 is a row's last committed token, nodes 1.. are its drafts; `parents` names those of drafts 1, 2, ..,
each before its children, so the first few drafts of a tree are a tree, too.
"""

from __future__ import annotations

from collections.abc import Sequence


def parents_of(paths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """From paths, each node's the rank of every token on the way to it, to the parents of nodes 1, 2, ..

    Raises ValueError for a node that comes before its parent, or without one.
    """
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for path in paths:
        if path in nodes or not path or path[:-1] not in nodes:
            raise ValueError(
                f"speculative_token_tree has {list(path)}, which must be new and come behind its parent "
                f"{list(path[:-1])}; sort the paths by length"
            )
        nodes[path] = len(nodes)
    return tuple(nodes[path[:-1]] for path in paths)


def depths_of(parents: tuple[int, ...]) -> list[int]:
    """Every node's distance from node 0."""
    depths = [0]
    for child, parent in enumerate(parents, start=1):
        assert 0 <= parent < child, f"draft {child} has parent {parent}, which must come before it"
        depths.append(depths[parent] + 1)
    return depths


def depth_of(parents: tuple[int, ...]) -> int:
    """The depth of the deepest draft; 0 without drafts."""
    return max(depths_of(parents))


def paths_of(parents: tuple[int, ...]) -> list[list[int]]:
    """For every node the drafts on the way to it, itself the last."""
    paths: list[list[int]] = [[]]
    for child, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], child])
    return paths


def ancestor_bits(parents: tuple[int, ...]) -> list[int]:
    """For every node the drafts that it sees, itself and its ancestors: bit i is draft i + 1, as int64."""
    masks = [sum(1 << (draft - 1) for draft in path) for path in paths_of(parents)]
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
