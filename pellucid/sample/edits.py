"""What changes logits before the draw, one function an edit, in vLLM's order.

1. allowed_token_ids and logit_bias, 2. bad_words, 3. min_tokens, 4. repetition, frequency, presence penalty.
(vLLM adds logit_bias after the three masks; sums with -inf commute, so one dense row does both.)  The filters
follow, in filters.py, then the draw.  Every edit works in place on a part [R, V] float32 that holds only rows
that asked for it, and sees nothing but those rows' own parameters and known tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.sample.branches import IN_ORDER, Branches
from pellucid.sample.state import Column, SamplingState, SlotParams

_NEVER = -float("inf")


@dataclass(frozen=True, slots=True)
class Rows:
    """Some of a step's logits: whose they are, which token they are for, and what was said before."""

    state: SamplingState
    token_ids: Tensor  # [num_slots, max_len] int32, of all slots
    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    params: SlotParams
    branches: Branches = IN_ORDER

    def take(self, index: Tensor) -> Rows:
        params = SlotParams(self.params.table[index])
        slots, positions = self.slots[index], self.positions[index]
        return Rows(self.state, self.token_ids, slots, positions, params, self.branches.take(index))

    def tokens_at(self, positions: Tensor) -> Tensor:
        """[R, n] int32: each row's own tokens at `positions` [R or 1, n], known or not."""
        return self.token_ids[self.slots[:, None], self.branches.places(positions)]

    @property
    def num_outputs(self) -> Tensor:
        """[R] int64: tokens generated before the one to be drawn."""
        return self.positions - self.params.ints(Column.PROMPT_LEN)


def add_bias(logits: Tensor, rows: Rows) -> None:
    """Add logit_bias, and rule out what is not in allowed_token_ids."""
    logits.add_(rows.state.bias.data[rows.params.ints(Column.BIAS_ROW)])


def mask_bad_words(logits: Tensor, rows: Rows) -> None:
    """Rule out the last token of each bad word whose other tokens are the newest generated ones."""
    prefixes = rows.state.bad_prefixes.data[rows.slots]  # [R, words, length], newest first
    lasts = rows.state.bad_lasts.data[rows.slots]  # [R, words]
    back = torch.arange(1, prefixes.shape[2] + 1, device=logits.device)
    newest = rows.tokens_at((rows.positions[:, None] - back).clamp_(min=0))
    matches = ((prefixes == newest[:, None]) | (prefixes < 0)).all(-1)
    lengths = (prefixes >= 0).sum(-1)
    _forbid(logits, lasts, matches & (lengths <= rows.num_outputs[:, None]))


def mask_stop_tokens(logits: Tensor, rows: Rows) -> None:
    """Rule out every token that ends the text while fewer than min_tokens are generated."""
    is_short = rows.num_outputs < rows.params.ints(Column.MIN_TOKENS)
    _forbid(logits, rows.state.stop_ids.data[rows.slots], is_short[:, None])


def penalize(logits: Tensor, rows: Rows) -> None:
    """Apply repetition (prompt and output), frequency and presence (output) penalties, counted afresh.

    Repetition is Keskar et al. 2019 (CTRL); frequency and presence are the OpenAI API's.
    """
    seen, counts = count_tokens(rows, logits.shape[1])
    repetition = rows.params.floats(Column.REPETITION)[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, repeated, logits))
    logits.sub_(rows.params.floats(Column.FREQUENCY)[:, None] * counts)
    logits.sub_(rows.params.floats(Column.PRESENCE)[:, None] * (counts > 0))


def count_tokens(rows: Rows, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Which tokens are known at all, [R, V] bool, and how often each was generated, [R, V] int32."""
    position = torch.arange(rows.token_ids.shape[1], device=rows.slots.device)[None]
    tokens = rows.tokens_at(position)
    is_known = position < rows.positions[:, None]
    is_output = is_known & (position >= rows.params.ints(Column.PROMPT_LEN)[:, None])
    # What lies behind the known tokens is left over from other times: it goes to a column past the end.
    ids = torch.where(is_known, tokens, vocab_size).clamp_(max=vocab_size).long()
    shape = (tokens.shape[0], vocab_size + 1)
    seen = torch.zeros(shape, dtype=torch.bool, device=tokens.device).scatter_(1, ids, True)
    counts = torch.zeros(shape, dtype=torch.int32, device=tokens.device).scatter_add_(1, ids, is_output.int())
    return seen[:, :vocab_size], counts[:, :vocab_size]


def _forbid(logits: Tensor, ids: Tensor, applies: Tensor) -> None:
    """Rule out `ids` [R, n] (-1 is none) where `applies` [R, n or 1]; the rest gains 0."""
    gain = torch.where(applies & (ids >= 0), _NEVER, 0.0)
    logits.scatter_add_(1, ids.clamp(min=0).long(), gain)
