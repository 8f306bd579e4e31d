"""Trees of drafts that grow where the drafter is sure, for each row and step another one.

At each depth the drafter is asked behind the `width` nodes whose paths it thinks likeliest, and names as many
tokens behind each; the likeliest of these are asked next.  In the end the best of all nodes that were named
are the tree, the likeliest first.  So it is deep where one text is likely, and wide where many are.
Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", 2024.

The asked nodes' own KV lies behind the newest token, level by level, whatever becomes of it: the step that
verifies the tree makes that of what stands anew.
Legend: B rows, W width, C nodes that were named, n drafts, F features of a token, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pellucid.forward import ForwardInput, TreeMask
from pellucid.spec.base import Drafts, Known
from pellucid.taps import Taps

# From features [.., F] to logits [.., V].
Logits = Callable[[Tensor], Tensor]
# From the input of a pass and the features of the nodes before its tokens, [B * W, F], to these tokens'.
Run = Callable[[ForwardInput, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Named:
    """Nodes that the drafter has named at one depth; of each row C' ones."""

    tokens: Tensor  # [B, C'] int64
    scores: Tensor  # [B, C'] float32: log-probability of the node and all before it
    parents: Tensor  # [B, C'] int64: the node before, 0 or a number among all that were named


@dataclass(frozen=True, slots=True)
class Asked:
    """The nodes at one depth behind which the drafter is asked, [B, W] each."""

    tokens: Tensor
    scores: Tensor
    numbers: Tensor  # int64, among all nodes that were named, from 1 on
    before: Tensor  # int64: bits of the asked nodes before it, in the order of their KV
    features: Tensor  # [B, W, F], of the node before it; a head may write over them


@dataclass(frozen=True, slots=True)
class Grower:
    """Makes the trees of a step."""

    run: Run
    logits: Logits
    width: int
    depth: int

    def grow(self, fwd: ForwardInput, known: Known, features: Tensor) -> Drafts:
        """The known.num_wanted best nodes.  features: [B, F], of each row's last token that stands."""
        num_rows, width = len(features), self.width
        no_scores = features.new_zeros((num_rows, 1), dtype=torch.float32)
        named = [self._name(features[:, None], no_scores, torch.zeros_like(known.newest)[:, None])]
        asked = Asked(
            named[0].tokens,
            named[0].scores,
            torch.arange(1, 1 + width, device=features.device).expand(num_rows, -1),
            torch.zeros_like(named[0].tokens),
            features[:, None].repeat(1, width, 1),
        )
        num_named = width
        for level in range(min(self.depth, known.num_wanted) - 1):
            seen = asked.before | 1 << level * width + torch.arange(width, device=features.device)
            fed = branches(fwd, known, level, asked.tokens, seen)
            made = self.run(fed, asked.features.flatten(0, 1)).view(num_rows, width, -1)
            named.append(self._name(made, asked.scores, asked.numbers))
            best = named[-1].scores.topk(width, dim=1)
            row = best.indices // width  # of the asked node that it is behind
            asked = Asked(
                named[-1].tokens.gather(1, best.indices),
                best.values,
                1 + num_named + best.indices,
                seen.gather(1, row),
                made.gather(1, row[..., None].expand(-1, -1, made.shape[2])),
            )
            num_named += width * width
        return best_of(named, known.num_wanted)

    def _name(self, features: Tensor, scores: Tensor, numbers: Tensor) -> Named:
        """The likeliest tokens behind m nodes of each row: features [B, m, F], scores and numbers [B, m]."""
        logits = self.logits(features.flatten(0, 1)).float()
        best = logits.topk(self.width, dim=1)
        chances = (best.values - logits.logsumexp(1, keepdim=True)).clamp(max=0)
        chances = chances.nan_to_num(nan=-torch.inf)  # which would be sorted before the nodes above it
        shape = (*scores.shape, self.width)
        return Named(
            best.indices.view(shape).flatten(1),
            (scores[..., None] + chances.view(shape)).flatten(1),
            numbers[..., None].expand(shape).flatten(1),
        )


def best_of(named: list[Named], num: int) -> Drafts:
    """The `num` best nodes, each behind the one before it: which scores no less, and was named earlier."""
    tokens, scores, parents = (
        torch.cat(parts, dim=1)
        for parts in zip(*((each.tokens, each.scores, each.parents) for each in named), strict=True)
    )
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num]
    places = torch.zeros((len(order), 1 + tokens.shape[1]), dtype=torch.int8, device=order.device)
    ranks = torch.arange(1, 1 + num, dtype=torch.int8, device=order.device).expand_as(order)
    places.scatter_(1, 1 + order, ranks)  # of each node its place in the tree; of none 0
    return Drafts(tokens.gather(1, order).int(), parents=places.gather(1, parents.gather(1, order)))


def branches(fwd: ForwardInput, known: Known, level: int, tokens: Tensor, seen: Tensor) -> ForwardInput:
    """The input of a pass over tokens [B, W] at one depth: level 0 is that of the first drafts.

    A head's place of a token is one before the token's own.  seen: [B, W] int64, bits of the asked nodes that
    each sees, itself among them; the first is the one whose KV lies at the newest token's place.
    """
    num_rows, width = tokens.shape
    device, newest, size = tokens.device, known.newest, fwd.block_size
    first = newest + level * width
    places = first[:, None] + torch.arange(width, device=device)
    ends = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * width
    return replace(
        fwd,
        input_ids=tokens.flatten().int(),
        positions=(newest + level).repeat_interleave(width),
        cu_seqlens_q=ends,
        seq_lens=(first + width).int(),
        slot_mappings=tuple(
            (table.gather(1, places // size).long() * size + places % size).flatten()
            for table in fwd.block_tables
        ),
        logits_index=torch.arange(num_rows * width, device=device),
        all_wanted=True,
        tree=TreeMask(seen.flatten(), newest.int()),
        query_lens=[width] * num_rows,
        num_sampled=[width] * num_rows,
        max_query=width,
        tiles=None,
        attn=(),
        taps=Taps(),
    )
