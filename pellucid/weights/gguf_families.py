"""What llama.cpp's architectures are called here, and what their tensors and keys stand for.  One table.

A family is one entry of `FAMILIES`: the model that it becomes, names of a layer's tensors, and what its keys
do not say, for llama.cpp has it in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
MIXTURE = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
GATE = {"ffn_gate_inp": "mlp.gate"}
ROUTER = {"ffn_gate_inp": "mlp.router"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS = {name: ours.replace("_expert.", "_experts.") for name, ours in SHARED_EXPERT.items()}
CHOICE = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}  # ".bias" is not part of our name
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LATE_NORM = {"post_attention_norm": "post_attention_layernorm"}  # what others call ffn_norm
GLM_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
SINKS = {"attn_sinks": "self_attn.sinks"}
NO_SUFFIX = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")  # what is neither weight nor bias here


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the keys of an architecture mean.

    names: of a layer's tensors.  turned: rows of q and k are in llama.cpp's order.  one_more: norms have one
    more.  by_turns: biases of gates and of ups are one tensor here, by turns.  period: each so manyth layer
    sees everything, where a window is and keys do not say.  fixed: what all such models have.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: LAYER)
    turned: bool = False
    one_more: bool = False
    by_turns: bool = False
    period: int | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)


TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
SPARSE_LLAMA = LAYER | MIXTURE | GATE
DEEPSEEK = LAYER | MIXTURE | GATE | SHARED_EXPERTS | CHOICE | LATENTS
MISTRAL = Family(architecture="MistralForCausalLM", model_type="mistral", turned=True)
MIXTRAL = Family(architecture="MixtralForCausalLM", model_type="mixtral", names=SPARSE_LLAMA, turned=True)
OLMO3 = Family(architecture="Olmo3ForCausalLM", model_type="olmo3", names=LAYER | NORMS_BEHIND, period=4)
DEEPSEEK3 = Family(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", names=DEEPSEEK)
FAMILIES = {  # by general.architecture
    "llama": Family(architecture="LlamaForCausalLM", model_type="llama", turned=True),
    "qwen2": Family(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": Family(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen2moe": Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        names=LAYER | MIXTURE | GATE | SHARED_EXPERT,
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        names=LAYER | MIXTURE | GATE,
        fixed={"norm_topk_prob": True},
    ),
    "gemma": Family(architecture="GemmaForCausalLM", model_type="gemma", one_more=True, fixed=TANH),
    "ernie4_5": Family(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5"),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        names=LAYER | FOUR_NORMS,
        one_more=True,
        period=2,
        fixed=TANH | {"sliding_window": 4096},
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        names=LAYER | FOUR_NORMS,
        one_more=True,
        period=6,
        fixed=TANH | {"rope_local_base_freq": 10000.0},
    ),
    "phi3": Family(architecture="Phi3ForCausalLM", model_type="phi3", names=LAYER | FUSED),
    "chatglm": Family(architecture="GlmForCausalLM", model_type="glm", names=LAYER | GATE_UP),
    "glm4": Family(architecture="Glm4ForCausalLM", model_type="glm4", names=LAYER | GATE_UP | GLM_NORMS),
    "glm4moe": Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        names=LAYER | MIXTURE | GATE | SHARED_EXPERTS | CHOICE | LATE_NORM,
    ),
    "granite": Family(architecture="GraniteForCausalLM", model_type="granite", turned=True),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        names=LAYER | MIXTURE | ROUTER,
        turned=True,
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", model_type="olmo2", names=LAYER | NORMS_BEHIND),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        names=LAYER | MIXTURE | GATE,
        fixed={"norm_topk_prob": False},
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        names=LAYER | NORMS_BEHIND,
        period=4,
        fixed={"sliding_window": None},
    ),
    "smollm3": Family(architecture="SmolLM3ForCausalLM", model_type="smollm3", turned=True),
    "seed_oss": Family(architecture="SeedOssForCausalLM", model_type="seed_oss", names=LAYER | LATE_NORM),
    "llama4": Family(
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        names=LAYER | MIXTURE | ROUTER | SHARED_EXPERT,
    ),
    "gpt-oss": Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        names=LAYER | LATE_NORM | {n: MIXTURE[n] for n in MIXTURE if "gate_up" not in n} | ROUTER | SINKS,
        by_turns=True,
        period=2,
    ),
    "deepseek2": Family(architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", names=DEEPSEEK),
}
