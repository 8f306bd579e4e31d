"""EAGLE-3: a decoder layer that reads three of the target's layers, and has a vocabulary of its own.

The streams that enter these layers are fused (`fc`); from the second draft on the head's own output stands in
their place.  `d2t` says which of the target's tokens each of its own is.
Li, Wei, Zhang, Zhang, "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test", 2025.
Legend: T tokens, S logits, D model dim of the head, E of the target, n taps.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.models.build import ModelFactory
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import dense, grouped_layers, heads_of
from pellucid.models.fields import Fields
from pellucid.models.head import HeadPlan, Lender, whole
from pellucid.spec.base import Needs
from pellucid.spec.eagle import check_size, norm_of
from pellucid.spec.follower import HeadProposer
from pellucid.spec.own_vocabulary import OwnVocabulary


class Eagle3Head(nn.Module):
    """The public layout: `fc`, `midlayer`, `norm`, `lm_head`, `d2t`; perhaps `embed_tokens`."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = Decoder.stacked

    def __init__(self, config: Fields, b: Builder, lender: Lender, num_taps: int, has_embed: bool) -> None:
        super().__init__()
        (mixer,) = grouped_layers(config, heads_of(config), qkv_bias=config.bool("attention_bias", False))
        dim, norm, mlp = config.size("hidden_size"), norm_of(config), dense(config)
        num_own = config.size("draft_vocab_size", config.size("vocab_size"))
        self.ignored = ("t2d", "*rotary_emb.inv_freq")
        self.num_taps, self.dim = num_taps, dim
        self.norm_output = config.bool("norm_output", False)
        self.residual_is_normed = config.bool("norm_before_residual", False)
        if has_embed:
            self.embed = b.embedding("embed_tokens", lender.vocab_size, dim)
        else:
            check_size(config, lender)
            self.embed = lender.embedding()
        fused = num_taps * lender.hidden_size
        self.input_norm = b.norm("input_norm", fused, norm) if config.bool("norm_before_fc", False) else None
        self.tap_norms = nn.ModuleList(
            b.norm(f"fc_norm.{i}", lender.hidden_size, norm)
            for i in range(num_taps if config.bool("fc_norm", False) else 0)
        )
        self.fc = b.linear("fc", fused, dim, bias=config.bool("bias", False))
        layer = b.at("midlayer")
        self.embed_norm = layer.norm("input_layernorm", dim, norm)
        self.hidden_norm = layer.norm("hidden_norm", dim, norm)
        a = layer.at("self_attn")
        self.qkv = a.qkv("qkv_proj", 2 * dim, mixer.heads, bias=mixer.qkv_bias)
        self.attention = a.attention("attn", mixer.heads, mixer.scores, rope=mixer.rope)
        self.o = a.row("o_proj", mixer.width, dim)
        self.post_norm = layer.norm("post_attention_layernorm", dim, norm)
        self.mlp = layer.gated_mlp("mlp", dim, mlp.hidden, mlp.act, norm=self.post_norm)
        self.norm = b.norm("norm", dim, norm)
        self.lm_head = b.linear("lm_head", dim, num_own, kind="head")
        self.vocabulary = OwnVocabulary(b.integers("d2t", num_own), lender, are_offsets=True)

    @staticmethod
    def rename(key: str) -> str:
        """Checkpoints call the layer `midlayer` or `layers.0`."""
        return key.replace("layers.0.", "midlayer.", 1) if key.startswith("layers.0.") else key

    def forward(self, fwd: ForwardInput, states: Tensor) -> Tensor:
        """states [T, D], fused ones or of its own making -> [T, D]."""
        embedded, _ = self.embed_norm(self.embed(fwd.input_ids))
        normed, stream = self.hidden_norm(states)
        stream = normed if self.residual_is_normed else stream
        attended = self.o(self.attention(self.qkv(torch.cat((embedded, normed), dim=-1), fwd), fwd), fwd)
        x, stream = self.post_norm(attended, stream)
        out = stream + whole(self.mlp(x, fwd))
        return self.norm(out)[0] if self.norm_output else out

    def logits(self, hidden: Tensor) -> Tensor:
        x = hidden if self.norm_output else self.norm(hidden)[0]
        return self.vocabulary(self.lm_head(x))

    def fuse(self, taps: Tensor) -> Tensor:
        """[T, n * E] -> [T, D]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)[0]
        if len(self.tap_norms):
            parts = taps.chunk(self.num_taps, dim=-1)
            parts = [each(part.contiguous())[0] for each, part in zip(self.tap_norms, parts, strict=True)]
            taps = torch.cat(parts, dim=-1)
        return self.fc(taps)


class Eagle3Proposer(HeadProposer):
    """Feeds it streams of three layers, fused."""

    head: Eagle3Head

    def plan(self, lender: Lender, factory: ModelFactory) -> HeadPlan:
        taps = taps_of(factory.draft_config, lender.config.size("num_hidden_layers"))
        self.needs = Needs(taps=taps)

        def make(config: Fields, b: Builder) -> Eagle3Head:
            has_embed = "embed_tokens.weight" in b.names
            self.head = b.piece(lambda b: Eagle3Head(config, b, lender, len(taps), has_embed))
            return self.head

        return HeadPlan(make=make, stacked=Eagle3Head.stacked, rename=Eagle3Head.rename)

    def states(self, hidden: Tensor, taps: Tensor | None) -> Tensor:
        assert taps is not None, "the target shows its layers"
        return self.head.fuse(taps)


def taps_of(config: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that a head reads what enters of: its config's, else an early, the middle and a late one."""
    places = [config, *(config.part(name) for name in ("eagle_config",) if config.has(name))]
    for place in places:
        if place.has("eagle_aux_hidden_state_layer_ids"):
            return tuple(place.ints("eagle_aux_hidden_state_layer_ids"))
    return 2, num_layers // 2, num_layers - 3
