"""What tools call matrices, and where they take apart or leave together what a family has otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pellucid.quant.codes import E2M1, S8, Codes, Group, Scales
from pellucid.quant.layouts.base import LayerFormat
from tests.models.cases import GPT_OSS, SMALL
from tests.models.harness import Harness, load
from tests.models.test_coded import encoded

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


def quantized_by(folder: Path, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Path:
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "fbgemm"])
def test_experts_in_one_tensor_are_codes_there(tmp_path: Path, algorithm: str) -> None:
    """ModelOpt's, and Llama 4's of fbgemm, which has scales of outputs."""
    tensors = save_model(tmp_path, "GptOss", **GPT_OSS)
    plain, coded = dict(tensors), dict(tensors)
    for name, weight in tensors.items():  # [E, K, N]
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        if algorithm == "FP8":
            coded[name], coded[f"{name}_weight_scale"] = (
                (weight * 8).to(torch.float8_e4m3fn),
                torch.tensor(0.125),
            )
            coded[f"{name}_input_scale"] = torch.tensor(1.0)
            plain[name] = coded[name].float() / 8
            continue
        num, inputs, outputs = weight.shape
        if algorithm == "fbgemm":
            scale = torch.rand(num, 1, outputs) + 0.5
            coded[name] = (weight * 4).to(torch.float8_e4m3fn)
            plain[name] = coded[name].float() * scale
            is_gate = name.endswith("gate_up_proj")
            coded[f"{name}_scale"] = scale if is_gate else scale.transpose(1, 2).contiguous()
            continue
        q = torch.randint(16, (num, outputs, inputs), dtype=torch.uint8)
        scale = torch.rand(num, outputs, inputs // 16).to(torch.float8_e4m3fn)
        codes = Codes(q=q, code=E2M1, group=Group(1, 16), scale=Scales(scale, torch.tensor([[0.25]])))
        plain[name] = codes.dequantized().transpose(1, 2).contiguous()
        coded[name] = (q[..., ::2] | q[..., 1::2] << 4).transpose(1, 2).contiguous()
        coded[f"{name}_weight_scale"] = scale.transpose(1, 2).contiguous()
        coded[f"{name}_weight_scale_2"] = torch.tensor(0.25)
    save_file(plain, tmp_path / "model.safetensors")
    expected = logits_of(tmp_path)
    config: dict[str, object] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["*attn*"]}
    if algorithm == "fbgemm":
        config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]}
    found = logits_of(quantized_by(tmp_path, {"quantization_config": config}, coded))
    assert torch.equal(found, expected)


def test_transformers_static_fp8_calls_input_scales_otherwise(tmp_path: Path) -> None:
    tensors = save_model(tmp_path, "Qwen3", head_dim=16)
    plain, coded = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        path = name.removesuffix(".weight")
        coded[name] = (tensors[name] * 8).to(torch.float8_e4m3fn)
        coded[f"{path}.weight_scale_inv"], coded[f"{path}.activation_scale"] = torch.tensor([0.125, 2.0])
        plain[name] = coded[name].float() / 8
    save_file(plain, tmp_path / "model.safetensors")
    expected = logits_of(tmp_path)
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    found = logits_of(quantized_by(tmp_path, {"quantization_config": config}, coded))
    assert torch.equal(found, expected)


def group_of(*targets: str, **weights: object) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **weights}
    return {"targets": list(targets), "weights": weights}


def int8(weight: Tensor) -> Codes:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Codes(q=(weight / scale).round().to(torch.int8), code=S8, scale=Scales(scale))


def test_configs_name_layers_as_files_do_or_as_tools_do(tmp_path: Path) -> None:
    """Mixtral's files have names of their own for experts; here half of them are in codes, by those names."""
    tensors = save_model(tmp_path, "Mixtral", num_local_experts=2, num_experts_per_tok=1, sliding_window=None)
    plain, coded = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".w2." in name or ".k_proj." in name]:
        codes = int8(tensors[name])
        del coded[name]
        plain[name] = codes.dequantized()
        format = LayerFormat(layout="scaled", code=S8)
        coded |= {name.removesuffix("weight") + end: t for end, t in encoded(codes, format).items()}
    save_file(plain, tmp_path / "model.safetensors")
    expected = logits_of(tmp_path)
    groups = {
        "files": group_of(r"re:.*block_sparse_moe\.experts\.0\.w2"),
        "ours": group_of(r"re:.*mlp\.experts\.1\.down_proj", "re:.*k_proj"),
    }
    config: dict[str, object] = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": groups,
        }
    }
    assert torch.equal(logits_of(quantized_by(tmp_path, config, coded)), expected)
