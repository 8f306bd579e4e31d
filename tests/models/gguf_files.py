"""Models of transformers as GGUF files, as llama.cpp converts them, by the gguf package's own names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {architecture: enum for enum, architecture in gguf.MODEL_ARCH_NAMES.items()}
TURNED = ("llama", "granite", "granitemoe", "smollm3")  # rows of q and k are dealt out by turns
KEYS = {  # as the converter reads them of config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}


def convert(folder: Path, kind: str) -> Path:
    """kind: llama.cpp's name of the architecture."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", kind)
    for key, value in keys_of(config, kind).items():
        add_key(writer, f"{kind}.{key}", value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in whole_experts(tensors, config, kind):
        name = name.replace("correction_bias", "correction.bias")
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, as_stored(tensor, name, config, kind).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def keys_of(config: dict[str, object], kind: str) -> dict[str, object]:
    keys = {key: config[name] for key, name in KEYS.items() if config.get(name) is not None}
    experts = [config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if any(experts):
        keys["expert_count"] = next(filter(None, experts))
    if "layer_types" in config and kind in ("olmo2", "exaone4"):
        keys["attention.sliding_window_pattern"] = [t.startswith("slid") for t in config["layer_types"]]
    rope = config["rope_parameters"]
    keys["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if "sliding_attention" in rope:
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if "mscale_all_dim" in rope:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if "partial_rotary_factor" in rope:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        keys["rope.dimension_count"] = int(head * rope["partial_rotary_factor"])
    if kind == "deepseek2":
        rotary = config["qk_rope_head_dim"]
        keys |= {"rope.dimension_count": rotary, "attention.head_count_kv": 1}
        keys["attention.key_length"] = config["kv_lora_rank"] + rotary
        keys["attention.key_length_mla"] = config["qk_nope_head_dim"] + rotary
    if kind in ("glm4moe", "deepseek2"):
        keys["expert_weights_norm"] = bool(config.get("norm_topk_prob"))
    if kind == "llama4":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
        keys["feed_forward_length"] = config["intermediate_size_mlp"]
    return keys | ({"expert_feed_forward_length": config["intermediate_size"]} if kind == "gpt-oss" else {})


def whole_experts(
    tensors: dict[str, Tensor], config: dict[str, object], kind: str
) -> Iterator[tuple[str, Tensor]]:
    """All experts of a layer in one tensor of each matrix."""
    alone: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)\.weight", name)
        if found:
            alone.setdefault(f"{found[1]}.{found[3]}.weight", []).append((int(found[2]), tensor))
        elif kind == "deepseek2" and name.endswith("kv_b_proj.weight"):
            heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
            both = tensor.unflatten(0, (heads, -1))
            yield name.replace("kv_b", "k_b"), both[:, :nope].transpose(1, 2)
            yield name.replace("kv_b", "v_b"), both[:, nope:]
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gates, ups = tensor.chunk(2, 1)
            yield name.replace("block_sparse_moe.input_linear", "mlp.experts.gate_proj"), gates
            yield name.replace("block_sparse_moe.input_linear", "mlp.experts.up_proj"), ups
        elif re.search(r"experts\.\w+_proj(_bias)?$", name):
            suffix = "bias" if name.endswith("_bias") else "weight"
            stem = name.removesuffix("_bias")
            tensor = tensor.transpose(1, 2) if suffix == "weight" else tensor
            if "gate_up" not in stem:
                yield f"{stem}.{suffix}", tensor
                continue
            halves = (tensor[:, ::2], tensor[:, 1::2]) if kind == "gpt-oss" else tensor.chunk(2, 1)
            for half, part in zip(halves, ("gate_proj", "up_proj"), strict=True):
                yield f"{stem.replace('gate_up_proj', part)}.{suffix}", half
        else:
            yield name + ".weight" * name.endswith("sinks"), tensor
    for name, numbered in alone.items():
        yield name, torch.stack([tensor for _, tensor in sorted(numbered, key=lambda pair: pair[0])])


def as_stored(tensor: Tensor, name: str, config: dict[str, object], kind: str) -> Tensor:
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    found = re.search(r"\.([qk])_proj\.", name)
    if kind not in TURNED or found is None:
        return tensor
    heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
