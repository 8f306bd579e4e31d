"""A whole model through Triton's kernels computes what plain torch computes, rows of any kind in one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from pellucid.layers.leaf import FUSED, NATIVE, PLAIN, choose_leaf
from pellucid.native.library import library
from tests.models.harness import Harness, load
from tests.tiny import write_checkpoint, write_latent_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/llm/test_gpu has this for GPUs")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [40, 41, 42], [100]]
MODELS = {
    "queries and keys are normalized": {},
    "a plain Llama, half of each head turns": {
        "architectures": ["LlamaForCausalLM"],
        "partial_rotary_factor": 0.5,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_logits_and_tokens_are_those_of_plain_torch(tmp_path: Path, changes: dict) -> None:
    folder = write_checkpoint(tmp_path / "model", **changes)
    plain = Harness(load(folder, max_model_len=64), num_seqs=3, max_len=64)
    fused = Harness(load(folder, max_model_len=64, backend="triton", leaf=FUSED), num_seqs=3, max_len=64)
    for ours, theirs in zip(fused.step({0: PROMPTS[0]}), plain.step({0: PROMPTS[0]}), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    fused.num_computed[0] = plain.num_computed[0] = 0
    assert fused.generate(PROMPTS, 6) == plain.generate(PROMPTS, 6)


def test_so_they_are_over_latents(tmp_path: Path) -> None:
    folder = write_latent_checkpoint(tmp_path / "model")
    plain = Harness(load(folder, max_model_len=64), num_seqs=3, max_len=64)
    fused = Harness(load(folder, max_model_len=64, backend="triton", leaf=FUSED), num_seqs=3, max_len=64)
    assert fused.generate(PROMPTS[::-1], 6) == plain.generate(PROMPTS[::-1], 6)  # decodes come first


def test_a_cpu_gets_native_code_or_plain_torch_and_a_gpu_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_leaf(torch.device("cpu")) is (PLAIN if library() is None else NATIVE)
    monkeypatch.setattr("pellucid.layers.leaf.library", lambda: None)
    assert choose_leaf(torch.device("cpu")) is PLAIN
    assert choose_leaf(torch.device("cuda", 0)) is FUSED
