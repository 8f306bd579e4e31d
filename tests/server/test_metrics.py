"""What /metrics says, beside a count by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pellucid.observe.statistics import STEP_TOKENS, EngineStats
from pellucid.server.metrics import Metrics
from pellucid.sleep.state import AWAKE, SleepState
from pellucid.types import FinishReason, SeqUpdate
from tests.schedule.device import make_request

FIRST = EngineStats(
    num_steps=101, num_step_tokens=102, num_steps_by_tokens=(1,) * (1 + len(STEP_TOKENS)),
    num_prompt_tokens=103, num_cached_tokens=3, num_sampled_tokens=105, num_preemptions=106,
    num_drafts=107, num_draft_tokens=108,
    num_accepted_tokens=109, num_accepted_per_position=(60, 49), host_seconds=1.0, wait_seconds=2.0,
    num_late_compilations=0, num_running=110, num_waiting=111, kv_usage=0.25, is_synthetic=False,
    num_verifying_steps=40, draft_seconds_saved=-1.5, sleep=AWAKE,
    of_features={"toy_rows_now": 7, "toy_rows": 9},
)  # fmt: skip
OTHER = replace(
    FIRST, num_prompt_tokens=5, num_accepted_per_position=(1, 0), sleep=SleepState(level=2), of_features={}
)
OF_ENGINES = {
    "vllm:num_requests_running": 110, "vllm:num_requests_waiting": 111, "vllm:kv_cache_usage_perc": 0.25,
    "vllm:prompt_tokens_total": 103, "vllm:prompt_tokens_cached_total": 3,
    "vllm:generation_tokens_total": 105,
    "vllm:prefix_cache_queries_total": 103, "vllm:prefix_cache_hits_total": 3,
    "vllm:num_preemptions_total": 106, "vllm:spec_decode_num_drafts_total": 107,
    "vllm:spec_decode_num_draft_tokens_total": 108, "vllm:spec_decode_num_accepted_tokens_total": 109,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total position=0": 60,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total position=1": 49,
    "pellucid:spec_decode_num_steps_total state=on": 40, "pellucid:spec_decode_num_steps_total state=off": 61,
    "pellucid:spec_decode_saved_seconds": -1.5, "pellucid:toy_rows_now": 7, "pellucid:toy_rows_total": 9,
    "vllm:prompt_tokens_by_source_total source=local_compute": 100,
    "vllm:prompt_tokens_by_source_total source=local_cache_hit": 3,
    "vllm:engine_sleep_state sleep_state=awake": 1, "vllm:engine_sleep_state sleep_state=discard_all": 0,
    "vllm:iteration_tokens_total_sum": 102, "vllm:iteration_tokens_total_count": 1 + len(STEP_TOKENS),
    "vllm:iteration_tokens_total_bucket le=8.0": 2,
}  # fmt: skip


@pytest.fixture
def told() -> tuple[Metrics, list[float]]:
    """Of two engines; and what its clock says."""
    now = [0.0]
    cache = SimpleNamespace(enable_prefix_caching=True, gpu_memory_utilization=0.5)
    speculative = SimpleNamespace(method="toy", num_speculative_tokens=2, rejection_sample_method="standard")
    user = SimpleNamespace(cache=cache)
    resolved = SimpleNamespace(speculative=speculative, user=user, block_size=16, kv_dtype="auto")
    llm: Any = SimpleNamespace(
        max_model_len=100,
        watch=lambda _: None,
        stats_per_engine=[FIRST, OTHER],
        resolved=resolved,
        num_pages=9,
    )
    return Metrics(llm, "it", clock=lambda: now[0]), now


def read(metrics: Metrics, engine: str = "0") -> dict[str, float]:
    """By name and labels, all but those that say whose it is; of one engine, or of none."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = sorted(sample.labels.items() - {("model_name", "it"), ("engine", engine)})
            if sample.labels.get("engine", engine) == engine:
                values[" ".join([sample.name, *map("=".join, labels)])] = sample.value
    return values


def test_what_engines_count_has_its_name_and_its_engine(told: tuple[Metrics, list[float]]) -> None:
    values = read(told[0])
    assert {name: values[name] for name in OF_ENGINES} == OF_ENGINES
    other = read(told[0], "1")
    assert other["vllm:prompt_tokens_total"] == 5 and other["pellucid:toy_rows_total"] == 0
    assert other["vllm:engine_sleep_state sleep_state=discard_all"] == 1
    assert other["vllm:spec_decode_num_accepted_tokens_per_pos_total position=0"] == 1


def test_lives_of_requests_are_measured_from_one_event_to_the_next(told: tuple[Metrics, list[float]]) -> None:
    """Two completions of a prompt that came at 1; one is never scheduled."""
    metrics, now = told
    metrics.accepted(2)
    for name in ("a_0", "a_1"):
        metrics.begins(make_request(name, 12, arrival=1.0, max_tokens=30))
    now[0] = 4.0
    metrics.advances(SeqUpdate("a_0", [7], first_scheduled=3.0, num_cached_tokens=10), None)
    now[0] = 4.5
    metrics.advances(SeqUpdate("a_0", [7, 7, 7]), None)
    now[0] = 6.0
    metrics.advances(SeqUpdate("a_0", [7], finish_reason=FinishReason.STOP), FinishReason.STOP)
    now[0] = 9.0
    metrics.advances(SeqUpdate("a_1", []), FinishReason.ABORT)
    metrics.answered("POST", "/v1/completions", 200, 8.5)
    expected = {
        "time_to_first_token_seconds": (1, 3.0), "inter_token_latency_seconds": (2, 2.0),
        "request_time_per_output_token_seconds": (1, 0.5), "e2e_request_latency_seconds": (2, 5.0 + 8.0),
        "request_queue_time_seconds": (1, 2.0), "request_inference_time_seconds": (1, 3.0),
        "request_prefill_time_seconds": (1, 1.0), "request_decode_time_seconds": (1, 2.0),
        "request_prompt_tokens": (2, 24), "request_prefill_kv_computed_tokens": (1, 2),
        "request_generation_tokens": (2, 5), "request_max_num_generation_tokens": (1, 5),
        "request_params_max_tokens": (2, 60), "request_params_n": (1, 2),
    }  # fmt: skip
    values = read(metrics)
    assert {name: (values[f"vllm:{name}_count"], values[f"vllm:{name}_sum"]) for name in expected} == expected
    assert [values[f"vllm:time_to_first_token_seconds_bucket le={bound}"] for bound in (2.5, 5.0)] == [0, 1]
    name = "vllm:request_success_total finished_reason"
    ended = {reason.value: values[f"{name}={reason.value}"] for reason in FinishReason}
    assert ended == {**dict.fromkeys(ended, 0), "stop": 1, "abort": 1}
    answered = "handler=/v1/completions method=POST"
    assert values[f"http_requests_total {answered} status=200"] == 1
    assert values[f"http_request_duration_seconds_sum {answered}"] == 8.5


def test_steps_that_are_told_of_together_are_counted_one_by_one(told: tuple[Metrics, list[float]]) -> None:
    metrics, now = told
    metrics.begins(make_request("a"))
    metrics.advances(SeqUpdate("a", [1]), None)
    now[0] = 0.6
    update = SeqUpdate("a", [2])
    for newer in (SeqUpdate("a", [3, 4]), SeqUpdate("a", [5], finish_reason=FinishReason.LENGTH)):
        update.extend(newer)
    metrics.advances(update, FinishReason.LENGTH)
    values = read(metrics)
    assert values["vllm:inter_token_latency_seconds_count"] == 3
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.6)
