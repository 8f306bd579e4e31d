"""Which device of which node does what: the places of all ranks of all engines.  Pure.

Ranks that share layers are neighbours, then come the stages of a pipeline, then whole copies of the model;
nodes are filled in this order, each with equally many.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from pellucid.config import ParallelConfig


class Place(NamedTuple):
    """Of one rank."""

    device: int  # index of a GPU of its node, of those that CUDA_VISIBLE_DEVICES shows there
    dp: int  # which engine
    pp: int  # which stage of its pipeline
    tp: int  # which rank of that stage
    node: int = 0


class Node(NamedTuple):
    """A machine with ranks."""

    address: str  # at which the others reach it
    port: int  # at which its agent listens there; 0 if it has none


def arrange(parallel: ParallelConfig) -> list[Place]:
    """A place for every rank: an engine's side by side, in the order of the mesh."""
    sizes = parallel.num_engines, parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    places = list(product(*map(range, sizes)))
    num_here = len(places) // max(1, parallel.num_nodes)
    return [
        Place(index % num_here, dp, pp, tp, index // num_here) for index, (dp, pp, tp) in enumerate(places)
    ]


def named(name: str, place: Place, nodes: tuple[Node, ...]) -> str:
    """What a member is called: with its node, if there are several."""
    return f"{name} on node {place.node} ({nodes[place.node].address})" if nodes else name


def addresses(
    parallel: ParallelConfig, nodes: tuple[Node, ...], place: Place
) -> tuple[str | None, str | None]:
    """Of a rank's machine, and of that of the first rank that it meets; None if there is one machine."""
    first = next(p for p in arrange(parallel) if parallel.shares_experts or p.dp == place.dp)
    return (nodes[place.node].address, nodes[first.node].address) if nodes else (None, None)
