"""The door for attention backends: what a backend is asked, and what an attention layer shows it.

A backend writes the new keys and values into the paged cache and attends over the cache; prompt chunk, decode
and verification are the same to it: rows with some queries at the end of their sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.kv.layout import LayerCache
from pellucid.platform import Platform
from pellucid.registry import Registry


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer: `num` of queries, `num_kv` of keys and values, `dim` wide."""

    num: int
    num_kv: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What becomes of q k before the softmax, and which keys a query sees."""

    scale: float  # what it is multiplied with
    window: int | None = None  # tokens a query sees, itself included
    chunk: int | None = None  # or: a query sees its own of the chunks of so many tokens, as far as itself
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    sinks: bool = False  # a learned logit of each head takes weight from the keys


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a model asks of attention, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int  # tokens
    kv_dtype: torch.dtype | None = None  # of the cache; None is `dtype`
    window: int | None = None  # tokens a query sees, itself included
    chunk: int | None = None  # or: a query sees its own of the chunks of so many tokens, as far as itself
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    sinks: bool = False  # a learned logit of each head takes weight from the keys
    tree_depth: int = 0  # of draft trees; 0: drafts, if any, are chains

    @property
    def cache(self) -> LayerCache:
        """What a layer keeps: keys and values."""
        itemsize = (self.kv_dtype or self.dtype).itemsize
        num_bytes = 2 * self.num_kv_heads * self.block_size * self.head_dim * itemsize
        return LayerCache(num_bytes, self.window or self.chunk)  # of a chunk no query sees more than that


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """What a model asks of latent attention (DeepSeek-AI 2024), on one rank.

    Of a token one row is kept, whatever the heads: a latent, from which each head's keys and values are made,
    and beside it the part of the keys that turns, which all heads share.
    """

    num_heads: int
    nope_dim: int  # features of a head's queries and keys that do not turn
    rope_dim: int  # and that do
    value_dim: int  # of a head's values
    rank: int  # of the latent
    dtype: torch.dtype
    block_size: int  # tokens
    kv_dtype: torch.dtype | None = None  # of the cache; None is `dtype`
    tree_depth: int = 0  # of draft trees; 0: drafts, if any, are chains

    window: ClassVar[None] = None  # a query sees all
    chunk: ClassVar[None] = None

    @property
    def row_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rope_dim

    @property
    def cache(self) -> LayerCache:
        """What a layer keeps: a row of every token."""
        itemsize = (self.kv_dtype or self.dtype).itemsize
        return LayerCache(self.block_size * self.row_dim * itemsize, None)


class QKNorm(NamedTuple):
    """RMSNorm of every head of queries and keys."""

    weight: Tensor  # [num_heads + num_kv_heads, head_dim]
    eps: float

    def of_last(self, num: int) -> QKNorm:
        """The same of so many last heads alone: with num_kv_heads, of keys."""
        return QKNorm(self.weight[-num:], self.eps)


class AttentionLayer(Protocol):
    """What a backend may read of the layer that calls it."""

    scale: float
    window: int | None
    chunk: int | None
    table: int  # which of fwd.block_tables is its own
    k_scale: float  # the cache holds keys / k_scale
    v_scale: float  # and values / v_scale; both are 1 unless the cache is FP8
    kv_cache: Tensor  # as `kv_layout` says, e.g. [num_blocks, 2, num_kv_heads, block_size, head_dim]
    softcap: float | None
    sinks: Tensor | None  # [num_heads], logits in the model's dtype
    qk_norm: QKNorm | None
    rope: Tensor | None  # float32 [max_len, 2, 1, rotary_dim]: cosines, and sines negative in the first half
    interleaved: bool  # features 2i and 2i + 1 of a head turn together, not i and i + rotary_dim / 2
    is_last: bool  # of the model: what it gives is read where fwd.wanted looks


class LatentLayer(Protocol):
    """What a backend may read of a layer with latent attention.  N heads, of this rank."""

    spec: LatentSpec
    scale: float
    table: int  # which of fwd.block_tables is its own
    row_scale: float  # the cache holds rows / row_scale; 1 unless it is FP8
    kv_cache: Tensor  # [num_blocks, block_size, rank + rope_dim]: of a token its latent, then what turns
    norm: QKNorm  # of the latent: weight [rank]
    rope: Tensor  # as an AttentionLayer's
    interleaved: bool  # features 2i and 2i + 1 turn together, not i and i + rope_dim / 2
    up: Tensor  # [N, nope_dim + value_dim, rank]: from a latent to each head's key and value
    is_last: bool  # of the model: what it gives is read where fwd.wanted looks


Spec_contra = TypeVar("Spec_contra", contravariant=True)


class Backend(Protocol[Spec_contra]):
    """One way to attend.  `metadata` is called once a step and table, before capture and replay alike."""

    max_graph_query: ClassVar[int]  # most queries of every row of a step that may be recorded; 0: none
    supports_tile_maps: ClassVar[bool]  # whether it obeys fwd.tiles, so that chunks may be recorded
    max_graph_keys: ClassVar[int | None]  # that the chunks of such a step may have together; None: any number
    supports_trees: ClassVar[bool]  # whether it obeys fwd.tree

    @staticmethod
    def supports(spec: Spec_contra, platform: Platform) -> str | None:
        """None if this backend can serve `spec` on this hardware, else the reason in words."""
        ...

    @staticmethod
    def describe(spec: Spec_contra, platform: Platform) -> str:
        """What attends with `spec` on this hardware, in words for the log."""
        ...

    def kv_layout(self, spec: Spec_contra, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache, of spec.cache.num_bytes a block."""
        ...

    def metadata(self, fwd: ForwardInput, table: int) -> object:
        """Metadata of this step for one block table; it becomes fwd.attn[table]."""
        ...

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy one layer's keys and values from places to places, block * block_size + offset.

        sources, targets: [B, n] int64; a row's own places only, targets rising and none behind its source,
        so that no copy writes what a later one reads.
        Where there is nothing to copy both are 0, in the padding block.
        """
        ...


class AttentionBackend(Backend[AttentionSpec], Protocol):
    """One that attends with heads of queries, keys and values."""

    def forward(self, qkv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> Tensor:
        """From the packed projection [T, (num_heads + 2 * num_kv_heads) * head_dim] to attended heads.

        Normalize and turn q and k as `layer` says, write k and v to the cache, then attend with q.

        All rows write before any row reads, so rows of one step may share blocks.
        Returns [T, num_heads * head_dim].  The last layer's may be anything where fwd.wanted does not look.
        """
        ...

    def write(self, kv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> None:
        """The first half of `forward` alone: from [T, 2 * num_kv_heads * head_dim] to the cache."""
        ...


class LatentBackend(Backend[LatentSpec], Protocol):
    """One that attends with heads of queries over latents."""

    def forward(self, q: Tensor, latent: Tensor, layer: LatentLayer, fwd: ForwardInput) -> Tensor:
        """From q [T, N * (nope + rope)] and latents [T, rank + rope] as projected to attended heads.

        Normalize the latent, turn what turns of both, write rows to the cache, then attend.  q may be
        overwritten.  Returns [T, N * value].  The last layer's may be anything where fwd.wanted does not
        look.
        """
        ...


ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "torch": "pellucid.attention.torch:TorchAttention",
        "native": "pellucid.attention.native:NativeAttention",
        "triton": "pellucid.attention.triton:TritonAttention",
    },
)
LATENT_BACKENDS: Registry[type[LatentBackend]] = Registry(
    "attention backend",
    {
        "torch": "pellucid.attention.torch_latent:TorchLatent",
        "triton": "pellucid.attention.triton_latent:TritonLatent",
    },
)
Spec = AttentionSpec | LatentSpec
AnyBackend = Backend[Any]  # of one kind or the other, as its layers are
# Plain torch is so slow on a GPU that it must be asked for.
PREFERENCE = {"cuda": ("triton",), "cpu": ("native", "torch")}


def tree_refusal(backend: type[AnyBackend], spec: Spec) -> str | None:
    """Why this backend cannot serve the draft trees that are asked for, or None."""
    if not spec.tree_depth:
        return None
    if not backend.supports_trees:
        return "has no masks for draft trees; propose chains, or choose a backend that has"
    if spec.window is not None and spec.window <= spec.tree_depth:
        return f"a window of {spec.window} tokens does not reach over a draft tree {spec.tree_depth} deep"
    if spec.chunk is not None:
        return f"a draft tree may lie in two chunks of {spec.chunk} tokens; propose chains"
    return None


def choose_backend(name: str | None, specs: Iterable[Spec], platform: Platform) -> AnyBackend:
    """The named backend, or this device's, for every layer's spec.

    Raises ValueError, with the way out, if it cannot serve one of them.
    """
    specs = tuple(specs)
    backends = LATENT_BACKENDS if isinstance(specs[0], LatentSpec) else ATTENTION_BACKENDS
    name = name or preferred(backends, specs, platform)
    backend = backends.load(name)
    reason = refusal(backend, specs, platform)
    if reason is None:
        return backend()
    others = [other for other in backends if other != name]
    able = [other for other in others if refusal(backends.load(other), specs, platform) is None]
    way_out = "".join(f"; use attention_backend={other!r}, which is slower" for other in able)
    raise ValueError(f"the attention backend {name} cannot serve this model here: {reason}{way_out}")


def preferred(
    backends: Registry[type[AttentionBackend]] | Registry[type[LatentBackend]],
    specs: Iterable[Spec],
    platform: Platform,
) -> str:
    """The first of this device's that can serve; the last one if none can, which says why."""
    *better, last = (name for name in PREFERENCE[platform.device] if name in backends)
    able = (name for name in better if refusal(backends.load(name), specs, platform) is None)
    return next(able, last)


def refusal(backend: type[AnyBackend], specs: Iterable[Spec], platform: Platform) -> str | None:
    """Why this backend cannot serve what is asked for, or None."""
    reasons = (backend.supports(spec, platform) or tree_refusal(backend, spec) for spec in specs)
    return next(filter(None, reasons), None)
