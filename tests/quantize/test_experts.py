"""Quantized checkpoints of models with experts: read back, they compute with the numbers that were meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pellucid.layers.experts import Experts
from pellucid.models.loader import torch_module
from pellucid.quantize import inputs as quantize_inputs
from pellucid.quantize.inputs import Statistics, watched
from tests.models.harness import Harness, load
from tests.quantize.conftest import quantizer

transformers = pytest.importorskip("transformers")
METHODS = ["fp8", "fp8-block", "fp8-static", "int8", "int4", "awq", "gptq", "nf4", "mxfp4", "nvfp4"]
PROMPT = [3, 14, 15, 92, 65, 35]


def write_mixture(folder: Path, *, one_by_one: bool = True) -> Path:
    """Two layers of four experts, two of a token, beside a shared one."""
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(folder, save_original_format=one_by_one)
    return folder


def logits(folder: Path) -> Tensor:
    return Harness(load(folder, max_model_len=32), num_seqs=1, max_len=16).step({0: PROMPT})[0]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_read_back_is_near_what_there_was(tmp_path: Path, method: str) -> None:
    plain, out = write_mixture(tmp_path / "plain"), tmp_path / "out"
    quantizer(plain, out, method=method).run()
    before, after = logits(plain), logits(out)
    error = (after - before).norm() / before.norm()
    assert 0 < error < (0.05 if "8" in method else 0.35), error
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    said = json.dumps(config).replace("\\", "")
    assert "mlp.gate" in said and "shared_expert_gate" in said, "routers stay plain, and others are told"
    tensors = {name for shard in out.glob("*.safetensors") for name in load_file(shard)}
    assert "model.layers.0.mlp.gate.weight" in tensors
    assert any(name.startswith("model.layers.1.mlp.experts.3.down_proj.") for name in tensors)


def test_rounding_loses_more_than_gptq(tmp_path: Path) -> None:
    plain = write_mixture(tmp_path / "plain")
    reports = {}
    for method in ("int4", "gptq"):
        report = quantizer(plain, tmp_path / method, method=method, bits=3).run()
        reports[method] = [m.error for m in report.matrices if ".experts." in m.path and m.error is not None]
    assert len(reports["gptq"]) == len(reports["int4"]) == 2 * 4 * 3
    assert sum(reports["gptq"]) < sum(reports["int4"])


@pytest.mark.parametrize("room", [0, 1 << 30], ids=["all tokens", "its own"])
def test_experts_see_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(quantize_inputs, "SQUARES_BYTES", room)
    built = load(write_mixture(tmp_path), max_model_len=32)
    harness = Harness(built, num_seqs=1, max_len=16)
    model = torch_module(built.model)
    with watched(model, squares=True) as seen:
        harness.step({0: PROMPT})
    mixture = next(layer for layer in model.modules() if isinstance(layer, Experts))
    counts = [seen[key].count if (key := (mixture, e, "down")) in seen else 0 for e in range(4)]
    assert sum(counts) == 2 * len(PROMPT)
    hit = next(e for e in range(4) if counts[e])
    up = seen[mixture, hit, "gate_up"]
    assert up.count == (counts[hit] if room else len(PROMPT))
    assert Statistics(up).hessian.shape == (64, 64)


def test_all_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    plain = write_mixture(tmp_path / "plain", one_by_one=False)
    with pytest.raises(ValueError, match=r"mlp\.experts\.gate_up_proj holds all experts of a layer"):
        quantizer(plain, tmp_path / "out", method="fp8").run()
