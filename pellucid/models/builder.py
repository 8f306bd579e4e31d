"""All that a model may ask for, at the grain of fusion: qkv, attention, row, gated MLP, norm, head.

The builder decides what a model file never sees: device, dtype, this rank's slices, the quantization method,
the KV cache, the attention backend.  Names are the checkpoint's, relative to `at(...)`; attributes are free.
It also cuts pipelines, for which models keep to one rule: embedding, `layers`, norm, head, nothing between.
What another stage holds is built on the meta device, so that every stage knows all caches and all names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pellucid.attention.base import AnyBackend, AttentionSpec, Heads, LatentSpec, Scores, Spec
from pellucid.dist.collectives import ALONE, Group
from pellucid.dist.mesh import WHOLE_MODEL, Stage
from pellucid.dist.vocab_share import vocab_share
from pellucid.kv.layout import LayerCache
from pellucid.layers.activation import Act
from pellucid.layers.addend import Adding
from pellucid.layers.attention import Attention
from pellucid.layers.embedding import SplitVocabEmbedding, VocabEmbedding
from pellucid.layers.experts import Experts, Sparse
from pellucid.layers.head import ScaledHead
from pellucid.layers.latent import LatentAttention, LatentHeads, LatentProjection
from pellucid.layers.leaf import PLAIN, Leaf
from pellucid.layers.linear import Linear, Unmerged
from pellucid.layers.mlp import GatedMLP
from pellucid.layers.norm import Add, NormSpec, RMSNorm
from pellucid.layers.position_scale import PositionScale, ScaledQueries
from pellucid.layers.rope import RopeConfig
from pellucid.layers.rotary import rotary_table
from pellucid.layers.stage import Absent, Inlet, Layers
from pellucid.layers.weight import Weight
from pellucid.layers.width_norm import WidthNorm
from pellucid.lora.bank import AdapterLimits, Bank, EmbeddingBank, LoraBank
from pellucid.models.make_experts import make_experts
from pellucid.quant.base import (
    WHOLE,
    Coords,
    LinearMethod,
    LinearShape,
    MultipliesTable,
    OnFirstRank,
    ParamSpec,
    Piece,
    Replicated,
    Sliced,
    Split,
    vector,
)
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.quantization import Quantization
from pellucid.quant.schemes.base import Kind
from pellucid.quant.stored_scales import Largest
from pellucid.quant.unquantized import Unquantized

M = TypeVar("M", bound=nn.Module)
META = torch.device("meta")
APART = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CODED = ("qweight", "weight_packed", "weight", "_weight_qdata", "W_q")  # of which a matrix has one
SHARE_UNIT = 32  # features of which an MLP's shares are whole ones where they are not even


@dataclass(slots=True, kw_only=True)
class BuildContext:
    """Where a model is built and what is recorded of it so far; all builders of one model share it."""

    quantization: Quantization
    stacked: Mapping[str, tuple[str, ...]]  # merged name -> the checkpoint's, if they are apart there
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV cache
    device: torch.device
    block_size: int  # tokens
    max_model_len: int  # tokens
    coords: Coords = WHOLE
    group: Group = ALONE  # the ranks that hold the other slices
    stage: Stage = WHOLE_MODEL  # which of the layers are here
    leaf: Leaf = PLAIN  # norms and activations
    num_spec: int = 0  # drafts that may reach past max_model_len
    stored: Collection[str] = ()  # the checkpoint's tensors; none of a dummy
    is_dummy: bool = False  # weights will be random
    expert_parallel: bool = False  # ranks have whole experts, not slices of all
    engines: Group = ALONE  # this rank in each of the engines that divide the experts among them
    adapters: AdapterLimits | None = None  # None: layers have no room for any
    lora_banks: list[Bank] = field(default_factory=list[Bank])  # of the layers that are here
    adaptable: set[str] = field(default_factory=set)  # matrices of all stages that adapters may change
    tied: dict[str, str] = field(default_factory=dict[str, str])  # a head's tensor, to the embedding's
    attention_layers: list[Attention | LatentAttention] = field(default_factory=list)  # those that are here
    ropes: dict[RopeConfig, Tensor] = field(default_factory=dict)
    specs: list[Spec] = field(default_factory=list)  # of all stages' attention layers
    names: frozenset[str] = frozenset()  # of the checkpoint's tensors; a dummy has none
    elsewhere: set[str] = field(default_factory=set)  # the checkpoint's names of what other stages hold
    formats: dict[str, LayerFormat] = field(default_factory=dict)  # of the matrices that are stored in codes
    inlet: Inlet | None = None  # on a stage behind the first

    def shadow(self) -> BuildContext:
        """Where a layer of another stage is built, for what there is to know of it."""
        return replace(self, device=META, attention_layers=[], ropes={}, lora_banks=[])


class Builder:
    """Makes the layers of one model on one rank."""

    def __init__(self, context: BuildContext, prefix: str = "", *, in_layer: bool = False) -> None:
        self.context = context
        self.prefix = prefix
        self.in_layer = in_layer  # or before and behind all layers

    # What models call

    def at(self, name: str) -> Builder:
        """A builder whose names begin with `name`."""
        return Builder(self.context, self._path(name), in_layer=self.in_layer)

    def layers(self, num: int, make: Callable[[int, Builder], nn.Module], name: str = "layers") -> Layers:
        """`num` layers, each made by `make(index, builder)`; of a pipeline those of this stage."""
        layers, here = Layers(), Builder(self.context, self.prefix, in_layer=True)
        elsewhere = self._elsewhere(in_layer=True)
        for i in range(num):
            if self.context.stage.holds(i):
                layers.append(make(i, here.at(f"{name}.{i}")))
            else:
                with META:
                    self._note_names(make(i, elsewhere.at(f"{name}.{i}")))
        return layers

    def embedding(
        self, name: str, vocab: int, dim: int, *, scale: float = 1.0, adaptable: bool = False
    ) -> VocabEmbedding:
        """Token embeddings [vocab, dim], times `scale`, which is rounded to their dtype.

        adaptable: it is called as embed(ids, fwd), and may have adapters.
        """
        coords, context = replace(self.context.coords, total=vocab), self.context
        scale = torch.tensor(scale, device="cpu").to(context.dtype).item()
        self._note_format(self._path(name), "embedding")
        share, keep = vocab_share(vocab, coords.size), context.quantization.embedding(self._path(name), dim)
        bits = None if keep is None else keep.bits(dim)
        spec = ParamSpec(shape=(share, dim), dtype=context.dtype, place=Sliced((share,)), kept_bits=bits)

        def table(device: torch.device) -> Weight:
            return Weight.of(spec, (self._path(f"{name}.weight"),), (coords,), device)

        if context.stage.is_first:
            weight, bank = table(context.device), None
            if adaptable and context.adapters is not None:
                bank = EmbeddingBank(self._path(name), coords, weight, context.adapters, context.device)
                self._note_bank(bank)
            return (
                VocabEmbedding(weight, scale, bank, keep)
                if context.group.size == 1
                else SplitVocabEmbedding(weight, context.group, scale, bank, keep)
            )
        if adaptable and context.adapters is not None:
            context.adaptable.add(self._path(name))
        context.inlet = Inlet(dim, context.dtype, lambda: table(context.device))
        return self._stand_in(VocabEmbedding(table(META)), context.inlet)

    def norm(self, name: str, dim: int, norm: NormSpec) -> RMSNorm:
        """RMSNorm over `dim` features, called as norm(x, residual=None) -> (x, residual); adds in place."""
        if self.in_layer or self.context.stage.is_last:
            return self._norm(name, dim, norm)
        return self._stand_in(self._elsewhere()._norm(name, dim, norm), Add(self.context.leaf))

    def add(self) -> Add:
        """Where a family adds to the residual stream, as norms do, and has no norm."""
        return Add(self.context.leaf)

    def head_norms(
        self, q_name: str, k_name: str, dim: int, norm: NormSpec, kind: str | None
    ) -> tuple[RMSNorm, RMSNorm] | None:
        """Norms of queries and keys over each head: of kind "head", or "plain", without weights."""
        if kind == "head":
            return self.norm(q_name, dim, norm), self.norm(k_name, dim, norm)
        if kind == "plain":  # the checkpoint has none of these names, and ones do not scale
            return self._norm(q_name, dim, norm, default=1.0), self._norm(k_name, dim, norm, default=1.0)
        return None

    def scaled_queries(self, heads: Heads, scale: PositionScale) -> ScaledQueries | None:
        """Queries that grow with their position, called with a packed projection; None: none grows so far."""
        if self._most_places < scale.interval:
            return None
        table = scale.table(self._most_places).to(self.context.device)
        return ScaledQueries(self._local(heads).num * heads.dim, table)

    def width_norm(self, q_name: str, k_name: str, heads: Heads, norm: NormSpec) -> WidthNorm:
        """RMSNorm of all queries, and of all keys, called with a packed projection."""
        local, kv_coords = self._local(heads), self._kv_coords(heads.num_kv)
        q = self._norm(q_name, local.num * local.dim, norm, self.context.coords)
        k = self._norm(k_name, local.num_kv * local.dim, norm, kv_coords)
        return WidthNorm(q, k, self.context.group, kv_ranks=kv_coords.size)

    def qkv(
        self, name: str, dim: int, heads: Heads, *, bias: bool = False, norm: RMSNorm | Add | None = None
    ) -> Linear | Unmerged:
        """The projection to queries, keys and values, packed in this order; `attention` takes its output.

        norm: the one whose output it takes, and nobody else; the two may then agree on how to round it.
        """
        local, kv_coords = self._local(heads), self._kv_coords(heads.num_kv)
        shape = self._shape(
            dim, (local.num * local.dim, local.num_kv * local.dim, local.num_kv * local.dim), "out"
        )
        qkv = self._linear(name, shape, bias, (self.context.coords, kv_coords, kv_coords))
        if norm is not None:
            norm.serve(qkv)
        return qkv

    def queries(self, name: str, dim: int, heads: Heads, *, bias: bool = False) -> Linear | Unmerged:
        """Of what `qkv` projects to, queries alone."""
        local = self._local(heads)
        return self._linear(
            name, self._shape(dim, (local.num * local.dim,), "out"), bias, (self.context.coords,)
        )

    def keys_values(self, name: str, dim: int, heads: Heads, *, bias: bool = False) -> Linear | Unmerged:
        """And keys and values alone, packed in this order."""
        local, kv_coords = self._local(heads), self._kv_coords(heads.num_kv)
        shape = self._shape(dim, (local.num_kv * local.dim,) * 2, "out")
        return self._linear(name, shape, bias, (kv_coords,) * 2)

    def row(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        post: RMSNorm | None = None,
        scale: float = 1.0,
    ) -> Linear | Adding | Unmerged:
        """A projection back to the residual stream.  What it returns is for a norm, which sums over ranks.

        post: what then normalizes the sum.  scale: what that is multiplied with before it is added.
        """
        return self._row(name, self._share(in_features), self.context.coords, out_features, bias, post, scale)

    def _row(
        self,
        name: str,
        num_in: int,
        coords: Coords,
        out_features: int,
        bias: bool,
        post: RMSNorm | None,
        scale: float,
    ) -> Linear | Adding | Unmerged:
        """num_in, coords: of this rank."""
        shape = self._shape(num_in, (out_features,), "in")
        part = self._linear(name, shape, bias, (coords,))
        if self.context.group.size == 1 and post is None and scale == 1.0:
            return part
        return Adding(part, self.context.group, post=post, scale=scale)

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False, kind: Kind = "linear"
    ) -> Linear | Unmerged:
        """A projection that every rank computes whole: small, or nothing that can be split."""
        return self._linear(name, self._shape(in_features, (out_features,), "out"), bias, (WHOLE,), kind)

    def vector(self, name: str, dim: int) -> Weight:
        """`dim` features of which every rank has all, in the tensor `name`."""
        spec = ParamSpec(shape=(dim,), dtype=self.context.dtype, place=Replicated())
        return self._weight(spec, name)

    def integers(self, name: str, num: int) -> Weight:
        """A list of `num` numbers, zeros if the checkpoint has none."""
        return self._weight(
            ParamSpec(shape=(num,), dtype=torch.int64, place=Replicated(), fill="bits", default=0.0), name
        )

    def piece(self, make: Callable[[Builder], M]) -> M:
        """What is no model, but a draft head: on the last stage of a pipeline, and known on the others."""
        if self.context.stage.holds(0):
            return make(Builder(self.context, self.prefix, in_layer=True))
        with META:
            absent = make(self._elsewhere(in_layer=True))
        self._note_names(absent)
        return absent

    def gated_mlp(
        self,
        name: str,
        dim: int,
        hidden: int,
        act: Act,
        *,
        bias: bool = False,
        norm: RMSNorm | Add | None = None,
        post: RMSNorm | None = None,
        scale: float = 1.0,
    ) -> GatedMLP:
        """down(act(gate(x)) * up(x)), called as mlp(x, fwd).  norm: see `qkv`; post, scale: see `row`."""
        b = self.at(name)
        share, coords = b.hidden_share(hidden, b.path("down_proj"))
        shape = b._shape(dim, (share,) * 2, "out")
        gate_up = b._linear("gate_up_proj", shape, bias, (coords,) * 2)
        if norm is not None:
            norm.serve(gate_up)
        down = b._row("down_proj", share, coords, dim, bias, post, scale)
        return GatedMLP(gate_up, down, act, self.context.leaf)

    def experts(
        self, name: str, dim: int, sparse: Sparse, *, post: RMSNorm | None = None, scale: float = 1.0
    ) -> Experts:
        """A mixture of gated MLPs, called as mlp(x, fwd), below `name`.  post, scale: see `row`."""
        return make_experts(self.at(name), dim, sparse, post=post, scale=scale)

    def rope(self, config: RopeConfig) -> Tensor:
        """The table of a rotary embedding; layers that ask for the same numbers share one."""
        ropes = self.context.ropes
        if config not in ropes:
            table = rotary_table(config, self.context.max_model_len, self.context.num_spec)
            ropes[config] = table.to(self.context.device)
        return ropes[config]

    def attention(
        self,
        name: str,
        heads: Heads,
        scores: Scores,
        *,
        rope: RopeConfig | None = None,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
        is_last: bool = False,
    ) -> Attention:
        """Attention over a packed projection, called as attn(qkv, fwd).

        qk_norm: of queries and of keys, over each head.  is_last: only what fwd.wanted says is read of it.
        """
        local = self._local(heads)
        spec = AttentionSpec(
            num_heads=local.num,
            num_kv_heads=local.num_kv,
            head_dim=local.dim,
            dtype=self.context.dtype,
            block_size=self.context.block_size,
            kv_dtype=self.context.kv_dtype,
            window=scores.window,
            chunk=scores.chunk if (scores.chunk or 0) < self._most_places else None,
            softcap=scores.softcap,
            sinks=scores.sinks,
        )
        layer = Attention(
            spec,
            name=self._path(name),
            kv_scales=(self._kv_scale(f"{name}.k_scale"), self._kv_scale(f"{name}.v_scale")),
            scale=scores.scale,
            rope=None if rope is None else self.rope(rope),
            interleaved=rope is not None and rope.interleaved,
            qk_norm=qk_norm,
            is_last=is_last,
        )
        if scores.sinks:
            layer.sinks = self._sinks(local)
        self.context.attention_layers.append(layer)
        self.context.specs.append(spec)
        return layer

    def latent(
        self,
        dim: int,
        heads: LatentHeads,
        q_norm: NormSpec,
        *,
        bias: bool = False,
        norm: RMSNorm | Add | None = None,
    ) -> LatentProjection:
        """The projection to queries and to latents of keys and values; `latent_attention` takes its output.

        What takes x is one product, of which queries are a slice of their heads' and the rest is whole on
        every rank.  q_norm: of the queries' own latents, if they have such.  bias: on all latents.  norm: see
        `qkv`.
        """
        coords, width = self.context.coords, self._share(heads.num, "heads") * (heads.nope + heads.rope)
        names, sizes = ("q_proj", "kv_a_proj_with_mqa"), (width, heads.rank + heads.rope)
        normalized, q_b = None, None
        if heads.q_rank is not None:
            names, sizes, coords = ("q_a_proj", names[1]), (heads.q_rank, sizes[1]), WHOLE
            normalized = self.norm("q_a_layernorm", heads.q_rank, q_norm)
            q_b = self._linear(
                "q_b_proj", self._shape(heads.q_rank, (width,), "out"), False, (self.context.coords,)
            )
            normalized.serve(q_b)
        if bias and heads.q_rank is None:  # of the two only latents have one
            q = self._linear(names[0], self._shape(dim, sizes[:1], "out"), False, (coords,))
            kv = self._linear(names[1], self._shape(dim, sizes[1:], "out"), True, (WHOLE,))
            assert isinstance(q, Linear) and isinstance(kv, Linear), "one matrix each"
            return LatentProjection(Unmerged((q, kv)), sizes, normalized, q_b)
        paths = tuple(map(self._path, names))
        first = self._merged(paths, self._shape(dim, sizes, "out"), bias, (coords, WHOLE), "linear")
        if norm is not None:
            norm.serve(first)
        return LatentProjection(first, sizes, normalized, q_b)

    def latent_attention(
        self,
        name: str,
        heads: LatentHeads,
        kv_norm: NormSpec,
        *,
        scale: float,
        rope: Tensor,
        interleaved: bool,
        is_last: bool = False,
    ) -> LatentAttention:
        """Attention over latents, called as attn(q, latent, fwd).

        interleaved: features 2i and 2i + 1 turn together.  is_last: see `attention`.
        """
        context, num_heads = self.context, self._share(heads.num, "heads")
        spec = LatentSpec(
            num_heads=num_heads,
            nope_dim=heads.nope,
            rope_dim=heads.rope,
            value_dim=heads.value,
            rank=heads.rank,
            dtype=context.dtype,
            block_size=context.block_size,
            kv_dtype=context.kv_dtype,
        )
        self._note_format(self._path("kv_b_proj"), "linear")  # decoded if it is in codes: no product has it
        width = num_heads * (heads.nope + heads.value)
        up = ParamSpec(shape=(width, heads.rank), dtype=context.dtype, place=Sliced((width,)))
        layer = LatentAttention(
            spec,
            name=self._path(name),
            scale=scale,
            kv_norm=self.norm("kv_a_layernorm", heads.rank, kv_norm),
            kv_b=self._weight(up, "kv_b_proj.weight"),
            kv_scales=(self._kv_scale(f"{name}.k_scale"), self._kv_scale(f"{name}.v_scale")),
            rope=rope,
            interleaved=interleaved,
            is_last=is_last,
        )
        context.attention_layers.append(layer)
        context.specs.append(spec)
        return layer

    def head(
        self,
        name: str,
        vocab: int,
        dim: int,
        *,
        tied: VocabEmbedding | None = None,
        scale: float = 1.0,
        cap: float | None = None,
        adaptable: bool = False,
    ) -> Linear | Unmerged | ScaledHead:
        """The projection to logits, called as head(hidden): this rank's share of them, the last one padded.

        tied: the embedding whose table it shares, or has a copy of if that is on another stage.
        scale, cap: logits become cap * tanh(scale * logits / cap).  adaptable: it is called as
        head.adapted(hidden, adapters) where `logits` is given the latter, and may have adapters.
        """
        head = self._head(name, vocab, dim, tied)
        if tied is not None:
            self.context.tied[f"{self._path(name)}.weight"] = tied.table().sources[0]
        if adaptable and self.context.adapters is not None:
            if isinstance(head, Linear):
                self._adapt_head(name, vocab, head)
            self.context.adaptable.add(self._path(name))
        return head if scale == 1.0 and cap is None else ScaledHead(head, scale, cap, self.context.leaf)

    def _head(self, name: str, vocab: int, dim: int, tied: VocabEmbedding | None) -> Linear | Unmerged:
        coords = replace(self.context.coords, total=vocab)
        shape = self._shape(dim, (vocab_share(vocab, coords.size),), "out")
        is_here = self.context.stage.is_last
        if tied is not None and is_here:
            table = tied.table()
            prefix = table.sources[0].removesuffix(".weight")
            method = self.context.quantization.tied(self._path(name), prefix)
            assert method is not None, "a head is one matrix"
            if isinstance(method, MultipliesTable) and isinstance(tied, VocabEmbedding) and tied.keep:
                method.table = tied
            if isinstance(method, Unquantized) and table.spec.kept_bits is None:
                return Linear(shape, method, {"weight": table})
            return self._make_linear((prefix,), shape, method, False, (coords,))  # loaded again
        b = self if is_here else self._elsewhere()
        head = b._linear(name, shape, False, (coords,), kind="head")
        return head if is_here else self._stand_in(head, Absent())

    def _adapt_head(self, name: str, vocab: int, head: Linear) -> None:
        context, coords = self.context, replace(self.context.coords, total=vocab)
        assert context.adapters is not None, "there are no adapters"
        head.lora = LoraBank(
            head.shape, (self._path(name),), (coords,), context.adapters, context.device, is_head=True
        )
        self._note_bank(head.lora)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors in the checkpoint, by the names that models have for them; a dummy has none."""
        return self.context.names

    # What those who build models call

    @property
    def attention_layers(self) -> list[Attention | LatentAttention]:
        """In the order of construction; the worker binds each one's `kv_cache`."""
        return self.context.attention_layers

    def attention_needs(self) -> tuple[Spec, ...]:
        """What one backend must support to serve every layer, each kind once."""
        return tuple(dict.fromkeys(self.context.specs))

    def bind(self, backend: AnyBackend) -> None:
        """Let every attention layer attend with `backend`, which is of their kind."""
        for layer in self.attention_layers:
            layer.backend = cast("Any", backend)

    def caches(self) -> tuple[LayerCache, ...]:
        """What the attention layers of all stages keep."""
        return tuple(spec.cache for spec in self.context.specs)

    # What those who make larger layers call

    def path(self, name: str) -> str:
        """The checkpoint's name of what is called `name` here."""
        return self._path(name)

    def hidden_share(self, hidden: int, down: str, kind: Kind = "linear") -> tuple[int, Coords]:
        """Of an MLP's hidden features those of this rank, and where they are; the last ones may be padding.

        down: the matrix that takes them, of whose groups shares are whole ones.
        """
        coords, unit = self.context.coords, self.context.quantization.unit(down, kind)
        if hidden % (coords.size * unit) == 0 or coords.size == 1:
            return hidden // coords.size, coords
        step = math.lcm(unit, SHARE_UNIT)
        return -(-hidden // (coords.size * step)) * step, replace(coords, total=hidden)

    def weight(self, spec: ParamSpec, sources: tuple[str, ...], coords: Coords = WHOLE) -> Weight:
        """A parameter of tensors by the checkpoint's names, and this rank's slice of each."""
        return Weight.of(spec, sources, (coords,) * len(sources), self.context.device)

    def linear_of(self, name: str, shape: LinearShape, method: LinearMethod, *, bias: bool) -> Linear:
        """A linear layer of which every rank has the whole, served by `method`."""
        self._note_format(self._path(name), "linear")
        return self._make_linear((self._path(name),), shape, method, bias, (WHOLE,))

    def note_experts(self, paths: tuple[str, ...], *, is_here: bool = True) -> None:
        """Matrices of experts: how they are stored, and whether this rank has them."""
        for path in paths:
            self._note_format(path, "experts")
            if not is_here:
                self.context.elsewhere.update((f"{path}.weight", f"{path}.bias"))

    # How

    @property
    def _most_places(self) -> int:
        """Tokens and drafts that a sequence may have."""
        return self.context.max_model_len + self.context.num_spec

    def _elsewhere(self, *, in_layer: bool = False) -> Builder:
        return Builder(self.context.shadow(), self.prefix, in_layer=in_layer)

    def _stand_in(self, absent: M, stand_in: nn.Module) -> M:
        """Put `stand_in`, which is called alike, in the place of a layer that another stage holds."""
        self._note_names(absent)
        return cast("M", stand_in)

    def _note_names(self, absent: nn.Module) -> None:
        for weight in absent.parameters():
            assert isinstance(weight, Weight), type(weight)
            self.context.elsewhere.update(weight.sources)

    def _path(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def _shape(self, in_features: int, out_partitions: tuple[int, ...], split: Split) -> LinearShape:
        return LinearShape(
            in_features=in_features,
            out_partitions=out_partitions,
            split=split,
            dtype=self.context.dtype,
            is_part=split == "in" and self.context.coords.size > 1,
        )

    def _weight(self, spec: ParamSpec, name: str, coords: Coords | None = None) -> Weight:
        coords = coords or self.context.coords
        return Weight.of(spec, (self._path(name),), (coords,), self.context.device)

    def _norm(
        self,
        name: str,
        dim: int,
        norm: NormSpec,
        coords: Coords | None = None,
        *,
        default: float | None = None,
    ) -> RMSNorm:
        """coords: of a slice of `dim` features; None, every rank has all.  default: see `ParamSpec`."""
        place = Replicated() if coords is None else Sliced((dim,))
        fill = "normal" if norm.offset else "near_one"
        spec = ParamSpec(shape=(dim,), dtype=self.context.dtype, place=place, fill=fill, default=default)
        return RMSNorm(self._weight(spec, f"{name}.weight", coords), norm, self.context.leaf)

    def _kv_scale(self, name: str) -> Weight:
        """One number, 1 if the checkpoint has none."""
        return self._weight(ParamSpec(shape=(1,), dtype=torch.float32, place=Largest(), default=1.0), name)

    def _sinks(self, local: Heads) -> Weight:
        """A logit of each head."""
        spec = ParamSpec(shape=(local.num,), dtype=self.context.dtype, place=Sliced((local.num,)))
        return self._weight(spec, "sinks")

    def _share(self, num: int, what: str = "features") -> int:
        size = self.context.coords.size
        if num % size:
            raise ValueError(f"{num} {what} cannot be split over {size} ranks; use a divisor of it")
        return num // size

    def _local(self, heads: Heads) -> Heads:
        """The heads of this rank."""
        return Heads(
            self._share(heads.num, "heads"), heads.num_kv // self._kv_coords(heads.num_kv).size, heads.dim
        )

    def _kv_coords(self, num_kv_heads: int) -> Coords:
        """With fewer key-value heads than ranks, neighbouring ranks hold the same head."""
        rank, size = self.context.coords.rank, self.context.coords.size
        small, large = sorted((num_kv_heads, size))
        if large % small:
            raise ValueError(
                f"{num_kv_heads} key-value heads cannot be split over {size} ranks; use a "
                "divisor or a multiple"
            )
        replicas = max(1, size // num_kv_heads)
        return Coords(rank // replicas, size // replicas)

    def _linear(
        self, name: str, shape: LinearShape, bias: bool, coords: tuple[Coords, ...], kind: Kind = "linear"
    ) -> Linear | Unmerged:
        """A linear layer of the method that serves all its matrices, merged unless there is no such one."""
        parent, _, last = self._path(name).rpartition(".")
        parts = self.context.stacked.get(last, (last,))
        if len(parts) < len(shape.out_partitions) and self._is_apart(parent, APART.get(last, ())):
            parts = APART[last]
        if len(parts) == 1 < len(shape.out_partitions):
            parts, coords = parts * len(coords), pieces_of(shape, coords)
        assert len(parts) == len(shape.out_partitions), f"{name}: {parts} for {shape.out_partitions}"
        prefixes = tuple(f"{parent}.{part}" if parent else part for part in parts)
        return self._merged(prefixes, shape, bias, coords, kind)

    def _is_apart(self, parent: str, parts: tuple[str, ...]) -> bool:
        """Has a tool taken apart what the family's own checkpoints have as one tensor?"""
        return any(f"{parent}.{parts[0]}.{end}" in self.context.stored for end in CODED) if parts else False

    def _merged(
        self,
        prefixes: tuple[str, ...],
        shape: LinearShape,
        bias: bool,
        coords: tuple[Coords, ...],
        kind: Kind,
    ) -> Linear | Unmerged:
        for prefix in prefixes:
            self._note_format(prefix, kind)
        method = self.context.quantization.method(prefixes, kind)
        if method is not None:
            return self._make_linear(prefixes, shape, method, bias, coords)
        singles: list[Linear] = []
        for prefix, size, place in zip(prefixes, shape.out_partitions, coords, strict=True):
            method = self.context.quantization.method((prefix,), kind)
            assert method is not None, f"no method for {prefix} even alone"
            alone = replace(shape, out_partitions=(size,))
            singles.append(self._make_linear((prefix,), alone, method, bias, (place,)))
        return Unmerged(singles)

    def _note_format(self, path: str, kind: Kind) -> None:
        format = self.context.quantization.stored(path, kind)
        if format is not None:
            self.context.formats[path] = format

    def _make_linear(
        self,
        prefixes: tuple[str, ...],
        shape: LinearShape,
        method: LinearMethod,
        bias: bool,
        coords: tuple[Coords, ...],
    ) -> Linear:
        def weight(name: str, spec: ParamSpec) -> Weight:
            sources = tuple(f"{prefix}.{name}" for prefix in prefixes)
            return Weight.of(spec, sources, coords, self.context.device)

        weights = {name: weight(name, spec) for name, spec in method.params(shape).items()}
        lora = self._lora_bank(shape, prefixes, coords)
        if not bias:
            return Linear(shape, method, weights, lora=lora)
        place = vector(shape) if shape.split == "out" else OnFirstRank()
        spec = ParamSpec(shape=(shape.out_features,), dtype=shape.dtype, place=place)
        return Linear(shape, method, weights, weight("bias", spec), lora)

    def _lora_bank(
        self, shape: LinearShape, prefixes: tuple[str, ...], coords: tuple[Coords, ...]
    ) -> LoraBank | None:
        """Room for adapters, if there may be any, beside a layer that is given the step."""
        context = self.context
        if context.adapters is None or not self.in_layer:
            return None
        bank = LoraBank(shape, prefixes, coords, context.adapters, context.device)
        self._note_bank(bank)
        return bank

    def _note_bank(self, bank: Bank) -> None:
        self.context.lora_banks.append(bank)
        self.context.adaptable.update(bank.prefixes)


def pieces_of(shape: LinearShape, coords: tuple[Coords, ...]) -> tuple[Coords, ...]:
    """The coordinates of merged parts which the checkpoint, too, holds as one matrix."""
    assert shape.split == "out", shape
    sizes = [place.whole(size) for size, place in zip(shape.out_partitions, coords, strict=True)]
    firsts = accumulate(sizes, initial=0)
    return tuple(
        replace(place, piece=Piece(first, size, sum(sizes)))
        for place, first, size in zip(coords, firsts, sizes, strict=False)
    )
