"""EAGLE: one decoder layer that guesses the target's next hidden state, of this one and the token behind it.

Its layer has no norm before attention and none follows it: what it puts out stands for the target's states
behind the last norm, so the target's own head reads it, and it is recycled as it is.
Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024.
Legend: T tokens, S logits, D model dim.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.layers.norm import NormSpec
from pellucid.models.build import ModelFactory
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import dense, grouped_layers, heads_of
from pellucid.models.fields import Fields
from pellucid.models.head import HeadPlan, Lender, whole
from pellucid.spec.follower import HeadProposer


class EagleHead(nn.Module):
    """The public layout: `embed_tokens`, `fc`, `layers.0`."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = Decoder.stacked

    def __init__(self, config: Fields, b: Builder, lender: Lender) -> None:
        super().__init__()
        check_size(config, lender)
        layers = grouped_layers(config, heads_of(config), qkv_bias=config.bool("attention_bias", False))
        if len(layers) != 1:
            raise ValueError(f"the EAGLE head has {len(layers)} layers, but one is supported")
        mixer, dim = layers[0], config.size("hidden_size")
        self.ignored = ("*rotary_emb.inv_freq", "lm_head.weight")
        self.lender = lender
        self.embed = b.embedding("embed_tokens", lender.vocab_size, dim)
        self.fc = b.linear("fc", 2 * dim, dim, bias=config.bool("bias", False))
        layer = b.at("layers.0")
        a, mlp = layer.at("self_attn"), dense(config)
        self.qkv = a.qkv("qkv_proj", dim, mixer.heads, bias=mixer.qkv_bias)
        self.attention = a.attention("attn", mixer.heads, mixer.scores, rope=mixer.rope)
        self.o = a.row("o_proj", mixer.width, dim)
        self.post_norm = layer.norm("post_attention_layernorm", dim, norm_of(config))
        self.mlp = layer.gated_mlp("mlp", dim, mlp.hidden, mlp.act, norm=self.post_norm)

    def forward(self, fwd: ForwardInput, states: Tensor) -> Tensor:
        """states [T, D] -> the guessed next ones, [T, D]."""
        x = self.fc(torch.cat((whole(self.embed(fwd.input_ids)), states), dim=-1))
        attended = self.o(self.attention(self.qkv(x, fwd), fwd), fwd)
        normed, stream = self.post_norm(attended, x)
        return stream + whole(self.mlp(normed, fwd))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lender.logits(hidden)


class EagleProposer(HeadProposer):
    """Feeds it the target's states behind the last norm."""

    def plan(self, lender: Lender, factory: ModelFactory) -> HeadPlan:
        return HeadPlan(
            make=lambda config, b: b.piece(lambda b: EagleHead(config, b, lender)), stacked=EagleHead.stacked
        )


def norm_of(config: Fields) -> NormSpec:
    """A head's norms."""
    return NormSpec(config.float("rms_norm_eps", 1e-6))


def check_size(config: Fields, lender: Lender) -> None:
    """Raise ValueError if a head works at another width than the target, whose states or tables it takes."""
    own, theirs = config.size("hidden_size"), lender.hidden_size
    if own != theirs:
        raise ValueError(
            f"the draft head has hidden_size {own:,}, the model {theirs:,}; "
            "take the head that was trained for this model"
        )
