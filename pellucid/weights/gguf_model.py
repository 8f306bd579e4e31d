"""A GGUF file as a checkpoint: config.json made from its keys, tensors by the names of the model.

What llama.cpp's converter did to weights is undone as they are read: rows of q and k in `llama`'s order,
and the one that Gemma's norms have more.  Experts of a layer are one tensor, `mlp.experts.up_proj.weight`
[E, N, K].
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pellucid.models.fields import Fields
from pellucid.weights.gguf import Gguf, TensorInfo

FLAT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Numbers that the file has as tensors, for the config alone.
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the keys of an architecture mean.

    names: of a layer's tensors.  turned: rows of q and k are in llama.cpp's order.  one_more: so are norms.
    fixed: what all such models have.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: LAYER)
    turned: bool = False
    one_more: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict)


TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
MISTRAL = Family(architecture="MistralForCausalLM", model_type="mistral", turned=True)
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", model_type="llama", turned=True),
    "qwen2": Family(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": Family(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen2moe": Family(architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", names=LAYER | EXPERTS),
    "qwen3moe": Family(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", names=LAYER | EXPERTS),
    "gemma": Family(architecture="GemmaForCausalLM", model_type="gemma", one_more=True, fixed=TANH),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        names=LAYER | FOUR_NORMS,
        one_more=True,
        fixed=TANH,
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        names=LAYER | FOUR_NORMS,
        one_more=True,
        fixed=TANH,
    ),
    "phi3": Family(architecture="Phi3ForCausalLM", model_type="phi3", names=LAYER | FUSED),
}
SIZES = {  # config.json's name: the key behind the architecture's
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPTIONAL_SIZES = {
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
OPTIONAL_NUMBERS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
LARGEST_GEMMAS = (46, 62)  # layers of Gemma 2 and 3 27B, whose queries are scaled otherwise
GEMMA3_PERIOD, GEMMA3_LOCAL_THETA = 6, 10000.0
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufModel:
    """config, generation_config: what those JSON files would hold; infos: by the model's names."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError for an architecture or a tensor that is not known here."""
        self.file = Gguf(path)
        self.metadata = self.file.metadata
        keys = Fields(self.metadata, str(self.file.path))
        self.kind = keys.str("general.architecture")
        if self.kind not in FAMILIES:
            raise ValueError(
                f"{path} is a model of the architecture {self.kind!r}, which is not read from GGUF (known: "
                f"{', '.join(FAMILIES)}); use the model's safetensors"
            )
        # llama.cpp calls Mistral llama, too; they differ where a window slides.
        is_mistral = self.kind == "llama" and keys.has("llama.attention.sliding_window")
        self.family = MISTRAL if is_mistral else FAMILIES[self.kind]
        self._names = {
            name: model_name(name, self.family, self.kind)
            for name in self.file.infos
            if name not in FREQUENCIES
        }
        self._stored_names = {ours: theirs for theirs, ours in self._names.items()}
        self.infos: dict[str, TensorInfo] = {
            ours: self.file.infos[theirs] for theirs, ours in self._names.items()
        }
        self.config = self._config(keys)
        self.generation_config = self._generation_config()

    def key(self, name: str) -> str:
        """What the file calls it."""
        return self._stored_names[name]

    def read(self, name: str) -> Tensor:
        """A tensor as the model has it, on the host; blocks as `Gguf.read` gives them."""
        tensor = self.file.read(self._stored_names[name])
        if self.family.turned and (found := re.search(r"\.([qk])_proj\.", name)):
            heads = self.config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            assert isinstance(heads, int)
            return turned_back(tensor, heads)
        if self.family.one_more and name.endswith("norm.weight"):
            return tensor - 1
        return tensor

    def _config(self, keys: Fields) -> dict[str, object]:
        config: dict[str, object] = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "hidden_act": "silu",
            **self.family.fixed,
        }
        config |= {ours: keys.size(f"{self.kind}.{key}") for ours, key in SIZES.items()}
        for ours, key in OPTIONAL_SIZES.items():
            if keys.has(f"{self.kind}.{key}"):
                config[ours] = keys.int(f"{self.kind}.{key}")
        for ours, key in OPTIONAL_NUMBERS.items():
            if keys.has(f"{self.kind}.{key}"):
                config[ours] = keys.float(f"{self.kind}.{key}")
        heads = keys.size(f"{self.kind}.attention.head_count")
        hidden = keys.size(f"{self.kind}.embedding_length")
        head_dim = keys.size(f"{self.kind}.attention.key_length", hidden // heads)
        config |= {
            "num_key_value_heads": keys.size(f"{self.kind}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": keys.float(f"{self.kind}.attention.layer_norm_rms_epsilon"),
            "rope_theta": keys.float(f"{self.kind}.rope.freq_base", 10000.0),
            "vocab_size": self._info("model.embed_tokens.weight").shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.infos,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.infos,
            "dtype": self._dtype(),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": end_tokens(self.metadata),
            "quantization_config": {"quant_method": "gguf"},
        }
        rotary = keys.size(f"{self.kind}.rope.dimension_count", head_dim)
        if rotary != head_dim:
            config["partial_rotary_factor"] = rotary / head_dim
        config |= self._rope_scaling(keys, rotary)
        if self.kind in ("gemma2", "gemma3"):
            config |= gemma(self.kind, config)
        return config

    def _info(self, name: str) -> TensorInfo:
        if name not in self.infos:
            raise ValueError(f"{self.file.path} has no {name}; convert the model again")
        return self.infos[name]

    def _dtype(self) -> str:
        """What the model computes in: half precision where the file has some, but no bfloat16."""
        types = {info.type for info in self.infos.values()}
        return "float16" if "F16" in types and "BF16" not in types else "bfloat16"

    def _rope_scaling(self, keys: Fields, rotary: int) -> dict[str, object]:
        """How positions are stretched: by keys, or by tensors of factors for each frequency."""
        prefix = f"{self.kind}.rope.scaling"
        original = keys.int(f"{prefix}.original_context_length", 0)
        if "rope_freqs.weight" in self.file.infos:
            theta = keys.float(f"{self.kind}.rope.freq_base", 10000.0)
            return {"rope_scaling": llama3_scaling(self.file.read("rope_freqs.weight"), theta, rotary)}
        if "rope_factors_long.weight" in self.file.infos:
            lengths = ("long", "short")
            factors = {f"{n}_factor": self.file.read(f"rope_factors_{n}.weight").tolist() for n in lengths}
            return {
                "rope_scaling": {"rope_type": "longrope", **factors},
                "original_max_position_embeddings": original,
            }
        kind = keys.str(f"{prefix}.type", "none")
        if kind == "none":
            return {}
        scaling: dict[str, object] = {"rope_type": kind, "factor": keys.float(f"{prefix}.factor")}
        if original:
            scaling["original_max_position_embeddings"] = original
        return {"rope_scaling": scaling}

    def _generation_config(self) -> dict[str, object]:
        found = {ours: self.metadata.get(f"general.sampling.{key}") for key, ours in SAMPLING.items()}
        return {name: value for name, value in found.items() if value is not None}


def model_name(name: str, family: Family, kind: str) -> str:
    """The model's name of a tensor.  Raises ValueError if there is none."""
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in FLAT:
            return f"{FLAT[stem]}.{suffix}"
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if found and found[2] in family.names:
            return f"model.layers.{found[1]}.{family.names[found[2]]}.{suffix}"
    raise ValueError(
        f"the GGUF file has a tensor {name!r}, which is not known of the architecture {kind!r}; use the "
        "model's safetensors"
    )


def turned_back(rows: Tensor, heads: int) -> Tensor:
    """[heads x head_dim, ...] with each head's halves side by side, which llama.cpp deals out by turns."""
    head_dim = rows.shape[0] // heads
    return rows.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def llama3_scaling(factors: Tensor, theta: float, rotary: int) -> dict[str, object]:
    """The config that gives these factors of Llama 3's frequencies, which the file has instead.

    Raises ValueError if they are not Llama 3's.
    """
    factor = round(float(factors.max()), 3)  # it was divided by in float32
    if not torch.allclose(factors, llama3_factors(factor, theta, rotary), rtol=1e-4):
        raise ValueError("rope_freqs in the GGUF file is not Llama 3's; use the model's safetensors")
    return LLAMA3 | {"factor": factor}


def llama3_factors(factor: float, theta: float, rotary: int) -> Tensor:
    """float32 [rotary / 2]: by what Llama 3 divides frequencies, from 1 for short waves to `factor`."""
    low, high, length = 1.0, 4.0, 8192
    waves = 2 * math.pi * theta ** (torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    smooth = (length / waves - low) / (high - low)
    return (
        (1 / ((1 - smooth) / factor + smooth))
        .where(waves > length / high, 1.0)
        .where(waves < length / low, factor)
        .float()
    )


def gemma(kind: str, config: Mapping[str, object]) -> dict[str, object]:
    """What keys do not say of Gemma 2 and 3: how queries are scaled, and which layers look how far."""
    hidden, heads, layers = (config[n] for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    assert isinstance(hidden, int) and isinstance(heads, int) and isinstance(layers, int)
    scalar = hidden // heads if layers in LARGEST_GEMMAS else config["head_dim"]
    period = GEMMA3_PERIOD if kind == "gemma3" else 2
    types = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    found: dict[str, object] = {"query_pre_attn_scalar": scalar, "layer_types": types}
    if kind == "gemma3":
        found["rope_local_base_freq"] = GEMMA3_LOCAL_THETA
    return found


def end_tokens(metadata: Mapping[str, object]) -> list[int]:
    """The tokens that end a text or a turn."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))
