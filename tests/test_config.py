"""What options may be, how layers are cut among pipeline stages, and how many plans fill the pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pellucid.config import EngineConfig, all_options
from pellucid.models.checkpoint import Checkpoint
from pellucid.platform import Platform
from pellucid.resolve import Resolved, resolve
from tests.schedule.device import Device, make_request, make_scheduler, step


def resolved(
    num_layers: int, *, device: str = "cpu", platform: Platform | None = None, **options: object
) -> Resolved:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    checkpoint = Checkpoint(name="m", path=Path("m"), config=config)
    platform = platform or Platform(device=device, name=device, memory_total=0, memory_free=0, num_cores=8)
    return resolve(EngineConfig.from_options(options), platform, checkpoint)


T4 = Platform(device="cuda", name="T4", memory_total=0, memory_free=0, num_cores=8, capability=(7, 5))


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        (T4, r"the GPU is T4 \(compute capability 7\.5\); the kernels need 8\.0 .*, or device='cpu'"),
        (replace(T4, name="MI300X", capability=(9, 4), is_hip=True), "the GPU is MI300X, an AMD one"),
        (replace(T4, capability=(9, 0), has_triton=False), "Triton is not installed"),
    ],
    ids=["Turing", "ROCm", "no Triton"],
)
def test_a_gpu_without_kernels_is_refused_at_the_start(platform: Platform, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolved(4, platform=platform)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "layers"),
    [
        (28, 1, (28,)),
        (28, 2, (14, 14)),
        (7, 2, (4, 3)),  # the last stage has the head
        (32, 3, (11, 11, 10)),
        (31, 3, (10, 11, 10)),  # first those that have neither embedding nor head
        (63, 4, (16, 16, 16, 15)),
        (4, 4, (1, 1, 1, 1)),
    ],
)
def test_layers_are_cut_evenly(num_layers: int, num_stages: int, layers: tuple[int, ...]) -> None:
    choice = resolved(num_layers, pipeline_parallel_size=num_stages)
    assert choice.stage_layers == layers
    assert choice.num_pipeline_stages == choice.num_workers == num_stages


@pytest.mark.parametrize("split", ["10,12,6", " 10, 12, 6", [10, 12, 6]])
def test_layers_are_cut_by_hand(split: object) -> None:
    choice = resolved(28, pipeline_parallel_size=3, pipeline_split=split)
    assert choice.stage_layers == (10, 12, 6)
    assert choice.pipeline_cuts == (10, 22)


@pytest.mark.parametrize("split", ["14,14", "28,0,0", "20,10,-2", "1,2,3"])
def test_a_cut_that_does_not_add_up_is_refused_with_its_numbers(split: str) -> None:
    words = f"pipeline_split is {split}: .* pipeline_parallel_size is 3 and the model has 28 layers"
    with pytest.raises(ValueError, match=words):
        resolved(28, pipeline_parallel_size=3, pipeline_split=split)


@pytest.mark.parametrize("split", ["14,x", [14, None], [14.5, 13.5]], ids=str)
def test_a_cut_that_is_not_of_whole_numbers_is_refused(split: object) -> None:
    with pytest.raises(ValueError, match="pipeline_split is .*, must be whole numbers, as 10,18"):
        resolved(28, pipeline_parallel_size=2, pipeline_split=split)


@pytest.mark.parametrize(("device", "depths"), [("cpu", [1, 2, 4]), ("cuda", [2, 3, 5])])
def test_as_many_plans_as_stages_are_under_way_and_one_more_on_a_gpu(device: str, depths: list[int]) -> None:
    choices = [resolved(28, device=device, pipeline_parallel_size=num) for num in (1, 2, 4)]
    assert [choice.depth for choice in choices] == depths


def test_on_a_gpu_decodes_take_no_room_from_prompts() -> None:
    choice = resolved(28, device="cuda")
    budget, num_seqs = choice.max_num_batched_tokens, choice.max_num_seqs
    scheduler = make_scheduler(budget=budget, num_slots=num_seqs, max_model_len=200, num_blocks=10_000)
    for i in range(num_seqs):
        scheduler.add(make_request(str(i), list(range(128 * i, 128 * (i + 1)))))
    device = Device()
    sizes = [[row.num_query for row in step(scheduler, device)[0].rows] for _ in range(3)]
    assert sizes == [[128] * 130, [1] * 130 + [128] * 126, [1] * 256]


@pytest.mark.parametrize(("device", "budget"), [("cpu", 2048), ("cuda", 16384 + 40)])
def test_the_budget_of_a_step_is_the_users_or_the_devices(device: str, budget: int) -> None:
    assert resolved(2, device=device, max_num_seqs=40).max_num_batched_tokens == budget
    assert resolved(2, device=device, max_num_batched_tokens=99).max_num_batched_tokens == 99


def test_ranks_share_the_cores() -> None:
    choice = resolved(28, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert (choice.num_workers, choice.num_threads) == (4, 2)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_num_batched_tokens", 1, "max_num_batched_tokens is 1, must be at least 2"),
        ("num_gpu_blocks_override", 0, r"num_gpu_blocks_override is 0, must be at least 1 \(or -1"),
        ("num_kvcache_blocks", -7, "num_gpu_blocks_override is -7, must be at least 1"),
        ("cpu_kv_cache_gib", float("nan"), r"cpu_kv_cache_gib is nan, must be above 0 \(GiB\)"),
        ("cpu_kv_cache_gib", -1, "cpu_kv_cache_gib is -1, must be above 0"),
    ],
)
def test_a_number_too_small_is_refused_before_anything_starts(name: str, value: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolved(2, **{name: value})


def test_minus_one_leaves_the_blocks_to_be_measured() -> None:
    assert resolved(2, num_kvcache_blocks=-1).user.cache.num_gpu_blocks_override == -1


def test_a_target_is_a_time_or_none() -> None:
    for target in (None, 0, 0.5, 20):
        assert resolved(2, target_itl_ms=target).user.scheduler.target_itl_ms == target
    for target in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"target_itl_ms is .*, must be at least 0 \(0 is no limit\)"):
            resolved(2, target_itl_ms=target)


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("max_num_seqs", "8", "a whole number"),
        ("max_num_seqs", 2.5, "a whole number"),
        ("tensor_parallel_size", "2", "a whole number"),
        ("num_kvcache_blocks", True, "a whole number"),
        ("seed", "a", "a whole number"),
        ("gpu_memory_utilization", "0.9", "a number"),
        ("worker_timeout", True, "a number"),
        ("enable_prefix_caching", "false", "True or False"),
        ("enforce_eager", 1, "True or False"),
        ("model", 5, "a text"),
        ("pipeline_split", 5, "a text or a list of whole numbers"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_option_and_value(
    name: str, value: object, meaning: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value!r}, must be {meaning}$"):
        EngineConfig.from_options({name: value})


def test_every_default_is_of_its_options_type_and_none_is_the_default() -> None:
    defaults = {field.name: field.default for _, field in all_options()}
    assert EngineConfig.from_options(defaults) == EngineConfig()
    assert EngineConfig.from_options(dict.fromkeys(defaults)) == EngineConfig()


def test_numpys_numbers_and_paths_are_taken() -> None:
    options = {"max_num_seqs": np.int64(8), "gpu_memory_utilization": np.float32(0.5), "seed": np.uint8(3)}
    config = EngineConfig.from_options({**options, "model": Path("m"), "pipeline_split": (1, 2)})
    assert (config.scheduler.max_num_seqs, config.cache.gpu_memory_utilization) == (8, 0.5)
    assert type(config.model.seed) is int, "which random takes"
    assert (config.model.model, config.parallel.pipeline_split) == ("m", (1, 2))


def test_executors_have_the_names_of_vllm_too() -> None:
    assert resolved(2, distributed_executor_backend="mp").executor == "multiproc"
    assert resolved(2, distributed_executor_backend="uni").executor == "local"
    assert resolved(2, distributed_executor_backend="ray").executor == "ray"
