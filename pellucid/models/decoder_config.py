"""A decoder in numbers: what a family declares, a layer at a time.  Its weights and kernels are elsewhere.

A layer is a mixer of tokens and an MLP of each; another kind of either is a class more here, and a `case` in
`models/decoder.py` that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from pellucid.attention.base import Heads, Scores
from pellucid.layers.activation import Act
from pellucid.layers.experts import Sparse
from pellucid.layers.latent import LatentHeads
from pellucid.layers.norm import NormSpec
from pellucid.layers.position_scale import PositionScale
from pellucid.layers.rope import RopeConfig
from pellucid.models.fields import Fields
from pellucid.models.rope import LAYER_TYPES, FamilyRope, rope_config

# Queries and keys are normalized over each head, or over all together, or over each head without weights.
QKNormed = Literal["head", "width", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GQA:
    """Attention in which groups of query heads share a head of keys and values (Ainslie et al. 2023)."""

    heads: Heads
    scores: Scores
    rope: RopeConfig | None
    qk_norm: QKNormed | None = None
    q_scale: PositionScale | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def width(self) -> int:
        """Features of what it gives to the output projection."""
        return self.heads.num * self.heads.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA:
    """Latent attention: keys and values of all heads are made of one row a token (DeepSeek-AI 2024)."""

    heads: LatentHeads
    scale: float  # of the scores
    rope: RopeConfig
    interleaved: bool  # features 2i and 2i + 1 turn together, not i and i + heads.rope / 2
    latent_norm: NormSpec  # of all latents
    bias: bool = False  # on all latents
    o_bias: bool = False

    @property
    def width(self) -> int:
        """Features of what it gives to the output projection."""
        return self.heads.num * self.heads.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated MLP that every token takes."""

    hidden: int
    act: Act
    bias: bool = False


MLP = Dense | Sparse


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer: what mixes tokens, then what each takes alone."""

    mixer: GQA | MLA
    mlp: MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """What the checkpoint calls the norms of a layer; None, there is no such one.

    Those before take the residual stream, those behind what is then added to it.
    """

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Embedding, layers, norm, head."""

    vocab_size: int
    hidden_size: int
    tied: bool  # the head multiplies with the table of embeddings
    layers: tuple[LayerConfig, ...]
    norm: NormSpec
    norms: Norms = Norms()
    embedding_scale: float = 1.0  # of embeddings
    residual_scale: float = 1.0  # of what layers add to the residual stream
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)


class Sizes(TypedDict):
    """What every family reads alike."""

    vocab_size: int
    hidden_size: int
    tied: bool


def sizes(config: Fields, *, tied: bool = False) -> Sizes:
    """tied: whether head and embeddings share a table where config.json does not say."""
    return Sizes(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        tied=config.bool("tie_word_embeddings", tied),
    )


def heads_of(
    config: Fields, *, num: int | None = None, num_kv: int | None = None, dim: int | None = None
) -> Heads:
    """The heads in config.json, and the family's where it is silent.

    By default as many heads of keys as of queries, and heads that share the model's width, as it is where
    num_key_value_heads or head_dim are null.
    """
    num = config.size("num_attention_heads", num)
    if num_kv is None or "num_key_value_heads" in config.config:
        num_kv = num
    num_kv = config.size("num_key_value_heads", num_kv)
    if dim is None or "head_dim" in config.config:
        dim = config.size("hidden_size") // num
    return Heads(num, num_kv, config.size("head_dim", dim))


def layer_types(
    config: Fields, default: Sequence[str] | None = None, known: Sequence[str] = LAYER_TYPES
) -> list[str]:
    """The kind of attention of each layer, `default` where config.json does not say, or full attention.

    Raises ValueError for kinds that are not known.
    """
    num_layers = config.size("num_hidden_layers")
    types = config.strs("layer_types") if config.has("layer_types") else default
    types = ["full_attention"] * num_layers if types is None else list(types)
    unknown = set(types) - set(known)
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types in config.json are {len(types)} of {sorted(set(types))} for {num_layers} layers "
            f"(known: {', '.join(known)})"
        )
    return types


def every(interval: int, config: Fields) -> list[str]:
    """The kinds of layers of which every `interval`-th has full attention, and the others a window."""
    num = config.size("num_hidden_layers")
    return ["full_attention" if (i + 1) % interval == 0 else "sliding_attention" for i in range(num)]


def window_of(config: Fields, default: int | None = None) -> int | None:
    """Tokens that layers with a window see.  Null: all, and only a field that is absent means `default`."""
    name = "sliding_window"
    if name not in config.config:
        return default
    return config.size(name) if config.has(name) else None


def windows_of(types: Sequence[str], window: int | None) -> list[int | None]:
    """The tokens that a query of each layer sees: `window` where layers are of the sliding kind."""
    return [window if kind == "sliding_attention" else None for kind in types]


def grouped_layers(
    config: Fields,
    heads: Heads,
    *,
    types: Sequence[str] | None = None,
    windows: Sequence[int | None] | None = None,
    qk_norm: QKNormed | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    rope: FamilyRope | None = None,
) -> tuple[GQA, ...]:
    """The mixer of each layer where they differ in windows and ropes alone.

    types: the layers' kinds.  windows: tokens a query of each sees, itself included; None sees all.
    """
    types = types or layer_types(config)
    return tuple(
        GQA(
            heads=heads,
            scores=Scores(scale=heads.dim**-0.5, window=window),
            rope=rope_config(config, heads.dim, kind, rope),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
        )
        for kind, window in zip(types, windows or [None] * len(types), strict=True)
    )


def dense(config: Fields, *, act: str = "silu", bias: bool = False) -> Dense:
    """The MLP of all layers; act: where config.json does not say."""
    return Dense(hidden=config.size("intermediate_size"), act=Act(config.str("hidden_act", act)), bias=bias)


def decoder_config(
    config: Fields, mixers: Sequence[GQA], mlp: MLP | Sequence[MLP] | None = None, *, eps: float = 1e-6
) -> DecoderConfig:
    """The textbook pre-norm decoder of these mixers, with an MLP behind each, by default a dense one.

    mlp: of all layers, or of each.  eps: of its norms, where config.json does not say.
    """
    mlp = mlp or dense(config)
    mlps = mlp if isinstance(mlp, Sequence) else [mlp] * len(mixers)
    return DecoderConfig(
        **sizes(config),
        norm=NormSpec(config.float("rms_norm_eps", eps)),
        layers=tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True)),
    )
