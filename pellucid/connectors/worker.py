"""KV transfer in a worker: hands a plan's jobs to the connector's half here, at the right moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pellucid.connectors.base import KV_CONNECTORS, Ended, Jobs, WorkerConnector, WorkerDoor
from pellucid.features.base import WorkerFacts, WorkerFeature
from pellucid.registry import load_object

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity


class KVTransfer(WorkerFeature):
    """Loads go ahead of a plan's forward, all else behind it."""

    def __init__(self, facts: WorkerFacts) -> None:
        config, say = facts.resolved.kv_transfer, facts.say
        assert config is not None, "a feature that nobody has asked for"

        def done(number: int, ok: bool, seconds: float = 0.0) -> None:
            say("kv_transfer", Ended(number, ok, seconds))

        door = WorkerDoor(
            resolved=facts.resolved,
            device=facts.device,
            rank=facts.rank,
            num_ranks=facts.resolved.num_workers,
            done=done,
            load_seconds=config.kv_load_seconds,
        )
        worker = load_object(KV_CONNECTORS.load(config.kv_connector).worker)
        self.connector: WorkerConnector = worker(door, config.kv_connector_extra_config)

    def bind(self, pages: Tensor | None, capacity: Capacity) -> None:
        if pages is None:
            self.connector.release()
        else:
            self.connector.register(pages, capacity)

    def ahead(self, ride: Jobs) -> None:
        if loads := [job for job in ride.jobs if job.is_load]:
            self.connector.start(loads)

    def behind(self, ride: Jobs) -> None:
        if others := [job for job in ride.jobs if not job.is_load]:
            self.connector.start(others)

    def shutdown(self) -> None:
        self.connector.close()
