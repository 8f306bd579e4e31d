"""Medusa: heads that read one hidden state of the target, and each guess a token further ahead.

Head i guesses, of the state that gave the newest token, the (i + 1)-th token behind that one: a few residual
blocks and a projection to the vocabulary.  No attention, no KV, no passes of its own.  As a chain each head
gives one draft; as a tree several, by rank.
Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024.
Legend: B rows, D model dim, H heads, L blocks of a head, V vocab, W tokens that heads can name.
"""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.models.builder import Builder
from pellucid.models.fields import Fields
from pellucid.models.head import BuiltHead, HeadPlan, Lender
from pellucid.sample.output import SampleOutput
from pellucid.sample.sampler import Sampler
from pellucid.spec.base import Drafts, Known, Needs
from pellucid.spec.chain import Chain
from pellucid.spec.loaded import LoadedProposer
from pellucid.spec.own_vocabulary import OwnVocabulary
from pellucid.spec.passes import Passes, last_standing
from pellucid.spec.tree import parents_of

# As published, and as exported: head 2's block 1, and its projection.
PUBLISHED = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")
EXPORTED = re.compile(r"(?:medusa_heads\.)?(?:blocks\.(\d+)\.layers\.(\d+)|lm_heads\.(\d+))\.(weight|bias)")


class MedusaHead(nn.Module):
    """All heads of a checkpoint, of which the first `num` are used."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {}
    ignored = ("original_lm_head*", "lm_head*")

    def __init__(self, config: Fields, b: Builder, lender: Lender, num: int) -> None:
        super().__init__()
        num_heads, num_blocks = config.size("medusa_num_heads"), config.size("medusa_num_layers", 1)
        dim = lender.hidden_size
        if num > num_heads:
            raise ValueError(
                f"the draft has {num_heads} Medusa heads, but drafts are to be {num} deep; "
                f"lower num_speculative_tokens, or the depth of the tree, to {num_heads}"
            )
        self.ignored = (
            *MedusaHead.ignored,
            *(f"{part}.{i}.*" for i in range(num, num_heads) for part in ("blocks", "lm_heads")),
        )
        num_own = config.size("truncated_vocab_size", lender.vocab_size)
        names_all = num_own == lender.vocab_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                b.linear(f"blocks.{i}.{j}", dim, dim, bias=has_bias(b, i, j)) for j in range(num_blocks)
            )
            for i in range(num)
        )
        self.heads = nn.ModuleList(
            b.head(f"lm_heads.{i}", num_own, dim) if names_all
            else b.linear(f"lm_heads.{i}", dim, num_own, kind="head")
            for i in range(num)
        )  # fmt: skip
        listed = None if names_all else b.integers("token_map", num_own)
        self.vocabulary = None if listed is None else OwnVocabulary(listed, lender, are_offsets=False)

    @staticmethod
    def rename(key: str) -> str:
        """To `blocks.HEAD.BLOCK` and `lm_heads.HEAD`, from either way of naming them."""
        if match := PUBLISHED.fullmatch(key):
            head, block, is_block, kind = match.groups()
            return f"blocks.{head}.{block}.{kind}" if is_block else f"lm_heads.{head}.{kind}"
        if match := EXPORTED.fullmatch(key):
            head, block, of, kind = match.groups()
            return f"lm_heads.{of}.{kind}" if head is None else f"blocks.{head}.{block}.{kind}"
        return key

    def forward(self, fwd: ForwardInput, states: Tensor) -> Tensor:
        raise AssertionError("its heads are asked one by one")

    def logits(self, hidden: Tensor, index: int = 0) -> Tensor:
        """hidden [B, D] -> head `index`'s guesses, [B, this rank's share of V]."""
        x = hidden
        for block in self.blocks[index]:  # type: ignore[attr-defined]
            x = x + F.silu(block(x))
        logits = self.heads[index](x)
        return logits if self.vocabulary is None else self.vocabulary(logits)


class MedusaProposer(LoadedProposer):
    """Proposes a chain, or a fixed tree of the likeliest tokens."""

    needs = Needs(hidden=True)
    head: MedusaHead
    sampler: Sampler
    chain: Chain

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        paths = config.token_tree or ()
        self._parents = torch.tensor(parents_of(paths), dtype=torch.int8)
        # Of each node of a tree its head, and which of its tokens, by rank.
        self._nodes = [(len(path) - 1, path[-1]) for path in paths]

    def load(self, target: BuiltModel, factory: ModelFactory, sampler: Sampler) -> tuple[BuiltHead, ...]:
        lender = factory.lender(target)

        def make(config: Fields, b: Builder) -> MedusaHead:
            self.head = b.piece(lambda b: MedusaHead(config, b, lender, self.shape.depth))
            return self.head

        built = factory.build_head(HeadPlan(make=make, stacked={}, rename=MedusaHead.rename), target)
        self._parents = self._parents.to(factory.device)
        self.sampler, self.chain = sampler, Chain.of(self.config, sampler)
        return (built,)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        states = hidden[last_standing(fwd, sampled, known)]
        if self.shape.tree_depth:
            return self._tree(states)
        passes = Passes.behind(fwd, known)
        return self.chain.draw(known, passes, lambda index, _: self.head.logits(states, index))

    def _tree(self, states: Tensor) -> Drafts:
        """All nodes, the same ones in every row."""
        depths = range(self.shape.depth)
        ranks = [1 + max(rank for at, rank in self._nodes if at == depth) for depth in depths]
        best = [
            self.sampler.vocabulary.whole(self.head.logits(states, depth)).topk(num, dim=-1).indices
            for depth, num in enumerate(ranks)
        ]
        tokens = torch.stack([best[depth][:, rank] for depth, rank in self._nodes], dim=1).int()
        return Drafts(tokens, parents=self._parents.expand_as(tokens))


def has_bias(b: Builder, head: int, block: int) -> bool:
    """Whether a residual block adds one, as published heads do."""
    return not b.names or f"blocks.{head}.{block}.bias" in b.names
