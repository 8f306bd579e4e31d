"""The wire between the scheduler and the workers: what one step does, and what came of it.

Plans carry counts and differences, never sampled token ids (but at admission).  No torch, no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from pellucid.types import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    Ints = array[int]
else:
    Ints = array  # which takes no parameters before Python 3.12, where msgspec would look for them


def ints(values: Iterable[int] | bytes = ()) -> Ints:
    """Integers of 32 bits, or these bytes as such."""
    return array("i", values)


class Row(NamedTuple):
    """One sequence's share of a step; the whole vocabulary of work.

    A prompt chunk is (n, 0, 0), its last chunk (n, 0, 1), a decode (1, 0, 1), a verification (1+k, k, 1+k).
    Prompt logprobs ask for more logits: a chunk is then (n, 0, m) with m up to n.
    """

    seq_id: int
    epoch: int
    slot: int
    num_query: int  # tokens whose KV is computed, drafts included
    num_draft: int
    num_logits: int  # trailing positions whose logits are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence enters a slot: all that the device will ever be told about it, but for blocks that grow."""

    seq_id: int
    slot: int
    token_ids: Ints  # known tokens: the prompt, and after a preemption also what had been sampled
    prompt_len: int
    num_computed: int  # tokens whose KV the blocks already hold (prefix cache)
    limit: int  # most tokens, prompt included; the device stops there, too
    seed: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()  # held back until sampling.min_tokens
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[list[int], ...] = ()  # per KV group


class Growth(NamedTuple):
    """New blocks at the ends of slots' tables."""

    group: int
    slots: list[int]  # of each block; a slot's blocks side by side
    blocks: list[int]

    def without(self, slot: int) -> Growth:
        """What the other slots get."""
        kept = [i for i, other in enumerate(self.slots) if other != slot]
        return Growth(self.group, [self.slots[i] for i in kept], [self.blocks[i] for i in kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, as data.  Applied in this order: feedback, retired, admitted, grown, forward."""

    id: int
    committed: int  # newest plan whose result the host has seen; -1 is none
    num_propose: int = 0  # drafts wanted from this step
    rows: list[Row] = field(default_factory=list[Row])  # decodes first
    num_tokens: int = 0  # of all rows, drafts included
    admitted: list[Admission] = field(default_factory=list[Admission])
    grown: list[Growth] = field(default_factory=list[Growth])  # of one group no slot twice
    retired: list[int] = field(default_factory=list[int])  # slots, at the moment they retire
    kv_meta: list[object] = field(default_factory=list[object])  # the connector's own
    has_grammar: bool = False


@dataclass(frozen=True, slots=True)
class Extras:
    """What a plan yielded beside tokens, by row index."""

    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    # One entry for each logit before the sampled ones; the "chosen" token is the next known one.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    drafts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # of host-bound rows

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.prompt_logprobs or self.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one plan yielded, on the host.

    Its arrays have 32 bits an item: most steps' tokens are read much later, and hundreds of Python's numbers
    would have to be made, kept and found again.
    """

    plan_id: int
    token_ids: Ints = field(default_factory=ints)  # the new ones of all rows, row by row
    num_new: Ints = field(default_factory=ints)  # of these, each row's: 0 to 1+k
    extras: Extras | None = None  # of most steps none
    kv_done: list[object] = field(default_factory=list[object])  # the connector's own
    num_late_compilations: int = 0  # kernels that the worker has compiled since it was ready

    @property
    def tokens(self) -> list[list[int]]:
        """Each row's new tokens."""
        token_ids, ends = self.token_ids.tolist(), accumulate(self.num_new, initial=0)
        return [token_ids[start:end] for start, end in pairwise(ends)]
