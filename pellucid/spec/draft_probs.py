"""What drafts were drawn from, small enough to be kept: the likeliest blocks of the vocabulary alone.

A draft is drawn from these and no other token, so what is kept is not an approximation of what it was drawn
from: it is that.  Which blocks they are is chosen by logits alone, never by noise.
Legend: V vocab, m blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK, MOST_BLOCKS = 64, 16  # tokens of a block, and blocks that are kept: 4 KiB a draft


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Of each draft the tokens that could have been drawn, with which probability; all others: never."""

    blocks: Tensor  # [.., m] int32
    probs: Tensor  # [.., m * BLOCK] float32; 0 behind the vocabulary's end

    @property
    def ids(self) -> Tensor:
        """[.., m * BLOCK] int64: whose probabilities they are."""
        return ids_of(self.blocks)

    def dense(self, vocab_size: int) -> Tensor:
        """[.., V] float32."""
        width = -(-vocab_size // BLOCK) * BLOCK
        wide = self.probs.new_zeros((*self.probs.shape[:-1], width))
        return wide.scatter_(-1, self.ids, self.probs)[..., :vocab_size]


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [B, V] the blocks with the highest ones, [B, m] int32, and these blocks', [B, m * BLOCK]."""
    missing = -logits.shape[1] % BLOCK
    by_block = F.pad(logits, (0, missing), value=-torch.inf).view(len(logits), -1, BLOCK)
    blocks = by_block.amax(-1).topk(min(MOST_BLOCKS, by_block.shape[1]), dim=1).indices
    return blocks.int(), by_block.gather(1, blocks[..., None].expand(-1, -1, BLOCK)).flatten(1)


def ids_of(blocks: Tensor) -> Tensor:
    """[.., m] -> [.., m * BLOCK] int64: the tokens of blocks."""
    within = torch.arange(BLOCK, device=blocks.device)
    return (blocks.long()[..., None] * BLOCK + within).flatten(-2)
