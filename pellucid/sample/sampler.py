"""The sampler: one token for every logit row, of the row's own parameters, tokens, seed and position alone.

Greedy and random rows take the same path, whose end is draw.py.  What no row asks for is not computed.  Knows
nothing of drafts: see spec/verify.py, which may revise what was drawn, or draw itself.
Legend: S logits, R rows of a part, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pellucid.sample.draw import choose_draw
from pellucid.sample.edits import (
    MOST_POSITIONS,
    Rows,
    add_bias,
    mask_bad_words,
    mask_others,
    mask_stop_tokens,
    penalize,
)
from pellucid.sample.filters import filter_logits
from pellucid.sample.logprobs import LogprobTensors, raw_logprobs, top_logprobs
from pellucid.sample.state import FILTER_WIDTHS, MASKS, LogitsBatch, SamplingState, Trait
from pellucid.sample.vocabulary import WHOLE_VOCABULARY, Vocabulary

Edit = Callable[[Tensor, Rows], None]
Pick = Callable[[Tensor], Tensor]  # of edited logits [S, V] float32: tokens [S] int32
# Elements of a [R, V] tensor in an edit: 64 MiB of each of half a dozen, whatever a step's rows ask for.
_SLICE_ELEMENTS = 1 << 24
Revision = Callable[[Tensor], Tensor]  # of drawn tokens [S] int32: those that are taken, [S] int32


def _as_drawn(tokens: Tensor) -> Tensor:
    return tokens


def _filter(logits: Tensor, rows: Rows, width: int | None) -> None:
    filter_logits(logits, rows.params, width)


# In the order in which they are applied.
EDITS: dict[Trait, Edit] = {
    Trait.ALLOWED: mask_others,
    Trait.BIAS: add_bias,
    Trait.BAD_WORDS: mask_bad_words,
    Trait.MIN_TOKENS: mask_stop_tokens,
    Trait.PENALTY: penalize,
    Trait.MIN_P: partial(_filter, width=FILTER_WIDTHS[Trait.MIN_P]),
    Trait.TOP_NARROW: partial(_filter, width=FILTER_WIDTHS[Trait.TOP_NARROW]),
    Trait.TOP_WIDE: partial(_filter, width=FILTER_WIDTHS[Trait.TOP_WIDE]),
    Trait.TOP_ANY: partial(_filter, width=None),
}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for every logit row."""

    tokens: Tensor  # [S] int32
    logprobs: LogprobTensors | None = None  # [S, ...]; zeros in rows that want none
    # [S] bool: no token may come, so the one that was taken means nothing.  None: no row has a mask.
    is_stuck: Tensor | None = None


class Sampler:
    """Draws from logits with the parameters in `state`.  vocabulary: whose logits this rank is given."""

    def __init__(self, state: SamplingState, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> None:
        self.state, self.vocabulary = state, vocabulary
        self.draw = choose_draw(state)

    def __call__(
        self, logits: Tensor, batch: LogitsBatch, token_ids: Tensor, revise: Revision = _as_drawn
    ) -> Sampled:
        """Draw one token from each row of `logits` [S, V], this rank's share of V, any float type.

        token_ids: [num_slots, max_len] int32, the known tokens of every slot.  Overwrites float32 logits.
        """
        if not batch.traits & ~Trait.RANDOM:
            # Ranks that share the vocabulary exchange no more than their best.
            return Sampled(revise(self.draw(self.vocabulary.trim(logits), batch, self.vocabulary)))
        return self.choose(
            logits, batch, token_ids, lambda edited: revise(self.draw(edited, batch, WHOLE_VOCABULARY))
        )

    def choose(self, logits: Tensor, batch: LogitsBatch, token_ids: Tensor, pick: Pick) -> Sampled:
        """Gather and edit all logits, let `pick` take a token of each, and report on it."""
        logits = self.vocabulary.whole(logits)
        assert logits.shape[1] == self.state.vocab_size, (logits.shape, self.state.vocab_size)
        raw = _raw_logprobs_of_askers(logits, batch)
        logits = logits.float()
        params = self.state.params(batch.slots)
        rows = Rows(
            self.state, token_ids, batch.slots, batch.positions, params, batch.longest, batch.branches
        )
        for trait, edit in EDITS.items():
            if trait in batch.rows:
                _edit_part(logits, rows, batch.rows[trait], edit)
        is_stuck = logits.amax(-1) == -float("inf") if batch.traits & MASKS else None
        tokens = pick(logits)
        return Sampled(tokens, None if raw is None else _report(raw, tokens, batch), is_stuck)


def _edit_part(logits: Tensor, rows: Rows, index: Tensor, edit: Edit) -> None:
    """Apply `edit` to the rows of `logits` at `index`, in place, and to a bounded number of them at once."""
    size = max(1, _SLICE_ELEMENTS // max(logits.shape[1], rows.state.max_listed, MOST_POSITIONS))
    if len(index) == len(logits) <= size:
        return edit(logits, rows)
    for places in index.split(size):
        part = logits[places]
        edit(part, rows.take(places))
        logits.index_copy_(0, places, part)


def _raw_logprobs_of_askers(logits: Tensor, batch: LogitsBatch) -> Tensor | None:
    """[R, V] float32 of the rows that want logprobs, before anything touches the logits."""
    index = batch.rows.get(Trait.LOGPROBS)
    return None if index is None else raw_logprobs(logits[index])


def _report(raw: Tensor, tokens: Tensor, batch: LogitsBatch) -> LogprobTensors:
    index = batch.rows[Trait.LOGPROBS]
    return top_logprobs(raw, tokens[index], batch.max_logprobs).spread(index, len(tokens))
