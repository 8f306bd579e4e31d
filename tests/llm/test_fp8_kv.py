"""An FP8 KV cache through the whole engine: half the bytes, the checkpoint's scales, prefix hits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid import LLM, SamplingParams
from pellucid.config import EngineConfig
from pellucid.kernels.attention.fp8_cache import kv_scale
from pellucid.models.checkpoint import Checkpoint
from pellucid.platform import Platform
from pellucid.quant.stored_scales import scale_name
from pellucid.resolve import resolve
from tests.llm.test_invariance import BASE, random_requests
from tests.models.harness import CPU, load
from tests.quant.test_fp8 import Store, compressed, write_quantized
from tests.tiny import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def first_tokens(folder: Path, prompts: list[list[int]], **options: object) -> list[int]:
    with LLM(str(folder), **(BASE | options)) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids[0] for output in outputs]


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_it_seldom_changes_a_token(tiny: Path, name: str) -> None:
    prompts, _ = random_requests(40, seed=5)
    ours, plain = (first_tokens(tiny, prompts, kv_cache_dtype=dtype) for dtype in (name, "auto"))
    same = sum(a == b for a, b in zip(ours, plain, strict=True))
    assert same >= 32, f"{same} of 40 tokens agree"


def test_the_same_memory_holds_four_times_the_blocks_of_float32(tiny: Path) -> None:
    num_pages = []
    for name in ("auto", "fp8"):
        with LLM(str(tiny), **BASE, kv_cache_dtype=name, cpu_kv_cache_gib=0.01) as llm:
            num_pages.append(llm.llm_engine.capacity.num_pages + 1)  # one more is for padding
    assert num_pages[1] // 4 == num_pages[0]


def test_prefix_hits_give_the_same_tokens(tiny: Path) -> None:
    prompt = list(range(1, 101))
    with LLM(str(tiny), **BASE, kv_cache_dtype="fp8") as llm:
        first, second = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert [first.num_cached_tokens, second.num_cached_tokens] == [0, 96]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_requests_in_company_give_the_tokens_of_each_alone(tiny: Path) -> None:
    prompts, _ = random_requests(12, seed=6)
    together = first_tokens(tiny, prompts, kv_cache_dtype="fp8", depth=2)
    with LLM(str(tiny), **BASE, kv_cache_dtype="fp8", enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert together == [output.outputs[0].token_ids[0] for output in alone]


def write_scaled(folder: Path, ending_k: str, ending_v: str) -> Path:
    """A checkpoint with scales of its KV cache, under some tool's names."""
    write_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    for i in range(2):
        weights[f"model.layers.{i}{ending_k}"] = torch.tensor(0.01 * (i + 1))
        weights[f"model.layers.{i}{ending_v}"] = torch.tensor([0.03 * (i + 1)])
    save_file(weights, folder / "model.safetensors")
    return folder


SPELLINGS = [
    (".self_attn.k_scale", ".self_attn.v_scale"),
    (".self_attn.attn.k_scale", ".self_attn.attn.v_scale"),
    (".self_attn.k_proj.k_scale", ".self_attn.v_proj.v_scale"),
    (".self_attn.k_proj.output_scale", ".self_attn.v_proj.output_scale"),
]


@pytest.mark.parametrize(("ending_k", "ending_v"), SPELLINGS)
def test_the_checkpoints_scales_are_found_under_every_name(
    tmp_path: Path, ending_k: str, ending_v: str
) -> None:
    folder = write_scaled(tmp_path, ending_k, ending_v)
    layers = load(folder, max_model_len=64, kv_dtype=torch.float8_e4m3fn).attention_layers
    found = [scale for layer in layers for scale in (layer.k_scale, layer.v_scale)]
    assert found == pytest.approx([0.01, 0.03, 0.02, 0.06])
    plain = load(folder, max_model_len=64).attention_layers
    assert [(layer.k_scale, layer.v_scale) for layer in plain] == [(1.0, 1.0)] * 2


def test_of_scales_of_heads_the_largest_serves_all(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path, *SPELLINGS[0])
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_scale"
    weights[name] = torch.tensor([0.03, 0.07]).view(2, 1, 1)  # as llmcompressor's strategy "attn_head"
    save_file(weights, folder / "model.safetensors")
    layers = load(folder, max_model_len=64, kv_dtype=torch.float8_e4m3fn).attention_layers
    assert layers[1].v_scale == pytest.approx(0.07)
    save_file({**weights, name: torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"v_scale has shape \(2, 2\), must be a number, or one for each"):
        load(folder, max_model_len=64)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_nothing_can_be_divided_by_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype='auto'"):
        kv_scale(torch.tensor([scale]))


def test_scales_are_one_without_the_checkpoints(tiny: Path) -> None:
    layers = load(tiny, max_model_len=64, kv_dtype=torch.float8_e4m3fn).attention_layers
    assert [(layer.k_scale, layer.v_scale) for layer in layers] == [(1.0, 1.0)] * 2


def test_scales_and_an_fp8_cache_run_together(tmp_path: Path, tiny: Path) -> None:
    folder = write_scaled(tmp_path, *SPELLINGS[0])
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    prompts, _ = random_requests(40, seed=7)
    ours = first_tokens(folder, prompts, kv_cache_dtype="fp8")
    same = sum(a == b for a, b in zip(ours, first_tokens(tiny, prompts), strict=True))
    assert same >= 32, f"{same} of 40 tokens agree"


def test_other_names_stay_as_they_are() -> None:
    assert scale_name("model.layers.0.mlp.up_proj.weight_scale") == "model.layers.0.mlp.up_proj.weight_scale"


FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
OLD_GPU = Platform(
    device="cuda", name="A100", memory_total=1 << 36, memory_free=1 << 36, num_cores=8, capability=(8, 0)
)


def kv_dtype(wish: str, scheme: object, platform: Platform = CPU, **options: str) -> str:
    """What the cache will be made of for a checkpoint with this kv_cache_scheme, its dtype bfloat16."""
    sizes = {"max_position_embeddings": 64, "num_hidden_layers": 2}
    config = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", **sizes}
    if scheme is not None:
        config["quantization_config"] = compressed(kv_cache_scheme=scheme)
    checkpoint = Checkpoint(name="test", path=Path(), config=config)
    return resolve(
        EngineConfig.from_options({"kv_cache_dtype": wish, **options}), platform, checkpoint
    ).kv_dtype


@pytest.mark.parametrize(
    ("wish", "scheme", "expected"),
    [
        ("auto", None, "bfloat16"),
        ("auto", FP8_SCHEME, "float8_e4m3fn"),
        ("auto", "static", "float8_e4m3fn"),
        ("bfloat16", FP8_SCHEME, "bfloat16"),
        ("bfloat16", {"num_bits": 4, "type": "int"}, "bfloat16"),
        ("fp8", None, "float8_e4m3fn"),
        ("fp8_e4m3", None, "float8_e4m3fn"),
        ("fp8_e5m2", FP8_SCHEME, "float8_e5m2"),
    ],
)
def test_auto_is_what_the_checkpoint_was_calibrated_for(wish: str, scheme: object, expected: str) -> None:
    assert kv_dtype(wish, scheme) == expected


def test_a_gpu_without_kernels_for_fp8_gets_it_only_when_asked() -> None:
    assert kv_dtype("auto", FP8_SCHEME, OLD_GPU) == "bfloat16"
    with pytest.raises(ValueError, match="'fp8', which needs .* 8.9 or newer; the GPU is A100 .*8.0"):
        kv_dtype("fp8", FP8_SCHEME, OLD_GPU)
    assert kv_dtype("fp8", None, OLD_GPU, attention_backend="torch") == "float8_e4m3fn"
    assert kv_dtype("fp8_e5m2", None, OLD_GPU) == "float8_e5m2"


@pytest.mark.parametrize(
    ("wish", "scheme", "words"),
    [
        ("auto", {"num_bits": 4, "type": "int"}, "kv_cache_scheme in .*; use kv_cache_dtype='bfloat16' or"),
        ("float16", None, "kv_cache_dtype is 'float16', but the model runs in bfloat16; use 'bfloat16'"),
    ],
)
def test_another_dtype_is_refused_with_the_way_out(wish: str, scheme: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kv_dtype(wish, scheme)


def test_a_checkpoint_brings_fp8_weights_and_cache_with_its_scales(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, compressed(kv_cache_scheme=FP8_SCHEME), Store(per_channel=True))
    weights = load_file(folder / "model.safetensors")
    for i, part in ((i, part) for i in range(2) for part in "qkv"):
        weights[f"model.layers.{i}.self_attn.{part}_scale"] = torch.tensor(0.01)
    save_file(weights, folder / "model.safetensors")
    prompts, _ = random_requests(40, seed=9)
    with LLM(str(folder), **BASE) as llm:
        assert llm.llm_engine.resolved.kv_dtype == "float8_e4m3fn"
        tokens = [output.outputs[0].token_ids[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    plain = first_tokens(folder, prompts, kv_cache_dtype="float32")
    same = sum(a == b for a, b in zip(tokens, plain, strict=True))
    assert same >= 32, f"{same} of 40 tokens agree"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "options",
    [
        *({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}),
        *({"quantization": "fp8"}, {"quantization": "int8"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_gives_nearly_always_the_tokens_of_the_cpu(tiny: Path, options: dict, dtype: str) -> None:
    prompts, _ = random_requests(40, seed=8)
    how = {**options, "dtype": dtype, "num_gpu_blocks_override": 1000}
    ours, expected = (first_tokens(tiny, prompts, **how, device=device) for device in ("cuda", "cpu"))
    same = sum(a == b for a, b in zip(ours, expected, strict=True))
    assert same >= 32, f"{same} of 40 tokens agree"
