"""The machine's limit, against figures computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import pellucid
from pellucid.cli.limits import Machine, ModelCost, Step, ideal_steps, run_limit
from pellucid.cli.workloads import nano
from pellucid.models.text_config import text_config

SHAPES = Path(pellucid.__file__).parent / "assets" / "shapes"
H200 = Machine(bandwidth=4.3e12, flops=790e12)


def cost_of(shape: str) -> ModelCost:
    return ModelCost.from_config(text_config(json.loads((SHAPES / f"{shape}.json").read_text())))


TINY = ModelCost(
    dense_weights=100, head_weights=20, kv_bytes_per_token=8, attention_flops=3, bytes_per_weight=2
)


def test_qwen3_0_6b_has_1_19_gb_of_weights_and_112_kib_of_kv_a_token():
    cost = cost_of("qwen3-0.6b")
    assert 2 * (cost.dense_weights + cost.head_weights) == pytest.approx(1.19e9, rel=0.005)
    assert cost.kv_bytes_per_token == 112 * 1024
    assert 2 * cost.dense_weights == pytest.approx(0.88e9, rel=0.005)  # FLOPs a prompt token
    assert cost.attention_flops == 28 * 16 * 128 * 4


def test_an_untied_model_reads_its_head_but_not_its_embedding():
    cost = cost_of("qwen3-8b")
    assert 2 * (cost.dense_weights + cost.head_weights) == pytest.approx(15.14e9, rel=0.001)
    assert cost.kv_bytes_per_token == 144 * 1024


def test_a_multimodal_model_s_text_is_what_is_counted():
    cost = cost_of("gemma3-4b")
    assert 2 * (cost.dense_weights + cost.head_weights) == pytest.approx(7.76e9, rel=0.001)
    assert cost.kv_bytes_per_token == 136 * 1024


def test_float32_doubles_what_bfloat16_moves():
    config = json.loads((SHAPES / "qwen3-0.6b.json").read_text())
    assert ModelCost.from_config(config, bytes_per_weight=4).kv_bytes_per_token == 224 * 1024
    assert ModelCost.from_config(config, bytes_per_weight=4, bytes_per_kv=1).kv_bytes_per_token == 56 * 1024


def test_a_model_without_grouped_heads_or_head_dim_has_heads_of_its_width():
    config: dict[str, object] = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 16,
        "vocab_size": 10,
    }  # fmt: skip
    cost = ModelCost.from_config(config)
    assert cost.dense_weights == 2 * (8 * 3 * 8 + 8 * 8 + 3 * 8 * 16)
    assert cost.kv_bytes_per_token == 2 * 2 * 8 * 2


def test_a_config_that_lacks_a_number_is_refused_by_name():
    with pytest.raises(ValueError, match="num_hidden_layers"):
        ModelCost.from_config({})


def test_a_step_moves_weights_once_and_each_sequences_kv():
    moved, flops = TINY.step(Step(num_tokens=3, num_samples=2, read=10, pairs=13))
    assert moved == 2 * 120 + 8 * (10 + 3)
    assert flops == 2 * (100 * 3 + 20 * 2) + 3 * 13


def test_a_batch_of_experts_reads_those_it_hits():
    cost = cost_of("qwen3-30b-a3b")
    one, _ = cost.step(Step(num_tokens=1, num_samples=1, read=0, pairs=1))
    many, _ = cost.step(Step(num_tokens=256, num_samples=256, read=0, pairs=256))
    assert one == pytest.approx(6.08e9, rel=0.002)
    assert many == pytest.approx(60.44e9, rel=0.002)


def test_engines_that_divide_experts_read_each_once_and_all_else_each_for_itself():
    cost = cost_of("qwen3-30b-a3b")
    step = Step(num_tokens=512, num_samples=512, read=0, pairs=512)
    one, two = cost.step(step), replace(cost, num_copies=2).step(step)
    assert two[0] - one[0] == 2 * (cost.dense_weights + cost.head_weights) and two[1] == one[1]
    limits = [
        run_limit(replace(cost, num_copies=num), [(16, 8)] * 64, 64, H200.times(num)).seconds
        for num in (1, 2)
    ]
    assert limits[0] / 2 < limits[1] < limits[0] / 1.8


def test_a_request_takes_one_step_for_its_prompt_and_one_for_each_further_token():
    assert list(ideal_steps([(4, 3)], max_num_seqs=8)) == [
        Step(num_tokens=4, num_samples=1, read=0, pairs=4 + 3 + 2 + 1),
        Step(num_tokens=1, num_samples=1, read=4, pairs=5),
        Step(num_tokens=1, num_samples=1, read=5, pairs=6),
    ]


def test_a_request_that_finds_no_slot_begins_when_one_is_free():
    steps = list(ideal_steps([(4, 2), (5, 1)], max_num_seqs=1))
    assert [step.num_tokens for step in steps] == [4, 1, 5]


def test_prompts_share_a_step_with_decodes():
    steps = list(ideal_steps([(4, 1), (6, 3), (5, 1)], max_num_seqs=2))
    assert [(step.num_tokens, step.num_samples) for step in steps] == [(10, 2), (1 + 5, 2), (1, 1)]


def test_every_token_is_computed_once_whatever_the_slots():
    requests = [(5 * i + 1, i + 1) for i in range(20)]
    expected = sum(prompt + output - 1 for prompt, output in requests)
    for slots in (1, 3, 100):
        assert sum(step.num_tokens for step in ideal_steps(requests, slots)) == expected


def test_the_limit_is_the_larger_of_two_times_step_by_step():
    slow_memory = run_limit(TINY, [(4, 2)], 1, Machine(bandwidth=1.0, flops=1e9))
    assert slow_memory.seconds == slow_memory.num_bytes == 2 * 240 + 8 * (4 + 4 + 1)
    slow_cores = run_limit(TINY, [(4, 2)], 1, Machine(bandwidth=1e9, flops=1.0))
    assert slow_cores.seconds == slow_cores.flops == 2 * (100 * 5 + 20 * 2) + 3 * (10 + 5)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [("0.6b", 3.68), ("4b", 7.41), ("8b", 10.29), ("32b", 34.00), ("30b-a3b", 17.42)],
)
def test_the_nano_benchmark_cannot_run_faster_than_this(shape, seconds):
    limit = run_limit(cost_of(f"qwen3-{shape}"), nano().requests, 256, H200)
    assert limit.seconds == pytest.approx(seconds, abs=0.01)
    assert limit.num_steps == 1024  # the longest answer


def test_deepseek_v2_lite_keeps_1152_bytes_a_token_and_layer_and_shares_two_experts():
    cost = cost_of("deepseek-v2-lite")
    assert cost.kv_bytes_per_token == 27 * 1152
    assert 2 * cost.expert_weights * cost.num_experts == pytest.approx(28.8e9, rel=0.001)
    dense, attention = 3 * 2048 * 10_944, 2048 * (16 * 192 + 576) + 16 * (256 * 512 + 128 * 2048)
    assert cost.dense_weights == 27 * attention + dense + 26 * 2048 * (64 + 3 * 2 * 1408)
