"""Every architecture of GGUF files: the logits of the model that a file was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pellucid.weights.gguf_families import FAMILIES
from tests.models.cases import CASES, GEMMA, GEMMA3, GEMMA3_LINEAR, LLAMA4, Case, Reference
from tests.models.harness import Harness, load

gguf_files = pytest.importorskip("tests.models.gguf_files")
# What files do not say, llama.cpp has in code: with these models have it so.
SCALED = {"query_pre_attn_scalar": GEMMA["head_dim"]}
PLAIN_GEMMA3 = GEMMA3 | SCALED | {"final_logit_softcapping": None}
LINEAR = GEMMA3_LINEAR["rope_parameters"]
OWN = [
    Case("gemma", "Gemma", {"head_dim": 24}),
    Case("gemma2", "Gemma2", GEMMA | SCALED),
    Case("gemma3", "Gemma3Text:Gemma3", PLAIN_GEMMA3 | {"num_hidden_layers": 7, "rope_parameters": LINEAR}),
    Case("llama4", "Llama4Text:Llama4", LLAMA4 | {"attention_chunk_size": 8192, "floor_scale": 8192}),
]
KINDS = {
    "qwen3": "qwen3",
    "qwen2": "qwen2",
    "llama": "llama",
    "granite": "granite",
    "phi3": "phi3",
    "glm4": "glm4",
    "glm": "chatglm",
    "glm4moe": "glm4moe",
    "olmo2": "olmo2",
    "olmo3 with yarn in full layers": "olmo2",
    "exaone4": "exaone4",
    "exaone4 without windows, tied": "exaone4",
    "smollm3": "smollm3",
    "ernie4_5 with biases, untied, yarn": "ernie4_5",
    "seed-oss": "seed_oss",
    "qwen3moe": "qwen3moe",
    "qwen2moe": "qwen2moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "granitemoe with factors, tied": "granitemoe",
    "gptoss": "gpt-oss",
    "deepseek v2": "deepseek2",
    "deepseek v2 with experts in groups": "deepseek2",
    "deepseek v3 with yarn": "deepseek2",
    "glm4 moe lite": "deepseek2",
}
OWN_KINDS = ("gemma", "gemma2", "gemma3", "llama4")
FILES = [(case, KINDS[case.name]) for case in CASES if case.name in KINDS]
FILES += list(zip(OWN, OWN_KINDS, strict=True))


def test_every_architecture_is_tested() -> None:
    assert {kind for _, kind in FILES} == set(FAMILIES)


@pytest.mark.parametrize(("case", "kind"), FILES, ids=[case.name.replace(" ", "-") for case, _ in FILES])
def test_logits_are_those_of_the_model_it_was_made_of(tmp_path: Path, case: Case, kind: str) -> None:
    reference = Reference(case, tmp_path)
    harness = Harness(load(gguf_files.convert(tmp_path, kind), max_model_len=64), num_seqs=1, max_len=64)
    prompt = reference.prompts[0]
    (ours,) = harness.step({0: prompt})
    torch.testing.assert_close(ours, reference.logits(prompt), atol=1e-4, rtol=1e-4)
