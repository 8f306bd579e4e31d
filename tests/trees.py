"""Trees of drafts as numbers, worked out one node at a time: what kernels are held against.

Node 0 is a row's last committed token, nodes 1.. are its drafts; `parents` names those of drafts 1, 2, ..
"""

from __future__ import annotations


def depths_of(parents: tuple[int, ...]) -> list[int]:
    """Every node's distance from node 0."""
    depths = [0]
    for child, parent in enumerate(parents, start=1):
        assert 0 <= parent < child, f"draft {child} has parent {parent}, which must come before it"
        depths.append(depths[parent] + 1)
    return depths


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
