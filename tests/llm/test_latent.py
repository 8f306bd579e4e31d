"""Latent attention in the whole engine: every request's tokens are its own, and transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid import LLM, SamplingParams
from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from tests.llm.test_invariance import BASE, NGRAM, assert_same, random_requests, run
from tests.models.harness import load
from tests.spec import heads
from tests.tiny import write_checkpoint, write_latent_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latent_checkpoint(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """12 requests, each run by itself."""
    prompts, params = random_requests(12, seed=4)
    with LLM(str(folder), **BASE, enable_prefix_caching=False) as llm:
        tokens = [
            llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
    return prompts, params, tokens


COMPANIES = {
    "prefix hits, two plans in flight": {"depth": 2, "max_num_seqs": 6},
    "small chunks on a pool that runs dry": {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 16},
    "drafts from the text": {"speculative_config": NGRAM, "depth": 2, "max_num_batched_tokens": 40},
    "two ranks": {"tensor_parallel_size": 2, "speculative_config": NGRAM},
    "two stages": {"pipeline_parallel_size": 2, "depth": 3, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.parallel if name == "two stages" else ())
        for name, options in COMPANIES.items()
    ],
)
def test_tokens_do_not_depend_on_company(folder: Path, alone, options: dict) -> None:
    prompts, params, expected = alone
    assert_same(folder, prompts, params, run(folder, prompts, params, **options), expected)


def test_nor_on_what_a_model_with_heads_drafts(folder: Path, alone, tmp_path: Path) -> None:
    prompts, params, expected = alone
    drafter = write_checkpoint(tmp_path, seed=1, num_hidden_layers=1)
    drafts = {
        "speculative_config": {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False},
        "depth": 2,
    }
    assert_same(folder, prompts, params, run(folder, prompts, params, **drafts), expected)


def test_a_model_with_latents_drafts_for_itself(folder: Path, alone) -> None:
    prompts, params, expected = alone
    drafts = {"speculative_config": {"model": str(folder), "num_speculative_tokens": 3, "adaptive": False}}
    assert_same(folder, prompts, params, run(folder, prompts, params, **drafts), expected)


def test_nor_on_trees_of_drafts(folder: Path, alone, tmp_path: Path) -> None:
    prompts, params, expected = alone
    drafts = {"model": str(heads.write_medusa(tmp_path)), "adaptive": False}
    drafts["speculative_token_tree"] = "[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]"
    options = {"speculative_config": drafts, "max_num_batched_tokens": 40, "depth": 2}
    assert_same(folder, prompts, params, run(folder, prompts, params, **options), expected)


FP8_COMPANIES = {
    "prefix hits, two plans in flight": {"depth": 2, "max_num_seqs": 6},
    "drafts from the text": {"speculative_config": NGRAM, "depth": 2},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.matrix if name == "drafts from the text" else ())
        for name, options in FP8_COMPANIES.items()
    ],
)
def test_nor_with_latents_in_fp8(folder: Path, options: dict) -> None:
    prompts, params = random_requests(6, seed=4)
    with LLM(str(folder), **BASE, kv_cache_dtype="fp8", enable_prefix_caching=False) as llm:
        alone = [
            llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
    assert run(folder, prompts, params, kv_cache_dtype="fp8", **options) == alone
    assert run(folder, prompts, params) != alone, "nothing was rounded"


def test_scales_of_latents_are_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for i in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor(0.5 + i)
        tensors[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor(9.0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    scaled = load(tmp_path, max_model_len=64, kv_dtype=torch.float8_e4m3fn).attention_layers
    assert [layer.row_scale for layer in scaled] == [0.5 + i for i in range(len(scaled))]
    plain = load(tmp_path, max_model_len=64).attention_layers
    assert {layer.row_scale for layer in plain} == {1.0}


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts, _ = random_requests(4, seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(str(folder), **BASE) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_layers_that_predict_further_tokens_are_passed_over(folder: Path, tmp_path: Path) -> None:
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    further = {f"model.layers.{config['num_hidden_layers']}.eh_proj.weight": torch.zeros(4, 4)}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    save_file(tensors | further, tmp_path / "model.safetensors")
    options = BASE | {"skip_tokenizer_init": True}
    with LLM(str(tmp_path), **options) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_fp8_blocks_are_read(folder: Path, tmp_path: Path) -> None:
    """As DeepSeek's releases hold them; on a CPU they become plain."""
    block, largest = 16, torch.finfo(torch.float8_e4m3fn).max
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    plain, coded = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name:
            plain[name] = coded[name] = tensor
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        padded = torch.zeros(rows * block, columns * block)
        padded[: tensor.shape[0], : tensor.shape[1]] = tensor
        blocks = padded.view(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / largest
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        for target, value in ((coded, codes), (plain, codes.float() * scale[:, None, :, None])):
            target[name] = value.reshape(padded.shape)[: tensor.shape[0], : tensor.shape[1]].contiguous()
        coded[f"{name}_scale_inv"] = scale
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    fp8 = {"quantization_config": quantization | {"weight_block_size": [block, block]}}
    answers = []
    for part, (changes, weights) in enumerate([({}, plain), (fp8, coded)]):
        (path := tmp_path / str(part)).mkdir()
        (path / "config.json").write_text(json.dumps(config | changes))
        save_file(weights, path / "model.safetensors")
        answers.append(
            run(
                path,
                [[5, 6, 7] * 9],
                [SamplingParams(temperature=0, max_tokens=20)],
                skip_tokenizer_init=True,
            )
        )
    assert answers[0] == answers[1]


def test_a_length_at_which_keys_are_chosen_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = BASE | {"skip_tokenizer_init": True, "load_format": "dummy"}
    with pytest.raises(ValueError, match="index_topk"):
        LLM(str(tmp_path), **options, max_model_len=65)
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy")
    assert Checkpoint.open(model).max_position_embeddings == 64
