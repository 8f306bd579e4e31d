"""GGUF files of a public shape: random weights, each matrix in the type that a mix such as Q4_K_M takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fields import Fields
from pellucid.quant.layouts.ggml.formats import format_of
from pellucid.quant.schemes.base import Rules
from pellucid.quantize.base import Recipe
from pellucid.quantize.ggml import ggml_codes
from pellucid.quantize.gguf import MIXES, Gguf, model_keys, their_name
from pellucid.quantize.matrices import tensors_of
from pellucid.weights.gguf_writer import Written, write_gguf

ROWS = 64  # random ones, which every matrix of a type and a width repeats


def write_random(path: Path, shape: str, mix: str) -> None:
    """shape: such as shape:qwen3-8b, of a dense Qwen3.  Raises ValueError for a mix that is not written."""
    checkpoint = Checkpoint.open(ModelConfig(model=shape, load_format="dummy"))
    method = Gguf(Recipe(method=f"gguf:{mix}"))
    rules = Rules(method.rules(method.formats()[1], checkpoint))
    tensors: dict[str, Written] = {}
    for name, size in shapes_of(Fields(checkpoint.config), checkpoint.num_layers):
        format = rules.format_of(name) if len(size) > 1 else None
        if format is None:
            tensors[f"{their_name(name)}.weight"] = Written(size, "F32", lambda size=size: torch.ones(size))
            continue
        type = format.layout.partition("/")[2]
        tensors[f"{their_name(name)}.weight"] = Written(
            size, type, lambda size=size, type=type: rows_of(type, size[1]).repeat(size[0] // ROWS, 1)
        )
    keys = model_keys(checkpoint, "qwen3") | {
        "general.quantization_version": 2,
        "general.file_type": MIXES[mix][2],
    }
    write_gguf(path, keys, tensors)


def shapes_of(config: Fields, num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """By the model's names, outputs first."""
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    middle, head = config.size("intermediate_size"), config.size("head_dim")
    queries = config.size("num_attention_heads") * head
    values = config.size("num_key_value_heads") * head
    yield "model.embed_tokens", (vocab, hidden)
    for layer in range(num_layers):
        for name, size in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (values, hidden),
            "self_attn.v_proj": (values, hidden),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (middle, hidden),
            "mlp.up_proj": (middle, hidden),
            "mlp.down_proj": (hidden, middle),
        }.items():
            yield f"model.layers.{layer}.{name}", size
    yield "model.norm", (hidden,)
    if not config.bool("tie_word_embeddings", False):
        yield "lm_head", (vocab, hidden)


@cache
def rows_of(type: str, inputs: int) -> Tensor:
    """Bytes [ROWS, ...] of a type."""
    weight = torch.randn(ROWS, inputs, generator=torch.Generator().manual_seed(0)) * 0.02
    return tensors_of(ggml_codes(weight, type), format_of(type), "random")["random.weight"]
