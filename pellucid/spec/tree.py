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
