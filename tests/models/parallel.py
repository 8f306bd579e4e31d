"""A family outside the usual mould, against `Builder` alone: attention and MLP side by side, behind one norm.

Each layer hands on the whole residual stream, so norms are called without one.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.models.builder import Builder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, grouped_layers, heads_of
from pellucid.models.fields import Fields
from pellucid.models.registry import MODELS

ARCHITECTURE = "ParallelForCausalLM"


class ParallelLayer(nn.Module):
    """What attention and MLP give is summed over ranks as one, and normalized before it is added."""

    def __init__(self, cfg: DecoderConfig, b: Builder, index: int) -> None:
        super().__init__()
        dim, (mixer, mlp) = cfg.hidden_size, (cfg.layers[index].mixer, cfg.layers[index].mlp)
        heads = mixer.heads
        self.norm = b.norm("input_layernorm", dim, cfg.norm)
        a = b.at("self_attn")
        self.qkv = a.qkv("qkv_proj", dim, heads)
        self.attention = a.attention("attn", heads, mixer.scores, rope=mixer.rope)
        self.o = a.row("o_proj", heads.num * heads.dim, dim)
        self.mlp = b.gated_mlp("mlp", dim, mlp.hidden, mlp.act)
        self.post_norm = b.norm("post_attention_layernorm", dim, cfg.norm)

    def forward(self, stream: Tensor, fwd: ForwardInput) -> Tensor:
        x, stream = self.norm(stream)
        both = self.o(self.attention(self.qkv(x, fwd), fwd), fwd) + self.mlp(x, fwd)
        return stream + self.post_norm(both)[0]


class Parallel(nn.Module):
    """Embedding, layers, norm, head."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    ignored: tuple[str, ...] = ()

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__()
        cfg, m = decoder_config(config, grouped_layers(config, heads_of(config))), b.at("model")
        self.embed = m.embedding("embed_tokens", cfg.vocab_size, cfg.hidden_size)
        self.layers = m.layers(len(cfg.layers), lambda i, b: ParallelLayer(cfg, b, i))
        self.norm = m.norm("norm", cfg.hidden_size, cfg.norm)
        self.head = b.head("lm_head", cfg.vocab_size, cfg.hidden_size)

    @classmethod
    def rename(cls, key: str) -> str:
        return key

    def forward(self, fwd: ForwardInput) -> Tensor:
        stream = self.embed(fwd.input_ids)
        for layer in self.layers:
            stream = layer(stream, fwd)
        return self.norm(stream)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


MODELS.register(ARCHITECTURE, "tests.models.parallel:Parallel")
