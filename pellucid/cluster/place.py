"""Which device does what: the places of all ranks of all engines.  Pure; one node, for now.

Ranks that share layers are neighbours, then come the stages of a pipeline, then whole copies of the model.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from pellucid.config import ParallelConfig


class Place(NamedTuple):
    """Of one rank."""

    device: int  # index of a GPU, of those that CUDA_VISIBLE_DEVICES shows
    dp: int  # which engine
    pp: int  # which stage of its pipeline
    tp: int  # which rank of that stage


def arrange(parallel: ParallelConfig) -> list[Place]:
    """A place for every rank: an engine's side by side, in the order of the mesh."""
    sizes = parallel.num_engines, parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    return [Place(device, *place) for device, place in enumerate(product(*map(range, sizes)))]
