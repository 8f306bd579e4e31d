"""Checkpoints in FP8 with a scale for each block, as DeepSeek's and Qwen's releases hold them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CODES = torch.float8_e4m3fn
PLAIN = ("embed", "lm_head", "norm", ".gate.weight", "router", "shared_expert_gate", "_bias", "sinks")


def write_fp8(plain: Path, folder: Path, block: int = 16) -> Path:
    """The matrices of the checkpoint in `plain`, but embeddings, heads and routers, coded by blocks."""
    config = json.loads((plain / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config["quantization_config"] = scheme | {"weight_block_size": [block, block]}
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.dim() != 2 or any(part in name for part in PLAIN):  # noqa: PLR2004 a matrix
            tensors[name] = tensor
            continue
        tensors[name], tensors[f"{name}_scale_inv"] = coded(tensor, block)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def coded(matrix: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes of the same shape, and the scales of its blocks, of which the last ones may be cut off."""
    rows, columns = (-(-size // block) for size in matrix.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.view(rows, block, columns, block)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / torch.finfo(CODES).max
    codes = (blocks / scales[:, None, :, None]).to(CODES).view(padded.shape)
    return codes[: matrix.shape[0], : matrix.shape[1]].contiguous(), scales
