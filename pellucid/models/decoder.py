"""The textbook pre-norm decoder: what Llama, Mistral, Qwen2 and Qwen3 have in common.

A family declares its differences as a `DecoderConfig`.  A model outside this mould writes its own file,
against `Builder` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.layers.linear import Unsummed
from pellucid.layers.norm import RMSNorm
from pellucid.layers.rope import RopeConfig
from pellucid.models.builder import Builder, Heads
from pellucid.models.fields import Fields
from pellucid.models.rope import rope_config

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder in numbers.  `ropes` and `windows` have one entry for each layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: Heads
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig, ...]
    windows: tuple[int | None, ...]  # tokens a query sees, itself included; None sees all
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def decoder_config(
    config: Fields, *, default_head_dim: int | None = None, default_num_kv_heads: int | None = None
) -> DecoderConfig:
    """What the families read alike from config.json; each replaces what it declares differently."""
    num_heads, hidden_size = config.size("num_attention_heads"), config.size("hidden_size")
    heads = Heads(
        num_heads,
        config.size("num_key_value_heads", default_num_kv_heads or num_heads),
        config.size("head_dim", default_head_dim or hidden_size // num_heads),
    )
    types = layer_types(config)
    return DecoderConfig(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        heads=heads,
        rms_norm_eps=config.float("rms_norm_eps", 1e-6),
        hidden_act=config.str("hidden_act", "silu"),
        tie_word_embeddings=config.bool("tie_word_embeddings", False),
        ropes=tuple(rope_config(config, heads.dim, kind) for kind in types),
        windows=(None,) * len(types),
    )


def layer_types(config: Fields) -> list[str]:
    """The kind of attention of each layer.  Raises ValueError for kinds that are not known."""
    num_layers = config.size("num_hidden_layers")
    types = config.strs("layer_types") if config.has("layer_types") else ["full_attention"] * num_layers
    unknown = set(types) - set(LAYER_TYPES)
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types in config.json are {len(types)} of {sorted(set(types))} for {num_layers} layers "
            f"(known: {', '.join(LAYER_TYPES)})"
        )
    return types


def qwen_windows(config: Fields) -> tuple[int | None, ...]:
    """Qwen's sliding windows: by `layer_types`, or from layer `max_window_layers` on, if used at all."""
    types = layer_types(config)
    if not config.bool("use_sliding_window", False):
        return (None,) * len(types)
    window = config.size("sliding_window", 4096)
    if not config.has("layer_types"):
        first = config.int("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(len(types))]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, cfg: DecoderConfig, b: Builder, index: int) -> None:
        super().__init__()
        dim, heads = cfg.hidden_size, cfg.heads
        self.is_last = index == cfg.num_layers - 1
        self.input_norm = b.norm("input_layernorm", dim, cfg.rms_norm_eps)
        a = b.at("self_attn")
        self.qkv = a.qkv("qkv_proj", dim, heads, bias=cfg.qkv_bias, norm=self.input_norm)
        self.attention = a.attention(
            "attn",
            heads,
            rope=a.rope(cfg.ropes[index]),
            qk_norm=self._qk_norm(cfg, a) if cfg.qk_norm else None,
            window=cfg.windows[index],
            is_last=self.is_last,
        )
        self.o = a.row("o_proj", heads.num * heads.dim, dim, bias=cfg.o_bias)
        self.post_norm = b.norm("post_attention_layernorm", dim, cfg.rms_norm_eps)
        self.mlp = b.gated_mlp(
            "mlp", dim, cfg.intermediate_size, cfg.hidden_act, bias=cfg.mlp_bias, norm=self.post_norm
        )

    def forward(
        self, x: Tensor | Unsummed, residual: Tensor | None, fwd: ForwardInput
    ) -> tuple[Tensor | Unsummed, Tensor]:
        """x [T, D] is what the layer before adds to the residual stream.  Returns the next layer's."""
        x, stream = self.input_norm(x, residual)
        attended = self.attention(self.qkv(x, fwd), fwd)
        if self.is_last:  # each token is on its own from here on, and most of a prompt's have done their part
            attended, stream = fwd.wanted(attended), fwd.wanted(stream)
        x, stream = self.post_norm(self.o(attended, fwd), stream)
        return self.mlp(x, fwd), stream

    @staticmethod
    def _qk_norm(cfg: DecoderConfig, b: Builder) -> tuple[RMSNorm, RMSNorm]:
        dim, eps = cfg.heads.dim, cfg.rms_norm_eps
        return b.norm("q_norm", dim, eps), b.norm("k_norm", dim, eps)


class Decoder(nn.Module):
    """Embedding, layers, norm, head.  A family overrides `declare`."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__()
        cfg = self.declare(config)
        self.ignored = ("*rotary_emb.inv_freq", *(("lm_head.weight",) if cfg.tie_word_embeddings else ()))
        m = b.at("model")
        self.embed = m.embedding("embed_tokens", cfg.vocab_size, cfg.hidden_size)
        self.layers = m.layers(cfg.num_layers, lambda i, b: DecoderLayer(cfg, b, i))
        self.norm = m.norm("norm", cfg.hidden_size, cfg.rms_norm_eps)
        tied = self.embed if cfg.tie_word_embeddings else None
        self.head = b.head("lm_head", cfg.vocab_size, cfg.hidden_size, tied=tied)

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        """This family, read from its config.json."""
        raise NotImplementedError

    @classmethod
    def rename(cls, key: str) -> str:
        """The name by which this file knows the checkpoint's tensor `key`."""
        return key

    def forward(self, fwd: ForwardInput) -> Tensor:
        """Hidden states [T, D] of this step's tokens, or of those that are wanted, behind the last norm."""
        x, residual = self.embed(fwd.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, fwd)
        return self.norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] -> [S, V], in the model's dtype."""
        return self.head(hidden)
