"""MTP: the layer for multi-token prediction that a model was trained with, from the model's own checkpoint.

It reads the model's hidden state of a token and the embedding of the token behind it, each behind a norm of
its own, and is one more decoder layer of the model's family; the model's head reads what it puts out, and the
next draft is made of that.  Checkpoints have three ways to name its tensors.
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2.
Legend: T tokens, S logits, D model dim.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.models.build import ModelFactory
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder, DecoderLayer
from pellucid.models.fields import Fields
from pellucid.models.head import HeadPlan, Lender, whole
from pellucid.spec.follower import HeadProposer


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a checkpoint calls the parts, behind `prefix`."""

    prefix: str
    project: str  # from [D of one, D of the other] to D
    embed_norm: str
    hidden_norm: str
    layer: str  # the decoder layer's own prefix
    out_norm: str
    hidden_is_first: bool = False  # in what is projected
    skips_first: bool = False  # at position 0 the embedding counts as zeros
    own: tuple[str, ...] = ()  # copies of the model's tables, which are not read


def dialects(num_layers: int) -> tuple[Names, ...]:
    """Those of Qwen3-Next and Qwen3.5, of MiMo, and of DeepSeek-V3 and GLM-4.5."""
    return (
        Names(
            prefix="mtp",
            project="fc",
            embed_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            layer="layers.0",
            out_norm="norm",
        ),
        Names(
            prefix="model.mtp_layers.0",
            project="input_proj",
            embed_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            layer="",
            out_norm="final_layernorm",
            hidden_is_first=True,
            skips_first=True,
        ),
        Names(
            prefix=f"model.layers.{num_layers}",
            project="eh_proj",
            embed_norm="enorm",
            hidden_norm="hnorm",
            layer="",
            out_norm="shared_head.norm",
            skips_first=True,
            own=("embed_tokens.weight", "shared_head.head.weight"),
        ),
    )


class MtpHead(nn.Module):
    """One layer, whatever its names."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = Decoder.stacked

    def __init__(self, config: Fields, b: Builder, lender: Lender, names: Names) -> None:
        super().__init__()
        family = type(lender.model)
        if not issubclass(family, Decoder):
            raise ValueError(f"method mtp knows no layer of {family.__name__}; use another method")
        cfg = family.declare(config)
        dim, norm, b = cfg.hidden_size, cfg.norm, b.at(names.prefix)
        self.ignored = (
            "*rotary_emb.inv_freq",
            *(f"{names.prefix}.{name}" for name in names.own),
            *other_layers(config, names),
        )
        self.lender, self.names = lender, names
        self.embed = lender.embedding()
        self.embed_norm, self.hidden_norm = (
            b.norm(names.embed_norm, dim, norm),
            b.norm(names.hidden_norm, dim, norm),
        )
        self.project = b.linear(names.project, 2 * dim, dim)
        own = replace(cfg, layers=cfg.layers[-1:])
        self.layer = DecoderLayer(own, b.at(names.layer) if names.layer else b, 0)
        self.out_norm = b.norm(names.out_norm, dim, norm)

    def forward(self, fwd: ForwardInput, states: Tensor) -> Tensor:
        """states [T, D], the model's behind its last norm or this one's own -> [T, D]."""
        embedded = whole(self.embed(fwd.input_ids))
        if self.names.skips_first:
            embedded = embedded * (fwd.positions > 0)[:, None]
        pair = self.embed_norm(embedded)[0], self.hidden_norm(states)[0]
        x = self.project(torch.cat(pair[::-1] if self.names.hidden_is_first else pair, dim=-1))
        x, stream = self.layer(x, None, fwd)
        return self.out_norm(x, stream)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lender.logits(hidden)


class MtpProposer(HeadProposer):
    """Feeds it the target's states; from the second draft on the layer reads its own."""

    def plan(self, lender: Lender, factory: ModelFactory) -> HeadPlan:
        known = dialects(lender.config.size("num_hidden_layers"))

        def make(config: Fields, b: Builder) -> MtpHead:
            names = spoken(known, b.names)
            return b.piece(lambda b: MtpHead(config, b, lender, names))

        return HeadPlan(
            make=make,
            stacked=MtpHead.stacked,
            is_targets=self.config.model is None,
            claims=("mtp.*", "model.mtp_layers.*", f"{known[-1].prefix}.*"),
        )


def spoken(known: tuple[Names, ...], tensors: Set[str]) -> Names:
    """The names that a checkpoint has.  Raises ValueError if it has none of them."""
    for names in known:
        if f"{names.prefix}.{names.project}.weight" in tensors or not tensors:  # a dummy has any
            return names
    wanted = ", ".join(f"{names.prefix}.{names.project}.weight" for names in known)
    raise ValueError(
        f"the checkpoint has no layer for multi-token prediction (none of {wanted}); "
        "use a checkpoint that has one, or another speculative method"
    )


def other_layers(config: Fields, names: Names) -> tuple[str, ...]:
    """Patterns of further layers, each for one token more, of which the first alone is used."""
    head, _, last = names.prefix.rpartition(".")
    if not last.isdigit():
        return (f"{names.prefix}.layers.[1-9]*",)
    return tuple(f"{head}.{int(last) + i}.*" for i in range(1, config.int("num_nextn_predict_layers", 1)))
