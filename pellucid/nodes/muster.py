"""The node of rank 0 gathers the others: each has an agent, and is what it must be."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pellucid.config import EngineConfig
from pellucid.nodes.connection import admit, hear, listen, read_secret, say
from pellucid.nodes.messages import Join, Software, Welcome
from pellucid.nodes.place import Node, arrange
from pellucid.platform import has_gpu
from pellucid.progress import tell

logger = logging.getLogger(__name__)
LOOK_EVERY = 0.5  # seconds


class Muster:
    """All nodes.  Agents serve as long as their connections to here are open."""

    def __init__(self, nodes: list[Node], links: list[socket.socket]) -> None:
        self.nodes = tuple(nodes)  # by rank
        self._links = links

    def close(self) -> None:
        """Let the agents go; they end what is left of their members."""
        for link in self._links:
            link.close()


def gather(config: EngineConfig, is_wanted: Callable[[], bool] = lambda: True) -> Muster:
    """Wait for all other nodes, at most `worker_timeout` seconds.

    is_wanted: asked meanwhile.  Raises ValueError for what the user can mend, also on the nodes that are
    refused.
    """
    parallel = config.parallel
    address, port = parallel.head
    if parallel.own_node:
        raise ValueError(
            f"node_rank is {parallel.own_node}, and requests are for node 0; here run `pellucid agent "
            f"--master-addr {address} --master-port {port}`, or `pellucid serve` with the same options"
        )
    secret, waits = read_secret(), parallel.num_nodes - 1
    found: dict[int, tuple[Node, socket.socket]] = {}
    until = time.monotonic() + parallel.worker_timeout
    tell(f"waiting for {waits} more nodes at {address}:{port}")
    with listen(address, port) as listener:
        listener.settimeout(LOOK_EVERY)
        try:
            while len(found) < waits:
                _check_time(config, found, until, is_wanted)
                with suppress(TimeoutError):
                    _take(listener.accept()[0], secret, config, found)
        except BaseException:
            for _, link in found.values():
                link.close()
            raise
    ranks = sorted(found)
    return Muster([Node(address, 0), *(found[r][0] for r in ranks)], [found[r][1] for r in ranks])


def _check_time(
    config: EngineConfig, found: dict[int, tuple[Node, socket.socket]], until: float,
    is_wanted: Callable[[], bool],
) -> None:  # fmt: skip
    parallel = config.parallel
    if not is_wanted():
        raise RuntimeError("the engine is not wanted any more")
    if time.monotonic() < until:
        return
    missing = ", ".join(str(rank) for rank in range(1, parallel.num_nodes) if rank not in found)
    address, port = parallel.head
    raise ValueError(
        f"after {parallel.worker_timeout:g} s node {missing} of {parallel.num_nodes} has not come; start "
        f"`pellucid agent --master-addr {address} --master-port {port}` there, let it reach that port, or "
        "raise --worker-timeout"
    )


def _take(
    connection: socket.socket, secret: bytes, config: EngineConfig,
    found: dict[int, tuple[Node, socket.socket]],
) -> None:  # fmt: skip
    """Hear who has come, and take it in if it is what it must be."""
    try:
        admit(connection, secret)
        join = hear(connection, Join)
        free = [rank for rank in range(1, config.parallel.num_nodes) if rank not in found]
        rank = free[0] if join.rank is None else join.rank
        refusal = _refusal(join, rank, free, config)
        say(connection, Welcome(rank, refusal))
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        logger.warning("a connection to the master port was closed: %s", error)
        connection.close()
        return
    if refusal is not None:
        connection.close()
        raise ValueError(refusal)
    connection.settimeout(None)
    logger.info("node %d is %s, with %d GPUs", rank, join.address, join.num_gpus)
    found[rank] = Node(join.address, join.port), connection


def _refusal(join: Join, rank: int, free: list[int], config: EngineConfig) -> str | None:
    """Why this node cannot be taken; None if it can."""
    parallel, wants_gpu = config.parallel, config.device.device != "cpu"
    name = f"node {rank} ({join.address})"
    if rank not in free:
        return f"{name} is one too many: of {parallel.num_nodes} nodes, {free} are free; see --node-rank"
    if join.software != (ours := Software.here()):
        return f"{name} runs {join.software}, the node of rank 0 {ours}; install the same on both"
    needs = sum(place.node == rank for place in arrange(parallel))
    if join.num_gpus < needs and has_gpu() and wants_gpu:
        return (
            f"{name} shows {join.num_gpus} GPUs, and {needs} ranks belong there: lower the parallel sizes, "
            "or see CUDA_VISIBLE_DEVICES there"
        )
    return None
