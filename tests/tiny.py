"""A tiny random checkpoint with a tokenizer, written as a Hugging Face folder, to test the whole engine."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "你好世界，很高兴",
    "🙂🎉 emoji",
    "def f(x): return x + 1",
]


def write_checkpoint(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write config, random weights and tokenizer; `changes` replace entries of CONFIG."""
    config = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, seed), folder / "model.safetensors")
    _write_tokenizer(folder)
    return folder


LATENT_CONFIG = CONFIG | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "first_k_dense_replace": 2,
}


def write_latent_checkpoint(folder: Path, seed: int = 0, **changes: object) -> Path:
    """The same of a model with latent attention; `changes` replace entries of LATENT_CONFIG."""
    config = LATENT_CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_latent_weights(config, seed), folder / "model.safetensors")
    _write_tokenizer(folder)
    return folder


def _latent_weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """Those of heads, with other projections."""
    generator = torch.Generator().manual_seed(seed)
    dim, num, nope = config["hidden_size"], config["num_attention_heads"], config["qk_nope_head_dim"]
    rope, value, rank = config["qk_rope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    q_rank = config["q_lora_rank"]
    sizes = {
        "q_a_proj": (q_rank, dim),
        "q_b_proj": (num * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (rank + rope, dim),
        "kv_b_proj": (num * (nope + value), rank),
        "o_proj": (dim, num * value),
    }
    weights = {name: x for name, x in _weights(config, seed).items() if "self_attn" not in name}
    for i in range(config["num_hidden_layers"]):
        a = f"model.layers.{i}.self_attn"
        for name, (rows, columns) in sizes.items():
            matrix = torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5
            weights[f"{a}.{name}.weight"] = matrix
        weights[f"{a}.q_a_layernorm.weight"] = 1 + 0.1 * torch.randn(q_rank, generator=generator)
        weights[f"{a}.kv_a_layernorm.weight"] = 1 + 0.1 * torch.randn(rank, generator=generator)
    return weights


def _weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dim, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_q, num_kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], dim, generator=generator),
        "model.norm.weight": norm(dim),
        "lm_head.weight": matrix(config["vocab_size"], dim) * 2,
    }
    for i in range(config["num_hidden_layers"]):
        weights |= {
            f"model.layers.{i}.{name}": tensor
            for name, tensor in {
                "input_layernorm.weight": norm(dim),
                "post_attention_layernorm.weight": norm(dim),
                "self_attn.q_proj.weight": matrix(num_q, dim),
                "self_attn.k_proj.weight": matrix(num_kv, dim),
                "self_attn.v_proj.weight": matrix(num_kv, dim),
                "self_attn.o_proj.weight": matrix(dim, num_q),
                "self_attn.q_norm.weight": norm(head),
                "self_attn.k_norm.weight": norm(head),
                "mlp.gate_proj.weight": matrix(inner, dim),
                "mlp.up_proj.weight": matrix(inner, dim),
                "mlp.down_proj.weight": matrix(dim, inner),
            }.items()
        }
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    if config["architectures"] == CONFIG["architectures"]:
        return weights
    return {name: tensor for name, tensor in weights.items() if "q_norm" not in name and "k_norm" not in name}


def _write_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
