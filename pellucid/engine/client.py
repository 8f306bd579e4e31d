"""The engine as its users see it, wherever it runs: in this process, or several in processes of their own."""

from __future__ import annotations

from typing import Protocol

from pellucid.config import EngineConfig
from pellucid.engine.build import RunningEngine, start_engine
from pellucid.observe.statistics import EngineStats
from pellucid.sleep.state import Rests
from pellucid.types import Request, SeqUpdate


class EngineClient(Protocol):
    """Requests in, updates out; each request ends in exactly one update with a finish_reason.

    One thread calls `step`; any thread may do the rest.
    """

    @property
    def error(self) -> str | None:
        """Why nothing can be served any more; every request is then answered with it."""
        ...

    @property
    def rest(self) -> Rests:
        """Takes orders to sleep, and to wake; `stats().sleep` tells how far they are followed."""
        ...

    @property
    def has_work(self) -> bool:
        """Is there anything that further steps would bring forward?"""
        ...

    def add(self, request: Request) -> None:
        """Hand in a request; its id is not in use."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early; nothing happens if it has ended by itself meanwhile."""
        ...

    def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        ...

    def step(self) -> list[SeqUpdate]:
        """What has changed since the last call; while there is work, wait a little for a change."""
        ...

    def stats(self) -> EngineStats: ...

    def stats_per_engine(self) -> list[EngineStats]:
        """What `stats` sums up."""
        ...

    def shutdown(self) -> None:
        """Give everything back.  Requests under way get no answer any more."""
        ...


def start_client(config: EngineConfig) -> RunningEngine[EngineClient]:
    """Start one engine in this process; several, or on several machines, in processes of their own.

    Raises ValueError for what the user can mend.
    """
    if config.parallel.num_engines > 1 or config.parallel.num_nodes > 1:
        from pellucid.router.replicas import start_replicas

        return start_replicas(config)
    return start_engine(config)
