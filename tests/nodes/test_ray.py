"""Ray, if it is installed (`make test-all` installs it): two of its nodes on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pellucid import LLM, SamplingParams
from tests.llm.test_invariance import BASE

ray: Any = pytest.importorskip("ray")
PROMPTS = ["the", "a quick fox", "one two three four", "lazy"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Each node has one CPU, so no two ranks are on the same."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(cluster.address, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_two_nodes_of_ray_say_what_one_process_says_and_one_that_dies_is_named(
    cluster: Any, tiny: Path
) -> None:
    with LLM(str(tiny), **BASE) as llm:
        expected = tokens(llm)
    options = {**BASE, "distributed_executor_backend": "ray", "pipeline_parallel_size": 2}
    with LLM(str(tiny), **options) as llm:
        assert tokens(llm) == expected
    with LLM(str(tiny), **options) as llm:  # the places were given back
        team = llm.llm_engine.engine.executor._team  # type: ignore[attr-defined]
        for prompt in PROMPTS:
            llm.llm_engine.add_request(prompt, LONG)
        llm.llm_engine.step()
        os.kill(team.members[1].process.pid, signal.SIGKILL)
        began, answers = time.monotonic(), []
        while not llm.llm_engine.is_finished():
            answers += [output for output in llm.llm_engine.step() if output.finished]
            assert time.monotonic() - began < 10
        assert [answer.outputs[0].finish_reason for answer in answers] == ["error"] * len(PROMPTS)
        assert "worker 1 on node " in (llm.llm_engine.engine.error or "")
