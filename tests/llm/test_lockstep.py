"""Engines that divide experts: what they cannot do beside, and what becomes of them when one dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pellucid import LLM, SamplingParams
from pellucid.router import replicas
from tests.llm.test_experts import sparse
from tests.processes import members

pytestmark = pytest.mark.usefixtures("forked_members")

__all__ = ["sparse"]
IN_STEP = {"data_parallel_size": 2, "enable_expert_parallel": True}
BASE = {"device": "cpu", "dtype": "float32", "cpu_kv_cache_gib": 0.05, "worker_timeout": 2.0}
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_when_one_dies_all_requests_end_with_its_name(
    sparse: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "GRACE", 1.0)
    others = members()
    with LLM(str(sparse), **BASE, **IN_STEP) as llm:
        pids = {name: pid for pid, name in members().items() if pid not in others}
        engine = llm.llm_engine
        for index in range(6):
            engine.add_request([1, 2, index], LONG)
        while not any(output.outputs[0].token_ids for output in engine.step()):
            pass
        os.kill(pids["engine 1"], number)
        began, errors = time.monotonic(), set[str]()
        while engine.has_unfinished_requests():
            errors |= {output.error for output in engine.step() if output.error is not None}
        assert time.monotonic() - began < 30
        assert len(errors) == 1
        assert "engine 1" in errors.pop()
        assert members() == others, "engines in step end together"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"enable_lora": True}, "enable_lora"),
        ({"kv_offloading_size": 1}, "kv_offloading_size"),
    ],
    ids=["slices", "stages", "adapters", "tiers"],
)
def test_what_cannot_be_had_beside_is_named(sparse: Path, options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=f"work in step, for which {name} cannot be had; leave one"):
        LLM(str(sparse), **BASE, **IN_STEP, **options)


def test_engines_in_step_do_not_sleep(sparse: Path) -> None:
    with (
        LLM(str(sparse), **BASE, **IN_STEP) as llm,
        pytest.raises(ValueError, match="other engines need its"),
    ):
        llm.sleep()


def test_a_model_without_experts_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel has 2 engines divide the model's experts"):
        LLM(str(tiny), **BASE, **IN_STEP)
