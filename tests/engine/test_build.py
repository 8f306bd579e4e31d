"""From a configuration to an engine: what has been started does not outlive a start that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.config import EngineConfig
from pellucid.engine.build import start_engine
from pellucid.executor.base import EXECUTORS, Capacity
from pellucid.resolve import Resolved


class NoCache:
    """An executor whose workers have no cache, so that no engine can be made for them."""

    num_running = 0

    def start(self, resolved: Resolved) -> Capacity:
        NoCache.num_running += 1
        return Capacity(kinds=(), num_pages=0, max_model_len=64)

    def shutdown(self) -> None:
        NoCache.num_running -= 1


def test_workers_are_ended_if_there_is_no_engine_for_them(tiny: Path) -> None:
    EXECUTORS.register("no_cache", f"{__name__}:NoCache")
    config = EngineConfig.from_options({"model": str(tiny), "device": "cpu", "executor": "no_cache"})
    with pytest.raises(AssertionError, match="0 kinds"):
        start_engine(config)
    assert NoCache.num_running == 0
