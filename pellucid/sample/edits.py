"""What changes logits before the draw, one function an edit, in vLLM's order.

1. allowed_token_ids, 2. logit_bias, 3. bad_words, 4. min_tokens, 5. repetition, frequency, presence penalty.
(vLLM adds logit_bias after the three masks; sums with -inf commute.)  The filters follow, in filters.py, then
the draw.  Every edit works in place on a part [R, V] float32 that holds only rows
that asked for it, and sees nothing but those rows' own parameters and known tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pellucid.sample.branches import IN_ORDER, Branches
from pellucid.sample.state import Column, SamplingState, SlotParams
from pellucid.sample.tables import Listed

_NEVER = -float("inf")
MOST_POSITIONS = 1 << 14  # of texts, looked at together


@dataclass(frozen=True, slots=True)
class Rows:
    """Some of a step's logits: whose they are, which token they are for, and what was said before."""

    state: SamplingState
    token_ids: Tensor  # [num_slots, max_len] int32, of all slots
    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    params: SlotParams
    longest: Mapping[Listed, int] = field(default_factory=dict)  # host: their longest list of each kind
    branches: Branches = IN_ORDER

    def take(self, index: Tensor) -> Rows:
        params = SlotParams(self.params.table[index])
        slots, positions = self.slots[index], self.positions[index]
        branches = self.branches.take(index)
        return Rows(self.state, self.token_ids, slots, positions, params, self.longest, branches)

    def listed(self, kind: Listed) -> Tensor:
        """[R, n] int32: each row's list, -1 behind its end."""
        return self.state.lists.take(kind, self.slots, self.longest[kind])

    def tokens_at(self, positions: Tensor) -> Tensor:
        """[R, n] int32: each row's own tokens at `positions` [R or 1, n], known or not."""
        return self.token_ids[self.slots[:, None], self.branches.places(positions)]

    @property
    def num_outputs(self) -> Tensor:
        """[R] int64: tokens generated before the one to be drawn."""
        return self.positions - self.params.ints(Column.PROMPT_LEN)


def mask_others(logits: Tensor, rows: Rows) -> None:
    """Rule out what is not in allowed_token_ids."""
    bits = rows.state.allowed[rows.slots]  # [R, W]
    each = torch.arange(32, dtype=torch.int32, device=bits.device)
    are_allowed = (bits[:, :, None] >> each).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(are_allowed == 0, _NEVER)


def add_bias(logits: Tensor, rows: Rows) -> None:
    """Add logit_bias."""
    ids, bias = rows.listed(Listed.BIASED), rows.listed(Listed.BIAS).view(torch.float32)
    logits.scatter_add_(1, ids.clamp(min=0).long(), bias.where(ids >= 0, 0.0))


def mask_bad_words(logits: Tensor, rows: Rows) -> None:
    """Rule out the last token of each bad word whose other tokens are the newest generated ones."""
    ids, back = rows.listed(Listed.WORD), rows.listed(Listed.BACK)  # [R, n]
    places = rows.positions[:, None] - back
    newest = rows.tokens_at(places.clamp(min=0))
    is_generated = places >= rows.params.ints(Column.PROMPT_LEN)[:, None]
    differs = (back > 0) & ~(is_generated & (newest == ids))
    last = torch.arange(ids.shape[1], device=ids.device) + back.clamp(min=0)  # of the same word
    num_differing = torch.zeros_like(ids).scatter_add_(1, last, differs.int())
    _forbid(logits, ids, (back == 0) & (num_differing == 0))


def mask_stop_tokens(logits: Tensor, rows: Rows) -> None:
    """Rule out every token that ends the text while fewer than min_tokens are generated."""
    is_short = rows.num_outputs < rows.params.ints(Column.MIN_TOKENS)
    _forbid(logits, rows.listed(Listed.STOP), is_short[:, None])


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
    shape, device = (len(rows.slots), vocab_size + 1), rows.slots.device
    seen = torch.zeros(shape, dtype=torch.bool, device=device)
    counts = torch.zeros(shape, dtype=torch.int32, device=device)
    positions = torch.arange(rows.token_ids.shape[1], device=device)[None]
    for position in positions.split(max(vocab_size, MOST_POSITIONS), dim=1):
        is_known = position < rows.positions[:, None]
        is_output = is_known & (position >= rows.params.ints(Column.PROMPT_LEN)[:, None])
        # Behind the known tokens lie those of other times: they go to a column past the end.
        ids = torch.where(is_known, rows.tokens_at(position), vocab_size).clamp_(max=vocab_size).long()
        seen.scatter_(1, ids, True)
        counts.scatter_add_(1, ids, is_output.int())
    return seen[:, :vocab_size], counts[:, :vocab_size]


def _forbid(logits: Tensor, ids: Tensor, applies: Tensor) -> None:
    """Rule out `ids` [R, n] (-1 is none) where `applies` [R, n or 1]; the rest gains 0."""
    gain = torch.where(applies & (ids >= 0), _NEVER, 0.0)
    logits.scatter_add_(1, ids.clamp(min=0).long(), gain)
