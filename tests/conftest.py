"""What every test may ask for: a tiny checkpoint, and a smaller one that drafts for it."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from pellucid import collector

if TYPE_CHECKING:
    from tests.forked import Nursery

# The same examples in every run, on a machine of any speed: a failure is the change's, and comes again.
settings.register_profile("pellucid", derandomize=True, deadline=None, database=None)
settings.load_profile("pellucid")

# In the background of a script Ctrl-C is ignored, and children inherit that; the tests that send it mean it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart() -> None:
    """What is collected stays: with the garbage collector it would take half as long again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """The garbage collector looks at no module again: an engine that ends has it look at all there is."""
    collector.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Every test draws the same random numbers, whichever tests this process has run before it."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:  # ring 0 does without
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Qwen3 in float32."""
    from tests.tiny import write_checkpoint  # imports torch, which ring 0 does without

    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without its last layer: it often agrees, and often does not."""
    from tests.tiny import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny_draft"), num_hidden_layers=1)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that members of engines are forked from."""
    from tests.forked import Nursery

    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def forked_members(request: pytest.FixtureRequest) -> Iterator[None]:
    """Members of a module's engines find torch imported: tests of what they do, not of their start."""
    import torch

    if torch.cuda.is_available():  # which a process that was forked may not use
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pellucid.nodes.local.spawn", request.getfixturevalue("nursery").spawn)
        yield


@pytest.fixture
def forks(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    """The same for one test."""
    monkeypatch.setattr("pellucid.nodes.local.spawn", nursery.spawn)
    return nursery
