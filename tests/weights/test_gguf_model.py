"""A GGUF file as a checkpoint: configs of each family, names, and what llama.cpp's converter did undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pellucid.models.checkpoint import ASSETS, read_json
from pellucid.weights.gguf_config import llama3_factors
from pellucid.weights.gguf_families import FAMILIES
from pellucid.weights.gguf_model import GgufModel, model_name, turned_back
from tests.weights.gguf_file import Stored, write

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 10
TYPES = {torch.float32: 0, torch.float16: 1}


def stored(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), TYPES[tensor.dtype], tensor.numpy().tobytes())


def keys_of(kind: str, **more: object) -> dict[str, object]:
    own = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        **more,
    }
    return {"general.architecture": kind, **{f"{kind}.{key}": value for key, value in own.items()}}


def model(tmp_path: Path, kind: str, tensors: dict[str, Tensor] | None = None, **more: object) -> GgufModel:
    everything = {"token_embd.weight": torch.randn(VOCAB, HIDDEN), **(tensors or {})}
    files = {name: stored(tensor) for name, tensor in everything.items()}
    return GgufModel(write(tmp_path / "model.gguf", keys_of(kind, **more), files))


def test_the_config_is_that_of_the_model_it_was_made_from() -> None:
    found = GgufModel(Path(__file__).parent / "data" / "qwen3.gguf")
    original = read_json(ASSETS / "sprout" / "config.json")
    cut = {"num_hidden_layers": 2, "vocab_size": 8, "eos_token_id": [57]}
    of_others = {"quantization_config"}
    for name, value in found.config.items():
        is_said = name in original or value and name != "use_qk_norm"
        assert name in of_others or not is_said or value == cut.get(name, original.get(name)), name
    assert found.generation_config == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("kind", FAMILIES)
def test_configs_have_what_every_model_needs(tmp_path: Path, kind: str) -> None:
    more = {"expert_feed_forward_length": INNER, "rope.dimension_count": HEAD_DIM}
    latent = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    config = model(tmp_path, kind, **more, **(latent if kind == "deepseek2" else {})).config
    assert config["architectures"] == [FAMILIES[kind].architecture]
    wanted = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if kind == "deepseek2" else KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "gguf"},
    }
    assert {name: config[name] for name in wanted} == wanted


def test_mistral_is_llama_with_a_window(tmp_path: Path) -> None:
    config = model(tmp_path, "llama", **{"attention.sliding_window": 128}).config
    assert config["architectures"] == ["MistralForCausalLM"] and config["sliding_window"] == 128


def test_heads_biases_and_dtypes_follow_from_tensors(tmp_path: Path) -> None:
    tensors = {
        "output.weight": torch.randn(VOCAB, HIDDEN).half(),
        "blk.0.attn_q.bias": torch.zeros(HIDDEN),
    }
    config = model(tmp_path, "qwen2", tensors).config
    assert config["tie_word_embeddings"] is False and config["attention_bias"] is True
    assert config["dtype"] == "float16"


def test_rows_of_q_and_k_are_turned_back(tmp_path: Path) -> None:
    """llama.cpp rotates neighbours, others the two halves of a head."""
    original = {"q": torch.randn(HIDDEN, HIDDEN), "k": torch.randn(KV_HEADS * HEAD_DIM, HIDDEN)}

    def turned(rows: Tensor, heads: int) -> Tensor:
        return rows.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(rows.shape).contiguous()

    tensors = {
        "blk.0.attn_q.weight": turned(original["q"], HEADS),
        "blk.0.attn_k.weight": turned(original["k"], KV_HEADS),
        "blk.0.attn_k.bias": turned(original["k"], KV_HEADS)[:, 0].contiguous(),
        "blk.0.attn_v.weight": original["k"],
    }
    found = model(tmp_path, "llama", tensors)
    layer = "model.layers.0.self_attn"
    assert torch.equal(found.read(f"{layer}.q_proj.weight"), original["q"])
    assert torch.equal(found.read(f"{layer}.k_proj.weight"), original["k"])
    assert torch.equal(found.read(f"{layer}.k_proj.bias"), original["k"][:, 0])
    assert torch.equal(found.read(f"{layer}.v_proj.weight"), original["k"])
    plain = model(tmp_path, "qwen2", {"blk.0.attn_q.weight": original["q"]})
    assert torch.equal(plain.read(f"{layer}.q_proj.weight"), original["q"])
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert turned_back(blocks, 2)[:8, 0].tolist() == [0, 32, 64, 96, 16, 48, 80, 112]


def test_gemmas_norms_lose_their_one(tmp_path: Path) -> None:
    tensors = {"output_norm.weight": torch.full((HIDDEN,), 1.5), "blk.1.ffn_norm.weight": torch.ones(HIDDEN)}
    found = model(tmp_path, "gemma2", tensors)
    assert found.read("model.norm.weight").unique().tolist() == [0.5]
    assert found.read("model.layers.1.pre_feedforward_layernorm.weight").unique().tolist() == [0]


def test_gemmas_layers_look_near_and_far(tmp_path: Path) -> None:
    more = {"attention.sliding_window": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    two = model(tmp_path, "gemma2", **more).config
    assert two["layer_types"] == ["sliding_attention", "full_attention"]
    assert (two["attn_logit_softcapping"], two["final_logit_softcapping"]) == (50, 30)
    assert two["query_pre_attn_scalar"] == HEAD_DIM and two["hidden_activation"] == "gelu_pytorch_tanh"
    wide = {"attention.key_length": 32, "attention.sliding_window": 32}
    three = model(tmp_path, "gemma3", block_count=62, **wide).config
    assert three["query_pre_attn_scalar"] == HIDDEN // HEADS and three["head_dim"] == 32
    types = three["layer_types"]
    assert isinstance(types, list)
    assert types[4:7] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert three["rope_local_base_freq"] == 10000


def test_fused_matrices_and_long_positions_of_phi3(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_qkv.weight": torch.randn(128, HIDDEN),
        "blk.0.ffn_up.weight": torch.randn(2 * INNER, HIDDEN),
        "rope_factors_long.weight": torch.tensor([1.0, 2.0]),
        "rope_factors_short.weight": torch.tensor([1.0, 1.5]),
    }
    more = {"rope.scaling.original_context_length": 128, "rope.dimension_count": 4}
    found = model(tmp_path, "phi3", tensors, **more)
    assert "model.layers.0.self_attn.qkv_proj.weight" in found.infos
    assert found.infos["model.layers.0.mlp.gate_up_proj.weight"].shape == (2 * INNER, HIDDEN)
    assert found.config["partial_rotary_factor"] == 0.25
    assert found.config["original_max_position_embeddings"] == 128
    assert found.config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1.0, 2.0],
        "short_factor": [1.0, 1.5],
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_positions_are_recognised(tmp_path: Path, factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    assert torch.allclose(llama3_factors(factor, 500000.0, 128, 8192), (plain / stretched).float(), rtol=1e-5)
    tensors = {"rope_freqs.weight": (plain / stretched).float()}
    found = model(tmp_path, "llama", tensors, **{"attention.key_length": 128, "rope.dimension_count": 128})
    del rope["rope_theta"]
    assert found.config["rope_scaling"] == rope
    tensors["rope_freqs.weight"][20] = 3.0
    with pytest.raises(ValueError, match="rope_freqs in the GGUF file is not Llama 3's"):
        model(tmp_path, "llama", tensors, **{"attention.key_length": 128, "rope.dimension_count": 128})


def test_other_positions_are_keys(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    found = model(tmp_path, "qwen2", **yarn, **{"rope.scaling.original_context_length": 128}).config
    expected: dict[str, object] = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    assert found["rope_scaling"] == expected
    names = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    for value, (theirs, ours) in enumerate(names.items(), 3):
        yarn[f"rope.scaling.yarn_{theirs}"] = expected[ours] = float(value)
    found = model(tmp_path, "qwen2", **yarn, **{"rope.scaling.original_context_length": 128}).config
    assert found["rope_scaling"] == expected
    assert model(tmp_path, "gemma3", **{"rope.freq_base_swa": 7.0}).config["rope_local_base_freq"] == 7


def test_experts_are_one_tensor(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_gate_exps.weight": torch.randn(4, INNER, HIDDEN),
        "blk.0.ffn_gate_inp.weight": torch.randn(4, HIDDEN),
    }
    found = model(tmp_path, "qwen3moe", tensors, expert_count=4, expert_used_count=2)
    assert found.infos["model.layers.0.mlp.experts.gate_proj.weight"].shape == (4, INNER, HIDDEN)
    assert "model.layers.0.mlp.gate.weight" in found.infos
    assert (found.config["num_experts"], found.config["num_experts_per_tok"]) == (4, 2)


def test_experts_of_old_files_are_a_tensor_each(tmp_path: Path) -> None:
    tensors = {"blk.1.ffn_gate.3.weight": torch.randn(INNER, HIDDEN)}
    found = model(tmp_path, "llama", tensors, expert_count=4, expert_used_count=2)
    assert found.config["architectures"] == ["MixtralForCausalLM"]
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in found.infos


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    tensors = {"blk.1.nextn.eh_proj.weight": torch.zeros(1), "blk.0.attn_norm.weight": torch.ones(HIDDEN)}
    found = model(tmp_path, "glm4moe", tensors, nextn_predict_layers=1)
    assert found.config["num_hidden_layers"] == 1
    assert set(found.infos) == {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}


def test_a_window_of_0_is_none(tmp_path: Path) -> None:
    assert model(tmp_path, "phi3", **{"attention.sliding_window": 0}).config["sliding_window"] is None
    seen = model(tmp_path, "gemma3").config["layer_types"]
    assert seen == ["full_attention"] * 2


def test_ends_of_texts_and_turns(tmp_path: Path) -> None:
    keys = keys_of("llama") | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    path = write(tmp_path / "a.gguf", keys, {"token_embd.weight": stored(torch.randn(VOCAB, HIDDEN))})
    assert GgufModel(path).config["eos_token_id"] == [2, 7]


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="architecture 'mamba', which is not read from GGUF .known: llama"):
        model(tmp_path, "mamba")
    with pytest.raises(
        ValueError, match="tensor 'blk.0.ffn_up_exps.weight', which is not known of .*'llama'"
    ):
        model(tmp_path, "llama", {"blk.0.ffn_up_exps.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="tensor 'mystery.weight'"):
        model_name("mystery.weight", FAMILIES["llama"], "llama")
    path = write(tmp_path / "a.gguf", keys_of("llama"), {})
    with pytest.raises(ValueError, match="has no token_embd.weight; convert the model again"):
        GgufModel(path)
    with pytest.raises(ValueError, match=r"has no 'llama\.block_count'"):
        GgufModel(write(tmp_path / "a.gguf", {"general.architecture": "llama"}, {}))
