"""The text of a multimodal config.json, as the hub spells it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pellucid.config import ModelConfig
from pellucid.models.build import BuildOptions, design
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fields import Fields
from pellucid.models.gemma import Gemma3
from pellucid.models.registry import MODELS
from pellucid.models.text_config import text_config
from pellucid.quant.layouts.base import LayerFormat
from tests.models.harness import CPU

# What the hub's config.json of Gemma 3 4B says; the rest is the family's.
HUB: dict[str, object] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
# The same text as transformers 5 writes it.
SAVED = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(34)],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def test_the_hub_s_config_means_what_transformers_saves() -> None:
    assert Gemma3.declare(Fields(text_config(HUB))) == Gemma3.declare(Fields(text_config(SAVED)))


def test_what_the_whole_model_says_goes_before_its_text() -> None:
    config = text_config(HUB)
    assert config["eos_token_id"] == [1, 106] and config["architectures"] == HUB["architectures"]
    assert "vision_config" not in config


def test_the_head_is_the_whole_models() -> None:
    """It ties its table or not, whatever the text's part says, and transformers caps no logits here."""
    for tied in (True, False):
        text = {"tie_word_embeddings": not tied, "final_logit_softcapping": 30.0}
        config = HUB | {"tie_word_embeddings": tied, "text_config": HUB["text_config"] | text}  # type: ignore[operator]
        declared = Gemma3.declare(Fields(text_config(config)))
        assert declared.tied == tied and declared.logit_cap is None


def test_null_in_the_text_s_part_is_not_the_familys_default() -> None:
    text = {"attention_chunk_size": None, "num_hidden_layers": 1}
    config = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    assert text_config(config)["attention_chunk_size"] is None


def test_names_of_tensors_are_the_text_s_in_either_spelling() -> None:
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight", "model.norm.weight"):
        assert Gemma3.rename(name) == "model.norm.weight"


def test_a_model_without_head_may_have_no_prefix() -> None:
    for family in map(MODELS.load, MODELS):
        if family.__module__.startswith("pellucid."):  # other tests' are there, too
            assert family.rename("norm.weight") == "model.norm.weight", family
            assert family.rename("lm_head.weight") == "lm_head.weight", family


def test_quantization_configs_have_the_text_s_layers_in_either_spelling(tmp_path: Path) -> None:
    """torchao's headers and lists of layers, of a text in a multimodal model."""
    config = {
        "head_dim": 8,
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "model_type": "gemma3_text"}
    name = "model.language_model.layers.0.mlp.down_proj"
    data = {"block_size": [1, 24]}
    metadata = {f"{name}.weight": json.dumps({"_type": "Int8Tensor", "_data": data})}
    save_file(
        {
            f"{name}._weight_qdata": torch.zeros(16, 24, dtype=torch.int8),
            "model.language_model.layers.0.mlp.up_proj.weight": torch.zeros(24, 16),
        },
        tmp_path / "model.safetensors",
        metadata=metadata,
    )
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}

    def stored(quantization: dict[str, object]) -> LayerFormat | None:
        (tmp_path / "config.json").write_text(json.dumps(whole | {"quantization_config": quantization}))
        checkpoint = Checkpoint.open(ModelConfig(model=str(tmp_path), skip_tokenizer_init=True))
        options = BuildOptions(
            dtype=torch.float32, device=torch.device("cpu"), max_model_len=32, block_size=16
        )
        rules = design(checkpoint, CPU, options).builder.context.quantization
        return rules.stored("model.layers.0.mlp.down_proj", "linear")

    assert (found := stored({"quant_method": "torchao"})) and found.layout == "torchao"
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    for named in (name, "language_model." + name.replace("language_model.", "")):
        group = {"targets": [named], "weights": weights}
        config_of = {"quant_method": "compressed-tensors", "format": "int-quantized"}
        assert stored({**config_of, "config_groups": {"group_0": group}})
