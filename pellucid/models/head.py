"""What a draft head offers: a few layers that go on from the target's hidden states, and guess what follows.

A head is no model: it cannot run without the target, whose embedding and head it may borrow.
Legend: T tokens, S logits, D model dim, F features of a token that are recycled, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from pellucid.attention.base import AnyBackend
from pellucid.dist.collectives import Group
from pellucid.forward import ForwardInput
from pellucid.kv.layout import LayerCache
from pellucid.layers.addend import Addend
from pellucid.layers.attention import Attention
from pellucid.layers.embedding import SplitVocabEmbedding, VocabEmbedding
from pellucid.layers.latent import LatentAttention
from pellucid.layers.linear import Linear
from pellucid.layers.stage import Inlet
from pellucid.layers.weight import Weight
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder
from pellucid.models.fields import Fields
from pellucid.models.registry import Model
from pellucid.taps import Taps

# From ids [T] to embeddings [T, D].  No module, so that what is borrowed is loaded once, by its owner.
Embed = Callable[[Tensor], Tensor | Addend]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lender:
    """The target, and what a head may know and borrow of it."""

    model: Model
    config: Fields  # its config.json
    group: Group  # the ranks that share its layers

    @property
    def hidden_size(self) -> int:
        return self.config.size("hidden_size")

    @property
    def vocab_size(self) -> int:
        return self.config.size("vocab_size")

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, this rank's share of V], by its head."""
        return self.model.logits(hidden)

    def embedding(self) -> Embed:
        """Its look-up.  Raises ValueError on a pipeline stage that holds no copy of the table."""
        model = self.model
        if not isinstance(model, Decoder):
            raise ValueError(f"{type(model).__name__} lends no embedding to draft heads; use another method")
        if not isinstance(model.embed, Inlet):
            assert isinstance(model.embed, VocabEmbedding), type(model.embed)
            return model.embed.forward
        if not self.config.bool("tie_word_embeddings", False) or not isinstance(model.head, Linear):
            raise ValueError(
                "the draft head borrows the model's embedding, which is on another pipeline stage; "
                "use pipeline_parallel_size=1, or a head with embed_tokens of its own"
            )
        table = dict(model.head.named_parameters(recurse=False)).get("weight")
        if not isinstance(table, Weight):
            raise ValueError(
                "the draft head borrows the model's embedding, which this pipeline stage keeps in codes, or "
                "laid out for the head's product; use pipeline_parallel_size=1, or a head with embed_tokens "
                "of its own"
            )
        alone = self.group.size == 1
        return (VocabEmbedding(table) if alone else SplitVocabEmbedding(table, self.group)).forward


class Head(Protocol):
    """Also an `nn.Module` whose parameters are `Weight`s."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of its checkpoint's tensors that nobody needs."""
        ...

    def __call__(self, fwd: ForwardInput, states: Tensor) -> Tensor:
        """What is drawn from and recycled, [T, F], of the target's states [T, ..] at the places of `fwd`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, F] -> [S, this rank's share of V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """How to build a head from a checkpoint."""

    make: Callable[[Fields, Builder], Head]
    stacked: dict[str, tuple[str, ...]]  # merged name -> the checkpoint's names
    rename: Callable[[str], str] = lambda key: key
    # Whose checkpoint: the one that `model` names, or the target's; of its tensors those by these patterns.
    is_targets: bool = False
    claims: tuple[str, ...] = ("*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltHead:
    """A loaded head, and what the worker must give it before it can run."""

    model: Head
    caches: tuple[LayerCache, ...]  # of all its attention layers, here or not
    attention_layers: tuple[
        Attention | LatentAttention, ...
    ]  # those that are here; each needs its `kv_cache` and `table`
    backend: AnyBackend  # of every attention layer, the target's if there are none

    def run(self, fwd: ForwardInput, states: Tensor) -> Tensor:
        """[T, F]; `fwd` stays as it is."""
        return self.model(self.planned(fwd), states)

    def planned(self, fwd: ForwardInput) -> ForwardInput:
        """The same with this head's attention planned; no part of it is tapped."""
        attn = ()
        if self.attention_layers:
            attn = tuple(self.backend.metadata(fwd, table) for table in range(len(fwd.block_tables)))
        return replace(fwd, attn=attn, taps=Taps())


def whole(x: Tensor | Addend) -> Tensor:
    """What an embedding gives, summed over ranks."""
    return x.sum() if isinstance(x, Addend) else x
