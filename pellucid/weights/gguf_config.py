"""config.json and generation_config.json of a GGUF file, made of its keys and of which tensors it has.

The fields of all families lie side by side; each family's model reads its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pellucid.models.fields import Fields
from pellucid.weights.gguf import Gguf
from pellucid.weights.gguf_families import DEEPSEEK3, FAMILIES, MISTRAL, MIXTRAL, OLMO3, Family

SIZES = {  # config.json's name: the key behind the architecture's
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPTIONAL_SIZES = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
}
OPTIONAL_NUMBERS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "routed_scaling_factor": "expert_weights_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rope_local_base_freq": "rope.freq_base_swa",
}
YARN = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
BIASES = {  # config.json's name: a tensor that tells
    "attention_bias": "self_attn.q_proj.bias",
    "qkv_bias": "self_attn.q_proj.bias",
    "use_bias": "self_attn.q_proj.bias",
    "attention_out_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.up_proj.bias",
    "use_qk_norm": "self_attn.q_norm.weight",
}
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
LARGEST_GEMMAS = (46, 62)  # layers of Gemma 2 and 3 27B, whose queries are scaled otherwise
LARGEST_EXAONE, EXAONE_WINDOW = 64, 4096  # layers of EXAONE 4 32B, alone of which has windows; tokens
LLAMA4_CHUNK, PLAIN_LLAMA4 = 8192, 128  # tokens; experts of Maverick, which does not normalize queries
SIGMOID = 2  # the number of a router's function
LOG_MULTIPLIER = 0.1  # that llama.cpp's converter multiplies `mscale_all_dim` by
LLAMA3: dict[str, object] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTHS = (8192, *(1 << bits for bits in range(18, 4, -1)))  # tokens that Llama 3's likes were trained with


def family_of(file: Gguf, keys: Fields) -> Family:
    """Raises ValueError for an architecture that is not known here."""
    kind = keys.str("general.architecture")
    if kind not in FAMILIES:
        raise ValueError(
            f"{file.path} is a model of the architecture {kind!r}, which is not read from GGUF (known: "
            f"{', '.join(FAMILIES)}); use the model's safetensors"
        )
    # What llama.cpp has one name for, and what differs here, keys and tensors tell.
    slides = window_of(keys, kind) is not None
    if kind == "llama" and keys.has("llama.expert_count") and keys.int("llama.expert_count"):
        return MIXTRAL
    if kind == "llama" and slides:
        return MISTRAL
    if kind == "olmo2" and slides:
        return OLMO3
    is_third = keys.int("deepseek2.expert_gating_func", 0) == SIGMOID or any(
        "exp_probs_b" in name for name in file.infos
    )
    if kind == "deepseek2" and is_third:
        return DEEPSEEK3
    return FAMILIES[kind]


def window_of(keys: Fields, kind: str) -> int | None:
    """Tokens; 0 is none, as in Phi-4's files."""
    return keys.int(f"{kind}.attention.sliding_window", 0) or None


def num_layers_of(keys: Fields, kind: str) -> int:
    """Without those that predict further tokens."""
    return keys.size(f"{kind}.block_count") - keys.int(f"{kind}.nextn_predict_layers", 0)


class GgufConfig:
    """names: of the model's tensors, without `model.layers.N.`.  Raises ValueError for keys that lack."""

    def __init__(self, file: Gguf, family: Family, names: set[str]) -> None:
        self.file, self.family, self.names = file, family, names
        self.metadata = file.metadata
        self.kind = str(file.metadata["general.architecture"])
        self.keys = Fields(
            {key.removeprefix(f"{self.kind}."): value for key, value in file.metadata.items()},
            str(file.path),
        )

    def config(self) -> dict[str, object]:
        """config.json."""
        keys, family = self.keys, self.family
        config: dict[str, object] = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "hidden_act": "silu",
            **family.fixed,
        }
        for ours, key in SIZES.items():
            config[ours] = keys.size(key)
        for ours, key in OPTIONAL_SIZES.items():
            if keys.has(key):
                config[ours] = keys.int(key)
        for ours, key in OPTIONAL_NUMBERS.items():
            if keys.has(key):
                config[ours] = keys.float(key)
        config |= {ours: tensor in self.names for ours, tensor in BIASES.items()}
        config |= self._heads() | self._window() | self._texts()
        if keys.has("expert_weights_norm"):
            config["norm_topk_prob"] = keys.bool("expert_weights_norm")
        rotary = keys.size("rope.dimension_count", self._head_dim)
        if not keys.has("attention.kv_lora_rank") and rotary != self._head_dim:
            config["partial_rotary_factor"] = rotary / self._head_dim
        return config | self._rope_scaling(rotary) | self._more(config)

    @property
    def _head_dim(self) -> int:
        hidden, heads = self.keys.size("embedding_length"), self.keys.size("attention.head_count")
        return self.keys.size("attention.key_length", hidden // heads)

    def _heads(self) -> dict[str, object]:
        keys = self.keys
        return {
            "num_hidden_layers": num_layers_of(Fields(self.metadata, str(self.file.path)), self.kind),
            "num_key_value_heads": keys.size("attention.head_count_kv", keys.size("attention.head_count")),
            "head_dim": self._head_dim,
            "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon"),
            "rope_theta": keys.float("rope.freq_base", 10000.0),
        }

    def _texts(self) -> dict[str, object]:
        embedding = self.file.infos.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.file.path} has no token_embd.weight; convert the model again")
        return {
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self.file.infos,
            "dtype": self._dtype(),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": end_tokens(self.metadata),
            "quantization_config": {"quant_method": "gguf"},
        }

    def _dtype(self) -> str:
        """What the model computes in: half precision where the file has some, but no bfloat16."""
        types = {info.type for info in self.file.infos.values()}
        return "float16" if "F16" in types and "BF16" not in types else "bfloat16"

    def _window(self) -> dict[str, object]:
        """How far layers look."""
        keys, num = self.keys, num_layers_of(Fields(self.metadata), self.kind)
        window = keys.int("attention.sliding_window", 0) or self.family.fixed.get("sliding_window")
        if self.kind == "exaone4" and num == LARGEST_EXAONE:
            window = window or EXAONE_WINDOW
        if self.family.period is None:
            return {"sliding_window": window}
        if not window:
            return {"sliding_window": None, "layer_types": ["full_attention"] * num}
        said = keys.config.get("attention.sliding_window_pattern")
        period = said if isinstance(said, int) else self.family.period
        slides = said if isinstance(said, list) else [(i + 1) % period != 0 for i in range(num)]
        types = ["sliding_attention" if each else "full_attention" for each in slides[:num]]
        return {"sliding_window": window, "layer_types": types}

    def _rope_scaling(self, rotary: int) -> dict[str, object]:
        """How positions are stretched: by keys, or by tensors of factors for each frequency."""
        keys, file = self.keys, self.file
        original = keys.int("rope.scaling.original_context_length", 0)
        if "rope_freqs.weight" in file.infos:
            theta = keys.float("rope.freq_base", 10000.0)
            return llama3_scaling(file.read("rope_freqs.weight"), theta, rotary)
        if "rope_factors_long.weight" in file.infos:
            lengths = ("long", "short")
            factors = {f"{n}_factor": file.read(f"rope_factors_{n}.weight").tolist() for n in lengths}
            return {
                "rope_scaling": {"rope_type": "longrope", **factors},
                "original_max_position_embeddings": original,
            }
        kind = keys.str("rope.scaling.type", "none")
        if kind == "none":
            return {}
        scaling: dict[str, object] = {"rope_type": kind, "factor": keys.float("rope.scaling.factor")}
        if original:
            scaling["original_max_position_embeddings"] = original
        if kind == "yarn":
            scaling |= self._yarn()
        return {"rope_scaling": scaling}

    def _yarn(self) -> dict[str, object]:
        keys = self.keys
        found: dict[str, object] = {
            ours: keys.float(f"rope.scaling.{key}")
            for ours, key in YARN.items()
            if keys.has(f"rope.scaling.{key}")
        }
        if self.kind == "gpt-oss":
            found["truncate"] = False
        if keys.has("rope.scaling.yarn_log_multiplier"):
            weight = keys.float("rope.scaling.yarn_log_multiplier") / LOG_MULTIPLIER
            found |= {"mscale": round(weight, 6), "mscale_all_dim": round(weight, 6)}
        return found

    def _more(self, config: Mapping[str, object]) -> dict[str, object]:
        """What keys do not say of a family, or say in another way."""
        if self.kind in ("gemma2", "gemma3"):
            return self._gemma(config)
        if self.family is OLMO3:
            own = {"rope_type": "default", "rope_theta": config["rope_theta"]}
            return {"rope_parameters": {"sliding_attention": own}}
        if self.kind == "deepseek2":
            return self._latents()
        if self.kind == "llama4":
            return self._llama4()
        if self.kind == "gpt-oss":
            return {"intermediate_size": config["moe_intermediate_size"]}
        return {}

    def _gemma(self, config: Mapping[str, object]) -> dict[str, object]:
        """How queries are scaled."""
        is_largest = config["num_hidden_layers"] in LARGEST_GEMMAS
        hidden, heads = self.keys.size("embedding_length"), self.keys.size("attention.head_count")
        return {"query_pre_attn_scalar": hidden // heads if is_largest else self._head_dim}

    def _latents(self) -> dict[str, object]:
        """Heads over latents; older files have them as they are, newer ones as one head over latents."""
        keys = self.keys
        rotary = keys.size("rope.dimension_count")
        suffix = "_mla" if keys.has("attention.key_length_mla") else ""
        key, value = (keys.size(f"attention.{part}_length{suffix}") for part in ("key", "value"))
        is_grouped = keys.int("expert_group_count", 1) > 1
        return {
            "num_key_value_heads": keys.size("attention.head_count"),
            "qk_rope_head_dim": rotary,
            "qk_nope_head_dim": key - rotary,
            "v_head_dim": value,
            "q_lora_rank": keys.size("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
            "attention_bias": "self_attn.kv_a_proj_with_mqa.bias" in self.names,
            "routed_scaling_factor": keys.float("expert_weights_scale", 1.0),
            "norm_topk_prob": keys.bool("expert_weights_norm", False),
            "n_group": keys.int("expert_group_count", 1),
            "topk_group": keys.int("expert_group_used_count", 1),
            "topk_method": "group_limited_greedy" if is_grouped else "greedy",
        }

    def _llama4(self) -> dict[str, object]:
        keys = self.keys
        sees_all = keys.config.get("attention.sliding_window") == 0
        more: dict[str, object] = {
            "intermediate_size": keys.size("expert_feed_forward_length"),
            "intermediate_size_mlp": keys.size("feed_forward_length"),
            "attention_chunk_size": None if sees_all else LLAMA4_CHUNK,
            "use_qk_norm": keys.int("expert_count", 0) != PLAIN_LLAMA4,
        }
        return more | ({"no_rope_layers": [1] * keys.size("block_count")} if sees_all else {})

    def generation_config(self) -> dict[str, object]:
        """generation_config.json."""
        found = {ours: self.metadata.get(f"general.sampling.{key}") for key, ours in SAMPLING.items()}
        return {name: value for name, value in found.items() if value is not None}


def llama3_scaling(factors: Tensor, theta: float, rotary: int) -> dict[str, object]:
    """The config that gives these factors of Llama 3's frequencies, which the file has instead.

    Raises ValueError if they are not Llama 3's.
    """
    factor = round(float(factors.max()), 3)  # it was divided by in float32
    if bool((factors == 1).all()):
        return {}
    for length in LENGTHS:
        if torch.allclose(factors, llama3_factors(factor, theta, rotary, length), rtol=1e-4):
            scaling = LLAMA3 | {"factor": factor, "original_max_position_embeddings": length}
            return {"rope_scaling": scaling}
    raise ValueError("rope_freqs in the GGUF file is not Llama 3's; use the model's safetensors")


def llama3_factors(factor: float, theta: float, rotary: int, length: int) -> Tensor:
    """float32 [rotary / 2]: by what Llama 3 divides frequencies, from 1 for short waves to `factor`."""
    low, high = 1.0, 4.0
    waves = 2 * math.pi * theta ** (torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    smooth = (length / waves - low) / (high - low)
    return (
        (1 / ((1 - smooth) / factor + smooth))
        .where(waves > length / high, 1.0)
        .where(waves < length / low, factor)
        .float()
    )


def end_tokens(metadata: Mapping[str, object]) -> list[int]:
    """The tokens that end a text or a turn."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))
