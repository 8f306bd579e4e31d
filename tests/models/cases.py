"""Random small models of every family, as transformers makes and saves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

VOCAB = 211


@dataclass(frozen=True)
class Case:
    """One random small model of a family."""

    name: str
    family: str
    options: Mapping[str, object]
    seed: int = 0  # of its weights


SMALL: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "eos_token_id": None,
}


def rope(kind: str, **numbers: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


def yarn(**numbers: object) -> dict[str, object]:
    """Heads of 32 and a long context, so that the ramp begins and ends between the first and last feature."""
    long = {"head_dim": 32, "max_position_embeddings": 8192}
    return long | rope("yarn", factor=4.0, original_max_position_embeddings=2048, **numbers)


def llama3() -> dict[str, object]:
    return rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )


def latent(**numbers: object) -> dict[str, object]:
    """Latent attention, and experts behind a dense layer."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 24}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
    experts |= {"moe_intermediate_size": 40, "first_k_dense_replace": 1}
    return sizes | {"q_lora_rank": 20, "num_key_value_heads": 4} | experts | numbers


def longrope(*, original: int) -> dict[str, object]:
    factors = {"short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2 + i for i in range(8)]}
    return {"original_max_position_embeddings": original, "max_position_embeddings": 512} | rope(
        "longrope", **factors
    )


GRANITE: dict[str, object] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}
GRANITE_SHARED = GRANITE | {"shared_intermediate_size": 40, "num_experts_per_tok": 2}
GRANITE4 = GRANITE | {"shared_intermediate_size": 56, "num_local_experts": 0, "mamba_n_heads": 4}
GRANITE4 |= {"layer_types": ["full_attention"] * 2}
# Caps and scales at which they matter to so small a model.
GEMMA: dict[str, object] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 10,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
    "sliding_window": 6,
}
GEMMA3 = GEMMA | {"attn_logit_softcapping": None}
GEMMA3_LINEAR: dict[str, object] = {
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
OLMO3_YARN: dict[str, object] = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
LLAMA4: dict[str, object] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 5,
    "attention_chunk_size": 10,
    "floor_scale": 7,
}
MOE = {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3} | {
    "norm_topk_prob": True
}
GLM_MOE = {"head_dim": 16, "moe_intermediate_size": 40, "n_routed_experts": 8} | {"num_experts_per_tok": 3}
GPT_OSS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9}
GPT_OSS |= rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
SHARED = {"shared_expert_intermediate_size": 40}
CASES = [
    Case("qwen3", "Qwen3", {"head_dim": 32}),
    Case("qwen3 with one kv head", "Qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    Case(
        "qwen3 with biases, tied",
        "Qwen3",
        {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Case(
        "qwen3 with windows in some layers",
        "Qwen3",
        {"head_dim": 32, "layer_types": ["full_attention", "sliding_attention"], **WINDOW},
    ),
    Case("qwen3 with yarn", "Qwen3", yarn()),
    Case("qwen2", "Qwen2", {"num_key_value_heads": 4}),
    Case("qwen2 with one kv head, tied", "Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("qwen2 with windows from layer 1", "Qwen2", {"max_window_layers": 1, **WINDOW}),
    Case("qwen2 with yarn not truncated", "Qwen2", yarn(truncate=False, beta_fast=17, beta_slow=2)),
    Case("llama", "Llama", {"num_key_value_heads": 4}),
    Case(
        "llama with biases everywhere",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    Case(
        "llama with wide heads, tied, all of which turn",
        "Llama",
        {"head_dim": 24, "tie_word_embeddings": True} | rope("default", partial_rotary_factor=0.5),
    ),
    Case("llama with llama3 scaling", "Llama", llama3()),
    Case("llama with linear scaling", "Llama", rope("linear", factor=3.0)),
    Case("llama within dynamic scaling", "Llama", rope("dynamic", factor=3.0)),
    Case("llama with yarn and mscale", "Llama", yarn(mscale=0.7, mscale_all_dim=0.4)),
    Case("mistral", "Mistral", {"sliding_window": None}),
    Case("mistral with a narrow window", "Mistral", {"sliding_window": 5, "head_dim": 32}),
    Case("mistral with yarn", "Mistral", {"sliding_window": 12, **yarn(attention_factor=0.8)}),
    Case("phi3", "Phi3", {}),
    Case(
        "phi3 with a window, one kv head, part of a head",
        "Phi3",
        {"sliding_window": 9, "num_key_value_heads": 1, "partial_rotary_factor": 0.75},
    ),
    Case("phi3 with longrope", "Phi3", longrope(original=256)),
    Case("gemma", "Gemma", {"head_dim": 24, "hidden_act": "gelu", "attention_bias": True}),
    Case("gemma2", "Gemma2", GEMMA),
    Case(
        "gemma2 without caps, biased, one kv head",
        "Gemma2",
        GEMMA
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
        | {"num_key_value_heads": 1, "sliding_window": 11},
    ),
    Case("gemma3", "Gemma3Text:Gemma3", GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 2}),
    Case("gemma3 with linear scaling in full layers", "Gemma3Text:Gemma3", GEMMA3 | GEMMA3_LINEAR),
    Case("glm", "Glm", {"head_dim": 16}),
    Case(
        "glm without biases, all of a head",
        "Glm",
        {"head_dim": 24, "attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    Case("glm4", "Glm4", {"head_dim": 16}),
    Case(
        "glm4 with one kv head, tied",
        "Glm4",
        {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    Case("granite", "Granite", GRANITE),
    Case(
        "granite with biases, tied",
        "Granite",
        GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case("granite without factors", "Granite", {}),
    Case("olmo2", "Olmo2", {}),
    Case("olmo2 with biases, one kv head", "Olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    Case("olmo2 tied, as many kv heads", "Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    Case("olmo3", "Olmo3", {"num_hidden_layers": 4, "sliding_window": 6}),
    Case(
        "olmo3 with yarn in full layers",
        "Olmo3",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 11, **OLMO3_YARN},
    ),
    Case("exaone4", "Exaone4", {"num_hidden_layers": 4, "sliding_window": 6}),
    Case(
        "exaone4 without windows, tied",
        "Exaone4",
        {
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 2,
            "head_dim": 24,
        },
    ),
    Case(
        "exaone4 by letters",
        "Exaone4",
        {
            "sliding_window": 9,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"],
            "num_key_value_heads": 1,
        },
    ),
    Case(
        "ernie4_5 with biases, untied, yarn",
        "Ernie4_5",
        {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False}
        | rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    Case("smollm3", "SmolLM3", {"num_hidden_layers": 4}),
    Case(
        "smollm3 with windows, biases, untied",
        "SmolLM3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Case("seed-oss", "SeedOss", {"head_dim": 16}),
    Case(
        "seed-oss with other biases, tied",
        "SeedOss",
        {
            "head_dim": 24,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Case("mistral with gelu", "Mistral", {"hidden_act": "gelu", "sliding_window": 64}),
    Case("qwen3moe", "Qwen3Moe", MOE),
    Case(
        "qwen3moe with dense layers, unnormalised, with biases",
        "Qwen3Moe",
        {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
        | {"norm_topk_prob": False, "attention_bias": True},
    ),
    Case(
        "qwen3moe with windows everywhere, tied", "Qwen3Moe", {**MOE, **WINDOW, "tie_word_embeddings": True}
    ),
    Case("qwen2moe", "Qwen2Moe", {**MOE, **SHARED, "norm_topk_prob": False}, seed=1),
    Case(
        "qwen2moe with windows in even layers, no bias, an odd number of experts",
        "Qwen2Moe",
        {**MOE, **SHARED, **WINDOW, "qkv_bias": False, "num_hidden_layers": 3, "num_experts": 7},
    ),
    Case("mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("mixtral with a window", "Mixtral", {"num_local_experts": 3, "sliding_window": 9}),
    Case("deepseek v2", "DeepseekV2", latent(q_lora_rank=None, routed_scaling_factor=1.5)),
    Case(
        "deepseek v2 with experts in groups",
        "DeepseekV2",
        latent(topk_method="group_limited_greedy", n_group=4, topk_group=2)
        | {"attention_bias": True, "mlp_bias": True},
    ),
    Case(
        "deepseek v2 with biases on latents, dense",
        "DeepseekV2",
        latent(q_lora_rank=None, attention_bias=True, first_k_dense_replace=2),
    ),
    Case(
        "deepseek v2 with yarn, experts everywhere",
        "DeepseekV2",
        latent(qk_rope_head_dim=32, first_k_dense_replace=0, **yarn(mscale=0.707, mscale_all_dim=0.707)),
    ),
    Case("deepseek v3", "DeepseekV3", latent(n_group=4, topk_group=2)),
    Case(
        "deepseek v3 in halves, unnormalised, one group, none shared",
        "DeepseekV3",
        latent(n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False, q_lora_rank=None)
        | {"n_shared_experts": 0},
    ),
    Case(
        "deepseek v3 with yarn",
        "DeepseekV3",
        latent(qk_rope_head_dim=32, n_group=2, topk_group=1, **yarn(mscale=1.0, mscale_all_dim=1.0)),
    ),
    Case(
        "deepseek v32",
        "DeepseekV32",
        latent(n_group=2, topk_group=2, index_topk=128, index_head_dim=16, index_n_heads=2),
    ),
    Case("glm4 moe lite", "Glm4MoeLite", latent(qk_nope_head_dim=24, v_head_dim=32, n_shared_experts=1)),
    Case("llama4", "Llama4Text:Llama4", LLAMA4),
    Case(
        "llama4 with dense layers, biases, plain heads",
        "Llama4Text:Llama4",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True}
        | {"attn_temperature_tuning": False, "no_rope_layers": [1, 0, 1, 1], "num_key_value_heads": 1},
    ),
    Case(
        "llama4 in one chunk, llama3 scaling, two experts",
        "Llama4Text:Llama4",
        LLAMA4 | llama3() | {"attention_chunk_size": 8192, "floor_scale": 8192, "num_experts_per_tok": 2},
    ),
    Case("gptoss", "GptOss", GPT_OSS),
    Case(
        "gptoss without windows, wider limit, another alpha",
        "GptOss",
        GPT_OSS | {"swiglu_limit": 3.0, "swiglu_alpha": 1.2, "layer_types": ["full_attention"] * 2},
    ),
    Case(
        "gptoss with one kv head, few biases",
        "GptOss",
        GPT_OSS | {"num_key_value_heads": 1, "attention_bias": False, "sliding_window": 3},
    ),
    Case("olmoe", "Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    Case(
        "olmoe renormalised, with biases",
        "Olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    Case("granitemoe", "GraniteMoe", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    Case(
        "granitemoe with factors, tied",
        "GraniteMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
        | {"logits_scaling": 2.0, "attention_bias": True},
    ),
    Case("granitemoe beside a shared one", "GraniteMoeShared", GRANITE_SHARED | {"num_local_experts": 5}),
    Case("granite 4", "GraniteMoeHybrid", GRANITE4 | {"position_embedding_type": "rope"}),
    Case(
        "granite 4 without positions, tied",
        "GraniteMoeHybrid",
        GRANITE4 | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    Case("glm4moe", "Glm4Moe", GLM_MOE, seed=1),
    Case(
        "glm4moe of groups, normalized heads, biases",
        "Glm4Moe",
        GLM_MOE
        | {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True}
        | {"n_shared_experts": 2, "routed_scaling_factor": 2.5},
        seed=1,
    ),
    Case(
        "glm4moe unnormalised, none shared",
        "Glm4Moe",
        GLM_MOE | {"norm_topk_prob": False, "n_shared_experts": 0},
    ),
]


class Reference:
    """A transformers model with large random weights, saved in `folder` for our loader."""

    def __init__(self, case: Case, folder: Path) -> None:
        family, options = case.family, case.options
        torch.manual_seed(case.seed)
        of_config, _, of_model = family.partition(":")
        config = getattr(transformers, f"{of_config}Config")(**{**SMALL, **options})
        if options.get("attn_logit_softcapping") is not None:
            config._attn_implementation = "eager"  # others know no caps
        self.model = getattr(transformers, f"{of_model or of_config}ForCausalLM")(config).eval()
        for name, parameter in self.model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:  # large enough that attention, biases and windows matter
                torch.nn.init.normal_(parameter, std=0.15)
        for name, buffer in self.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
        self.model.save_pretrained(folder)
        self.folder = folder
        self.prompts = [torch.randint(VOCAB, (n,)).tolist() for n in (37, 1, 18)]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[n, V]"""
        return self.model(torch.tensor([tokens])).logits[0]
