"""Write a trained model as a plain Hugging Face checkpoint in bfloat16, and read one back.

Config and generation defaults are written here; the tokenizer's files come from `tokenizer.py`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from model import SPROUT, Qwen3, Shape

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def export(model: Qwen3, folder: Path, tokenizer_from: Path) -> None:
    """Write config, generation defaults, tokenizer and bfloat16 weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if tokenizer_from != folder:
            shutil.copyfile(tokenizer_from / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    _write_json(folder / "config.json", _config(model.shape, stops))
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": stops,
            "pad_token_id": stops[1],
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    tensors = {name: tensor.detach().bfloat16().cpu() for name, tensor in model.state_dict().items()}
    # Written beside and renamed, so that a killed run leaves the previous weights whole.
    partial = folder / "model.safetensors.partial"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.rename(folder / "model.safetensors")


def load(folder: Path, device: torch.device) -> Qwen3:
    """Read a checkpoint that `export` wrote, in bfloat16."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = replace(
        SPROUT,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        intermediate=config["intermediate_size"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        rope_theta=config["rope_theta"],
    )
    model = Qwen3(shape)
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    for param in model.parameters():
        param.data = param.data.bfloat16()
    return model.to(device).eval()


def _config(shape: Shape, stops: list[int]) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": stops[0],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": stops[1],
        "rms_norm_eps": shape.rms_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
