"""Log-probabilities to report: of the chosen token, and of the most likely ones, always from the raw logits.

Raw is before bias, masks, penalties and temperature (vLLM's default, "raw_logprobs").  Stays on the device;
what a request asked for is cut out on the host.  Legend: S logits, P prompt positions, V vocab, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of one [rows, V] float32 temporary while scoring: 128 MiB.
_SLICE_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """The chosen token first, then the n most likely (which may name it again), at any number of places."""

    token_ids: Tensor  # [..., n + 1] int32
    logprobs: Tensor  # [..., n + 1] float32
    ranks: Tensor  # [...] int32, of the chosen token: 1 + the number of tokens more likely than it

    def take(self, index: Tensor) -> LogprobTensors:
        """The places at `index`, an integer tensor of any shape over the first dimension."""
        return LogprobTensors(self.token_ids[index], self.logprobs[index], self.ranks[index])

    def spread(self, index: Tensor, size: int) -> LogprobTensors:
        """Put the places at `index` of `size` places, and zeros at the others."""
        parts = (self.token_ids, self.logprobs, self.ranks)
        return LogprobTensors(*(p.new_zeros((size, *p.shape[1:])).index_copy_(0, index, p) for p in parts))


def top_logprobs(logprobs: Tensor, chosen: Tensor, n: int) -> LogprobTensors:
    """Pick the chosen [S] and the `n` most likely tokens out of `logprobs` [S, V] float32."""
    chosen = chosen.long()[:, None]
    chosen_logprobs = logprobs.gather(1, chosen)
    ranks = (logprobs > chosen_logprobs).sum(-1, dtype=torch.int32) + 1
    top = logprobs.topk(min(n, logprobs.shape[1]))
    token_ids = torch.cat([chosen, top.indices], dim=1).int()
    return LogprobTensors(token_ids, torch.cat([chosen_logprobs, top.values], dim=1), ranks)


def score(
    hidden: Tensor, head: Callable[..., Tensor], next_tokens: Tensor, n: int,
    *, vocab_size: int, of_head: tuple[Tensor, ...] = (),
) -> LogprobTensors:  # fmt: skip
    """Logprobs of known tokens straight from hidden states, never holding all their logits at once.

    hidden: [P, D] for P >= 1.  head: [p, D] -> [p, V] logits.  next_tokens: [P] integers, what followed each.
    of_head: [P] each, what the head takes beside hidden states.
    """
    rows = max(1, _SLICE_ELEMENTS // vocab_size)
    slices = zip(*(each.split(rows) for each in (next_tokens, hidden, *of_head)), strict=True)
    parts = [top_logprobs(raw_logprobs(head(*taken)), chosen, n) for chosen, *taken in slices]
    return LogprobTensors(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )


def raw_logprobs(logits: Tensor) -> Tensor:
    """log_softmax in float32: [S, V] -> [S, V]."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
