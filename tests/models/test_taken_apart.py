"""Matrices that a family's checkpoints have in one tensor, and that tools take apart to quantize them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.cases import GPT_OSS, SMALL
from tests.models.harness import Harness, load

transformers = pytest.importorskip("transformers")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def save_model(folder: Path, family: str, **options: object) -> dict[str, Tensor]:
    """A random small model of the family; its tensors."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def logits_of(folder: Path) -> Tensor:
    return Harness(load(folder, max_model_len=64), num_seqs=1, max_len=32).step({0: TOKENS})[0]


def gates_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As GPTQModel has Phi-3 and GLM-4."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = ("gate", "up") if "gate_up_proj" in name else ("q", "k", "v") if "qkv" in name else ()
        sizes = [64, 32, 32] if len(parts) == 3 else [len(tensor) // 2] * 2
        for part, own in zip(parts, tensor.split(sizes) if parts else (), strict=True):
            apart[name.replace("gate_up_", f"{part}_").replace("qkv_", f"{part}_")] = own.clone()
        if not parts:
            apart[name] = tensor
    return apart


def experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As compressed-tensors and GPTQModel have gpt-oss."""
    apart = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        prefix, _, what = name.rpartition(".")
        end = "bias" if what.endswith("_bias") else "weight"
        matrix = what.removesuffix("_bias")
        for expert, own in enumerate(tensor):
            rows = own if end == "bias" else own.T
            parts = (
                {"down_proj": rows}
                if matrix == "down_proj"
                else {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            )
            apart |= {f"{prefix}.{expert}.{part}.{end}": each.contiguous() for part, each in parts.items()}
    return apart


@pytest.mark.parametrize(
    ("family", "options", "apart"),
    [
        ("Phi3", {}, gates_apart),
        ("Glm4", {"head_dim": 16}, gates_apart),
        ("GptOss", GPT_OSS, experts_apart),
    ],
)
def test_what_is_apart_computes_what_it_did_in_one(
    tmp_path: Path, family: str, options: dict[str, object], apart: Any
) -> None:
    tensors = save_model(tmp_path, family, **options)
    expected = logits_of(tmp_path)
    in_parts = apart(tensors)
    assert in_parts.keys() != tensors.keys()
    save_file(in_parts, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path), expected)
