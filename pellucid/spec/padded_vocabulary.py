"""A draft model of the same tokenizer whose vocabulary is padded otherwise: more rows or fewer, for no token.

As Qwen2.5's, of 151,936 tokens in small models and of 152,064 in large ones.
Legend: S logits, V the target's vocabulary, W the draft model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput


@dataclass(frozen=True, slots=True)
class PaddedVocabulary:
    """What either model lacks stands for no text, so what becomes of it costs a draft at most."""

    own: int  # W
    target: int  # V

    def feed(self, fwd: ForwardInput) -> ForwardInput:
        """The same with token 0 for those that the draft model lacks."""
        if self.own >= self.target:
            return fwd
        return replace(fwd, input_ids=fwd.input_ids.where(fwd.input_ids < self.own, 0))

    def logits(self, logits: Tensor) -> Tensor:
        """[S, W] -> [S, V]: what the draft model lacks is impossible, what the target lacks is cut off."""
        if self.own == self.target:
            return logits
        return F.pad(logits, (0, self.target - self.own), value=-float("inf"))
