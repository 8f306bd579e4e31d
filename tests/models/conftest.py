"""A tiny Qwen3 checkpoint on disk, in two shards, made without transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 3,
}


@dataclass
class Folder:
    """A checkpoint that can be changed before it is written."""

    path: Path
    config: dict[str, object]
    tensors: dict[str, Tensor]

    def write(self) -> Path:
        names = sorted(self.tensors)
        weight_map: dict[str, str] = {}
        for shard, part in (("model-1.safetensors", names[::2]), ("model-2.safetensors", names[1::2])):
            save_file({name: self.tensors[name] for name in part}, self.path / shard)
            weight_map |= dict.fromkeys(part, shard)
        (self.path / "config.json").write_text(json.dumps(self.config))
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return self.path


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (50, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (50, 16),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (16,),
            f"{layer}.post_attention_layernorm.weight": (16,),
            f"{layer}.self_attn.q_norm.weight": (8,),
            f"{layer}.self_attn.k_norm.weight": (8,),
            f"{layer}.self_attn.q_proj.weight": (16, 16),
            f"{layer}.self_attn.k_proj.weight": (8, 16),
            f"{layer}.self_attn.v_proj.weight": (8, 16),
            f"{layer}.self_attn.o_proj.weight": (16, 16),
            f"{layer}.mlp.gate_proj.weight": (24, 16),
            f"{layer}.mlp.up_proj.weight": (24, 16),
            f"{layer}.mlp.down_proj.weight": (16, 24),
        }
    return shapes


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in tensor_shapes().items()
    }
    return Folder(tmp_path, dict(CONFIG), tensors)
