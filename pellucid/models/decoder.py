"""The textbook decoder: attention, then an MLP, each behind a norm and added to the residual stream.

A family declares its differences as a `DecoderConfig`.  A model outside this mould writes its own file,
against `Builder` alone.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.layers.addend import Addend
from pellucid.layers.experts import Sparse
from pellucid.layers.norm import Add, RMSNorm
from pellucid.layers.stage import Depth
from pellucid.models.builder import Builder
from pellucid.models.decoder_config import GQA, MLA, DecoderConfig, Dense, LayerConfig
from pellucid.models.fields import Fields


def heads_in_checkpoint(config: Fields) -> tuple[str, ...]:
    """Patterns of the tensors that draft (spec/mtp.py), which the model itself has no use for."""
    first, num = config.int("num_hidden_layers"), config.int("num_nextn_predict_layers", 0)
    return "mtp.*", "model.mtp_layers.*", *(f"model.layers.{first + i}.*" for i in range(num))


WITHOUT_HEAD = ("embed_tokens.", "layers.", "norm.")


class DecoderLayer(nn.Module):
    """A mixer and an MLP."""

    def __init__(self, cfg: DecoderConfig, b: Builder, index: int) -> None:
        super().__init__()
        layer, dim = cfg.layers[index], cfg.hidden_size
        self.depth, self.is_last = Depth(index), index == len(cfg.layers) - 1
        before, behind = cfg.norms.before_attention, cfg.norms.behind_attention
        self.input_norm = b.norm(before, dim, cfg.norm) if before else b.add()
        a = b.at("self_attn")
        self.attend = make_mixer(cfg, layer, a, norm=self.input_norm, is_last=self.is_last)
        self.o = a.row(
            "o_proj",
            layer.mixer.width,
            dim,
            bias=layer.mixer.o_bias,
            post=b.norm(behind, dim, cfg.norm) if behind else None,
            scale=cfg.residual_scale,
        )
        before = cfg.norms.before_mlp
        self.mlp_norm = b.norm(before, dim, cfg.norm) if before else b.add()
        self.mlp = make_mlp(cfg, layer, b, norm=self.mlp_norm)

    def forward(
        self, x: Tensor | Addend, residual: Tensor | None, fwd: ForwardInput
    ) -> tuple[Tensor | Addend, Tensor]:
        """x [T, D] is what the layer before adds to the residual stream.  Returns the next layer's."""
        x, stream = self.input_norm(x, residual)
        fwd.taps.keep(self.depth, stream)
        attended = self.attend(x, fwd)
        if self.is_last:  # each token is on its own from here on, and most of a prompt's have done their part
            attended, stream = fwd.wanted(attended), fwd.wanted(stream)
        x, stream = self.mlp_norm(self.o(attended, fwd), stream)
        return self.mlp(x, fwd), stream


def make_mixer(
    cfg: DecoderConfig, layer: LayerConfig, b: Builder, *, norm: RMSNorm | Add, is_last: bool
) -> nn.Module:
    """What brings tokens together, called as mixer(x, fwd) -> [T, layer.mixer.width].

    norm: the one whose output it takes, and nobody else.  is_last: only what fwd.wanted says is read of it.
    """
    match layer.mixer:
        case GQA():
            return GroupedAttention(cfg, layer.mixer, b, norm=norm, is_last=is_last)
        case MLA():
            return LatentMixer(cfg, layer.mixer, b, norm=norm, is_last=is_last)


def make_mlp(cfg: DecoderConfig, layer: LayerConfig, b: Builder, *, norm: RMSNorm | Add) -> nn.Module:
    """What each token takes alone, called as mlp(x, fwd) -> [T, D], for a norm.  norm: see `make_mixer`."""
    dim, behind = cfg.hidden_size, cfg.norms.behind_mlp
    post = b.norm(behind, dim, cfg.norm) if behind else None
    match layer.mlp:
        case Dense(hidden=hidden, act=act, bias=bias):
            return b.gated_mlp(
                "mlp", dim, hidden, act, bias=bias, norm=norm, post=post, scale=cfg.residual_scale
            )
        case Sparse() as mlp:
            return b.experts("mlp", dim, mlp, post=post, scale=cfg.residual_scale)


class GroupedAttention(nn.Module):
    """Queries, keys and values in one product, and attention over them."""

    def __init__(
        self, cfg: DecoderConfig, gqa: GQA, b: Builder, *, norm: RMSNorm | Add, is_last: bool
    ) -> None:
        super().__init__()
        qk_norm = b.head_norms("q_norm", "k_norm", gqa.heads.dim, cfg.norm, gqa.qk_norm)
        is_width = gqa.qk_norm == "width"
        self.width_norm = b.width_norm("q_norm", "k_norm", gqa.heads, cfg.norm) if is_width else None
        self.q_scale = b.scaled_queries(gqa.heads, gqa.q_scale) if gqa.q_scale else None
        self.qkv = b.qkv("qkv_proj", cfg.hidden_size, gqa.heads, bias=gqa.qkv_bias, norm=norm)
        self.attention = b.attention(
            "attn", gqa.heads, gqa.scores, rope=gqa.rope, qk_norm=qk_norm, is_last=is_last
        )

    def forward(self, x: Tensor, fwd: ForwardInput) -> Tensor:
        """x [T, D], or as its norm rounds it for the product -> [T, N * H]."""
        qkv = self.qkv(x, fwd)
        if self.width_norm is not None:
            qkv = self.width_norm(qkv)
        if self.q_scale is not None:
            qkv = self.q_scale(qkv, fwd.positions)
        return self.attention(qkv, fwd)


class LatentMixer(nn.Module):
    """Queries and latents, and attention over what is made of latents."""

    def __init__(
        self, cfg: DecoderConfig, mla: MLA, b: Builder, *, norm: RMSNorm | Add, is_last: bool
    ) -> None:
        super().__init__()
        self.project = b.latent(cfg.hidden_size, mla.heads, mla.latent_norm, bias=mla.bias, norm=norm)
        self.attention = b.latent_attention(
            "attn",
            mla.heads,
            mla.latent_norm,
            scale=mla.scale,
            rope=b.rope(mla.rope),
            interleaved=mla.interleaved,
            is_last=is_last,
        )

    def forward(self, x: Tensor, fwd: ForwardInput) -> Tensor:
        """x [T, D], or as its norm rounds it for the product -> [T, N * value]."""
        return self.attention(*self.project(x, fwd), fwd)


class Decoder(nn.Module):
    """Embedding, layers, norm, head.  A family overrides `declare`."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__()
        cfg = self.declare(config)
        tied_head = ("lm_head.weight",) if cfg.tied else ()
        self.ignored = ("*rotary_emb.inv_freq", *tied_head, *heads_in_checkpoint(config))
        self.num_layers = len(cfg.layers)
        m = b.at("model")
        self.embed = m.embedding(
            "embed_tokens", cfg.vocab_size, cfg.hidden_size, scale=cfg.embedding_scale, adaptable=True
        )
        self.layers = m.layers(len(cfg.layers), lambda i, b: DecoderLayer(cfg, b, i))
        self.norm = m.norm("norm", cfg.hidden_size, cfg.norm)
        tied = self.embed if cfg.tied else None
        self.head = b.head(
            *("lm_head", cfg.vocab_size, cfg.hidden_size),
            tied=tied,
            scale=cfg.logit_scale,
            cap=cfg.logit_cap,
            adaptable=True,
        )

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        """This family, read from its config.json."""
        raise NotImplementedError

    @classmethod
    def rename(cls, key: str) -> str:
        """The name by which this file knows the checkpoint's tensor `key`.

        Checkpoints for embeddings have no head, and what is before it has no name.
        """
        return f"model.{key}" if key.startswith(WITHOUT_HEAD) else key

    def forward(self, fwd: ForwardInput) -> Tensor:
        """Hidden states [T, D] of this step's tokens, or of those that are wanted, behind the last norm."""
        x, residual = self.embed(fwd.input_ids, fwd), None
        for layer in self.layers:
            x, residual = layer(x, residual, fwd)
        x, stream = self.norm(x, residual)
        fwd.taps.keep(self.num_layers, stream)
        return x

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """hidden [S, D] -> [S, V], in the model's dtype.  adapters: [S], places of those of the head."""
        return self.head(hidden) if adapters is None else self.head.adapted(hidden, adapters)
