"""Models with experts in the whole engine: alone, in company, and however ranks divide them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pellucid import LLM, LoRARequest
from tests.llm.test_invariance import BASE, NGRAM, assert_same, random_requests, run
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six experts, three of a token, beside a shared one; a layer without any; and a tokenizer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("sparse"))
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        eos_token_id=0,
    )
    model = transformers.Qwen2MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(sparse: Path):
    """Requests, each run by itself."""
    prompts, params = random_requests(12, seed=5)
    with LLM(str(sparse), **BASE, enable_prefix_caching=False) as llm:
        tokens = [
            llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
    return prompts, params, tokens


COMPANIES = {
    "all at once": {},
    "drafts, small chunks": {"speculative_config": NGRAM, "depth": 2, "max_num_batched_tokens": 24},
    "slices on two ranks": {"tensor_parallel_size": 2},
    "whole experts on two ranks": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "over two engines, with drafts": {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "speculative_config": NGRAM,
    },
    "two stages": {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 60},
}
PARALLEL = ("slices on two ranks", "two stages")  # as of other families, in tests/llm/test_families.py


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.parallel) if name in PARALLEL else name for name in COMPANIES],
)
def test_tokens_are_the_same_in_any_company_and_on_any_ranks(sparse: Path, alone, name: str) -> None:
    prompts, params, expected = alone
    assert_same(sparse, prompts, params, run(sparse, prompts, params, **COMPANIES[name]), expected)


def test_experts_that_ranks_cannot_divide_are_refused(sparse: Path) -> None:
    options = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    with pytest.raises(ValueError, match="enable_expert_parallel divides 6 experts among 4 ranks"):
        LLM(str(sparse), **BASE, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{"depth": 2}, {"enforce_eager": True}], ids=["recorded", "eager"])
def test_tokens_on_a_gpu_are_those_of_the_cpu(
    sparse: Path, alone, options: dict, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, params, expected = alone
    caplog.set_level(logging.INFO, logger="pellucid.kernels.compile.compilations")
    with LLM(str(sparse), **(BASE | {"device": "cuda", "num_gpu_blocks_override": 4096} | options)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [message for message in caplog.messages if "mid-run" in message] == []
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1


def test_adapters_of_experts_are_refused_by_name(sparse: Path, tmp_path: Path) -> None:
    path = "base_model.model.model.layers.0.mlp.experts.0.up_proj"
    pair = {f"{path}.lora_A.weight": torch.zeros(4, 48), f"{path}.lora_B.weight": torch.zeros(32, 4)}
    save_file(pair, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with LLM(str(sparse), **BASE, enable_lora=True) as llm:
        (output,) = llm.generate([[1, 2]], lora_request=LoRARequest("mine", 1, str(tmp_path)), use_tqdm=False)
    error = output.error or ""
    assert "experts.0.up_proj" in error and "not of mixtures of experts" in error


def test_tokens_of_packed_experts_are_the_same_in_company_and_on_ranks(
    sparse: Path,
) -> None:
    prompts, params = random_requests(8, seed=6)
    packed = {"quantization": {"experts": "nf4"}}
    with LLM(str(sparse), **BASE, **packed, enable_prefix_caching=False) as llm:
        expected = [
            llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
    for options in ({}, COMPANIES["whole experts on two ranks"]):
        tokens = run(sparse, prompts, params, **packed, **options)
        assert_same(sparse, prompts, params, tokens, expected)
