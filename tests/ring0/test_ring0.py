"""Autoregression's answer, whatever the configuration; and nothing about how it ran shows in it."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pellucid.types import FinishReason
from tests.ring0.model import FULL, Windows
from tests.ring0.mutants import EQUIVALENT, FAULTS, mutate
from tests.ring0.simulate import Config, Simulation, random_requests, run
from tests.ring0.worker import TREES, WorkerConfig

ROOT = Path(__file__).parents[2]
NUM_CONFIGS = 300


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # dying workers are part of it


def test_every_random_configuration_gives_autoregressions_answers() -> None:
    total = Counter[str]()
    for seed in range(NUM_CONFIGS):
        total += run(seed)
    rare = [name for name in Counter(run(0)) if total[name] < 5]
    assert not rare, f"the configurations hardly show {rare}: {total}"


def config_for(
    pp: int = 1,
    depth: int = 1,
    drafts: str = "none",
    budget: int = 64,
    num_blocks: int = 200,
    block_size: int = 4,
    caching: bool = True,
    death: tuple[str, int] | None = None,
    windows: Windows = FULL,
) -> Config:
    worker = WorkerConfig(
        pp=pp,
        parents=TREES[drafts],
        block_size=block_size,
        num_pages=num_blocks,
        windows=windows,
        num_slots=6,
        budget=budget,
        death=death,
    )
    return Config(worker=worker, depth=depth, caching=caching, vary_drafts=False)


def repr_of(config: Config) -> str:
    worker, cache = config.worker, "cache" if config.caching else "nocache"
    blocks = f"{worker.num_pages}x{worker.block_size}{worker.windows if worker.windows != FULL else ''}"
    return f"pp{worker.pp}-depth{config.depth}-k{worker.num_spec}-budget{worker.budget}-{blocks}-{cache}"


@pytest.mark.parametrize(
    "config",
    [
        config_for(),
        config_for(depth=3),
        config_for(pp=2, depth=2),
        config_for(pp=4, depth=5),
        config_for(pp=3, depth=1),
        config_for(drafts="chain"),
        config_for(drafts="tree", depth=2),
        config_for(budget=2),
        config_for(budget=5, depth=2, drafts="tree", pp=2),
        config_for(num_blocks=13, drafts="chain"),
        config_for(num_blocks=13, depth=2),
        config_for(block_size=16, num_blocks=50),
        config_for(caching=False, num_blocks=13),
        config_for(windows=(None, 5, None, 5), num_blocks=60),
        config_for(windows=(None, 5, 5, 5), num_blocks=60, budget=7, depth=2, drafts="tree"),
        config_for(windows=(9, 9, 3, 3), num_blocks=30, budget=5, pp=2, depth=3),
    ],
    ids=repr_of,
)
def test_the_same_requests_get_the_same_answers_in_every_mode(config: Config) -> None:
    requests = random_requests(random.Random(11), windows=config.worker.windows)
    simulation = Simulation(config, requests, random.Random(12))
    simulation.run()  # compares with the one truth
    reasons = {answer.end.finish_reason for answer in simulation.answers.values() if answer.end}
    assert reasons <= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR}


def test_a_starved_pool_preempts_and_shares_and_still_answers() -> None:
    requests = random_requests(random.Random(14))
    stats = Simulation(config_for(num_blocks=13), requests, random.Random(1)).run()
    assert stats["preemptions"] > 0 and stats["cached tokens"] > 0


@pytest.mark.parametrize("where", ["submit", "result"])
def test_when_a_worker_dies_every_request_is_answered(where: str) -> None:
    config = config_for(depth=2, death=(where, 3))
    simulation = Simulation(config, random_requests(random.Random(7)), random.Random(3))
    simulation.run()
    errors = [answer.end.error for answer in simulation.answers.values() if answer.end and answer.end.error]
    assert any("worker 0 has died" in error for error in errors)


@pytest.mark.parametrize("name", ["4 no epoch check", "8 failed load published", "10 nobody is admitted"])
def test_a_broken_law_is_noticed(name: str) -> None:
    """A sample of the mutants; `python -m tests.ring0.mutants` runs them all."""
    command = [sys.executable, "-m", "tests.ring0.mutants", "100", name]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert report.returncode == 0 and report.stdout.startswith("caught"), report.stdout + report.stderr


@pytest.mark.parametrize("name", FAULTS | EQUIVALENT)
def test_every_mutant_still_finds_what_it_changes_and_compiles(name: str) -> None:
    edits = (FAULTS | EQUIVALENT)[name]
    for module in {module for module, _, _ in edits}:
        mutate(module, edits)
