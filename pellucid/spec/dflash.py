"""DFlash: a small model that fills in a block of masked places in one pass, both ways.

The block is the newest token and a mask for each draft.  Its queries see each other, and of every token
before them keys and values that each layer makes of the target's states there, not of states of its own: what
some of the target's layers have put out, fused (`fc`) and normalized.  So what a step has computed costs a
product a layer and no attention, and a place's keys depend on nothing behind it.  What the block leaves in
the cache is provisional: the step that computes its places writes them again.
Chen, Liang, Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", 2026.
Legend: T tokens, B rows, n queries of a block, D model dim, E of the target, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.layers.addend import Addend
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.models.builder import Builder
from pellucid.models.decoder_config import GQA, dense, grouped_layers, heads_of, layer_types, windows_of
from pellucid.models.draft import block_size, of_block
from pellucid.models.fields import Fields
from pellucid.models.head import BuiltHead, HeadPlan, Lender, whole
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, Known, Needs
from pellucid.spec.chain import Chain
from pellucid.spec.eagle import check_size, norm_of
from pellucid.spec.loaded import LoadedProposer
from pellucid.spec.own_vocabulary import OwnVocabulary
from pellucid.spec.passes import MOST_IN_BLOCK, Passes

# What checkpoints of this kind may ask for, and what of it is served.
SERVED: dict[str, object] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "use_aux_hidden_state": True,
    "sample_from_anchor": False,
    "shift_label": False,
    "projector_type": "dflash",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What a checkpoint says of its blocks."""

    mask: int  # the token that stands for one that is not known yet
    taps: tuple[int, ...]  # the target's layers whose input is read; n: what leaves the last
    mixers: tuple[GQA, ...]  # of each layer
    are_causal: tuple[bool, ...]  # of each layer: a query sees what lies before it alone

    @classmethod
    def of(cls, config: Fields) -> Self:
        """Raises ValueError for what is not served."""
        for name, served in SERVED.items():
            asked = of_block(config, name).config.get(name)
            if asked not in (None, served):
                raise ValueError(
                    f"{name} in the draft's config.json is {asked!r}, but {served!r} is what is supported; "
                    "take a plain DFlash checkpoint"
                )
        types = types_of(config)
        window = of_block(config, "swa_window_size").int("swa_window_size", config.int("sliding_window", 0))
        if "sliding_attention" in types and window < 1:
            raise ValueError("the draft's config.json has layers with windows, and no sliding_window")
        bias = config.bool("attention_bias", False)
        mixers = grouped_layers(
            config, heads_of(config, num_kv=32, dim=128), types=types, windows=windows_of(types, window),
            qk_norm="head", qkv_bias=bias, o_bias=bias,
        )  # fmt: skip
        mask = of_block(config, "mask_token_id").int("mask_token_id")
        return cls(mask=mask, taps=taps_of(config), mixers=mixers, are_causal=causality_of(config, types))


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3's, whose queries are a product of their own."""

    def __init__(self, config: Fields, mixer: GQA, b: Builder, *, is_causal: bool) -> None:
        super().__init__()
        dim, norm, mlp, heads = config.size("hidden_size"), norm_of(config), dense(config), mixer.heads
        self.is_causal = is_causal
        self.input_norm = b.norm("input_layernorm", dim, norm)
        a = b.at("self_attn")
        self.q = a.queries("q_proj", dim, heads, bias=mixer.qkv_bias)
        self.kv = a.keys_values("kv_proj", dim, heads, bias=mixer.qkv_bias)
        qk_norm = a.head_norms("q_norm", "k_norm", heads.dim, norm, mixer.qk_norm)
        self.attention = a.attention("attn", heads, mixer.scores, rope=mixer.rope, qk_norm=qk_norm)
        self.o = a.row("o_proj", mixer.width, dim, bias=mixer.o_bias)
        self.mlp_norm = b.norm("post_attention_layernorm", dim, norm)
        self.mlp = b.gated_mlp("mlp", dim, mlp.hidden, mlp.act, norm=self.mlp_norm)

    def follow(self, context: Tensor, fwd: ForwardInput) -> None:
        """context: [T, D], fused states of the tokens of `fwd`."""
        self.attention.keep(self.kv(context, fwd), fwd)

    def forward(
        self, x: Tensor | Addend, residual: Tensor | None, fwd: ForwardInput
    ) -> tuple[Tensor | Addend, Tensor]:
        """As a decoder's layer: x [T, D] is what the layer before adds to the residual stream."""
        normed, stream = self.input_norm(x, residual)
        qkv = torch.cat((self.q(normed, fwd), self.kv(normed, fwd)), dim=-1)
        x, stream = self.mlp_norm(self.o(self.attention(qkv, fwd), fwd), stream)
        return self.mlp(x, fwd), stream


class DFlashHead(nn.Module):
    """The public layout: `fc`, `hidden_norm`, `layers.N`, `norm`.

    There may be `embed_tokens`, `lm_head` (with `d2t`) and `mask_embedding`, too.
    """

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {
        "kv_proj": ("k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    ignored = ("t2d", "*rotary_emb.inv_freq")

    def __init__(self, config: Fields, blocks: Blocks, b: Builder, lender: Lender) -> None:
        super().__init__()
        dim, norm = config.size("hidden_size"), norm_of(config)
        has_embed, has_head = ("embed_tokens.weight" in b.names, "lm_head.weight" in b.names)
        if not (has_embed and has_head):
            check_size(config, lender)
        self.lender = lender
        if has_embed:
            self.embed = b.embedding("embed_tokens", lender.vocab_size, dim)
        else:
            self.embed = lender.embedding()
        self.mask_embedding = None
        if "mask_embedding" in b.names:
            self.mask_embedding = b.vector("mask_embedding", dim)
        elif not 0 <= blocks.mask < lender.vocab_size:
            raise ValueError(
                f"mask_token_id in the draft's config.json is {blocks.mask:,}, must be below the model's "
                f"vocab_size, {lender.vocab_size:,}, as there is no mask_embedding; take the head that was "
                "trained for this model"
            )
        self.mask = blocks.mask if self.mask_embedding is None else 0
        self.fc = b.linear("fc", len(blocks.taps) * lender.hidden_size, dim)
        self.hidden_norm = b.norm("hidden_norm", dim, norm)
        layers = enumerate(zip(blocks.mixers, blocks.are_causal, strict=True))
        self.layers = nn.ModuleList(
            BlockLayer(config, mixer, b.at(f"layers.{i}"), is_causal=is_causal)
            for i, (mixer, is_causal) in layers
        )
        self.norm = b.norm("norm", dim, norm)
        self.lm_head = self.vocabulary = None
        if has_head:
            num_own = config.size("draft_vocab_size", config.size("vocab_size"))
            self.lm_head = b.linear("lm_head", dim, num_own, kind="head")
            self.vocabulary = OwnVocabulary(b.integers("d2t", num_own), lender, are_offsets=True)

    def forward(self, fwd: ForwardInput, states: Tensor) -> Tensor:
        """Keep keys and values of the places of `fwd`, of which states [T, taps * E] are the target's.

        Returns what they are made of, [T, D].
        """
        context, _ = self.hidden_norm(self.fc(states))
        for layer in self.layers:
            cast("BlockLayer", layer).follow(context, fwd)
        return context

    def fill_in(self, blocks: ForwardInput, causal: ForwardInput) -> Tensor:
        """[B, n - 1, D], of the masked places.  causal: the same, for layers whose queries are."""
        x = whole(self.embed(blocks.input_ids)).unflatten(0, (blocks.num_rows, -1))
        if self.mask_embedding is not None:
            x[:, 1:] = self.mask_embedding
        x, stream = x.flatten(0, 1), None
        for layer in self.layers:
            x, stream = layer(x, stream, causal if layer.is_causal else blocks)
        return self.norm(x, stream)[0].unflatten(0, (blocks.num_rows, -1))[:, 1:]

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None or self.vocabulary is None:
            return self.lender.logits(hidden)
        return self.vocabulary(self.lm_head(hidden))


class DFlashProposer(LoadedProposer):
    """Proposes a chain whose drafts are made together."""

    built: BuiltHead
    head: DFlashHead
    chain: Chain

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltHead, ...]:
        """Build the head that `model` in speculative_config names.  Raises ValueError if it does not fit."""
        config, num_drafts = factory.draft_config, self.shape.num_drafts
        most = min(block_size(config), MOST_IN_BLOCK) - 1
        if num_drafts > most:
            raise ValueError(
                f"num_speculative_tokens is {num_drafts}, but the draft head fills blocks of {most + 1}, the "
                f"newest token among them; use at most {most}"
            )
        blocks, lender = Blocks.of(config), factory.lender(target)
        self.needs = Needs(taps=blocks.taps)

        def make(config: Fields, b: Builder) -> DFlashHead:
            self.head = b.piece(lambda b: DFlashHead(config, blocks, b, lender))
            return self.head

        plan = HeadPlan(make=make, stacked=DFlashHead.stacked)
        self.built = factory.build_head(plan, target, tree_depth=num_drafts)  # a block's masks are a tree's
        self.chain = Chain.of(self.config, sampler)
        return (self.built,)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        assert taps is not None, "the target shows its layers"
        built, head = self.built, self.head
        built.run(fwd, taps)
        passes = Passes.behind(fwd, known, num_more=1)
        fed = passes.block(head.mask)
        blocks = built.planned(fed)
        has_causal = any(layer.is_causal for layer in head.layers)
        causal = built.planned(replace(fed, tree=None)) if has_causal else blocks
        filled = head.fill_in(blocks, causal)
        by_draft = head.logits(filled.flatten(0, 1)).unflatten(0, filled.shape[:2])
        return self.chain.draw(known, passes, lambda index, _: by_draft[:, index])


def taps_of(config: Fields) -> tuple[int, ...]:
    """The target's layers whose input is read.

    `target_layer_ids` are those whose output is; the speculators project's `aux_hidden_state_layer_ids` count
    as we do.  Raises ValueError if there is neither.
    """
    if config.has("aux_hidden_state_layer_ids"):
        return tuple(config.ints("aux_hidden_state_layer_ids"))
    return tuple(layer + 1 for layer in of_block(config, "target_layer_ids").ints("target_layer_ids"))


def types_of(config: Fields) -> list[str]:
    """The kind of attention of each layer: `use_swa` gives all a window if none has one."""
    types = layer_types(config)
    uses_windows = of_block(config, "use_swa").bool("use_swa", False)
    if uses_windows and "sliding_attention" not in types:
        return ["sliding_attention"] * len(types)
    return types


def causality_of(config: Fields, types: list[str]) -> tuple[bool, ...]:
    """Whether queries of each layer see what lies before them alone: where nothing is said, with a window."""
    if config.has("is_causal"):
        return (config.bool("is_causal"),) * len(types)
    said = of_block(config, "causal")
    if said.has("causal"):
        return (said.bool("causal"),) * len(types)
    if config.bool("sliding_window_non_causal", False):
        return (False,) * len(types)
    return tuple(kind == "sliding_attention" for kind in types)
