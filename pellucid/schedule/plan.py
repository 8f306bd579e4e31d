"""The wire between the scheduler and the workers: what one step does, and what came of it.

Plans carry counts and differences, never sampled token ids (but at admission).  No torch, no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from pellucid.sampling_params import SamplingParams

if TYPE_CHECKING:
    Ints = array[int]
    Column = NDArray[np.int64]
else:
    Ints = array  # which takes no parameters before Python 3.12, where msgspec would look for them
    Column = np.ndarray


def ints(values: Iterable[int] | bytes = ()) -> Ints:
    """Integers of 32 bits, or these bytes as such."""
    return array("i", values)


# What a request wants beside tokens: bits of the column `asked`.
STREAMED = 1  # somebody waits for each of its tokens
HOST_BOUND = 2  # the host must see each token before the next one: not planned while in flight
FIRST_FEATURE = 4  # this one and all above are features'
FEATURE_BITS = -FIRST_FEATURE

NOBODY: Column = np.empty(0, dtype=np.int64)


class Row(NamedTuple):
    """One slot's share of a step; the whole vocabulary of work.

    A prompt chunk is (n, 0, 0), its last chunk (n, 0, 1), a decode (1, 0, 1), a verification (1+k, k, 1+k).
    Prompt logprobs ask for more logits: a chunk is then (n, 0, m) with m up to n.
    """

    slot: int
    num_query: int = 1  # tokens whose KV is computed, drafts included
    num_draft: int = 0
    num_logits: int = 1  # trailing positions whose logits are wanted


class Rows(Struct, frozen=True, kw_only=True, eq=False):
    """All rows of a step, decodes first: a column of int64 [B] for each of a row's numbers.

    None stands for a column in which all numbers are what a decode has.  Columns must not be changed: plans
    share them.
    """

    slots: Column = field(default_factory=lambda: NOBODY)
    num_query: Column | None = None
    num_draft: Column | None = None
    num_logits: Column | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """The same rows, one by one."""
        slots, num_query, num_draft, num_logits = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
        return cls(slots=slots, num_query=num_query, num_draft=num_draft, num_logits=num_logits)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Row]:
        ones, zeros = np.ones_like(self.slots), np.zeros_like(self.slots)
        query = ones if self.num_query is None else self.num_query
        draft = zeros if self.num_draft is None else self.num_draft
        logits = 1 + draft if self.num_logits is None else self.num_logits
        return map(Row, self.slots.tolist(), query.tolist(), draft.tolist(), logits.tolist())

    def __getitem__(self, index: int) -> Row:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Admission(Struct, frozen=True, kw_only=True):
    """A sequence enters a slot: all that the device will ever be told about it, but for blocks that grow."""

    seq_id: int
    slot: int
    token_ids: Ints  # known tokens: the prompt, and after a preemption also what had been sampled
    prompt_len: int
    num_computed: int  # tokens whose KV is there already, in `pages` (prefix cache)
    limit: int  # most tokens, prompt included; the device stops there, too
    seed: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()  # held back until sampling.min_tokens
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    asked: int = 0  # bits of the features that it asks for
    ride: dict[str, Any] = {}  # to these, by name: plain data
    pages: Ints = field(default_factory=ints)  # of these blocks: [n * pages of a block], flat; 0 is none


class Growth(NamedTuple):
    """New blocks at the ends of slots' tables."""

    slots: Ints  # [n], of each block; a slot's blocks side by side
    pages: Ints  # [n * pages of a block], flat


NOTHING = Growth(ints(), ints())


class StepPlan(Struct, frozen=True, kw_only=True):
    """One step, as data.  Applied in this order: feedback, retired, admitted, grown, forward."""

    id: int
    committed: int  # newest plan whose result the host has seen; -1 is none
    num_propose: int = 0  # drafts made behind each row that samples: as many as the row wants that wants most
    rows: Rows = field(default_factory=Rows)
    num_tokens: int = 0  # of all rows, drafts included
    admitted: list[Admission] = []
    grown: Growth = NOTHING
    retired: list[int] = []  # slots, at the moment they retire
    asked: int = 0  # bits of the features that its rows ask for, or that ride along
    ride: dict[str, object] = {}  # to these, by name
    is_open: bool = False  # more follows while the forward runs, and the second half waits for it


class StepResult(Struct, frozen=True, kw_only=True):
    """What one plan yielded, on the host.

    Its arrays have 32 bits an item: most steps' tokens are read much later, and hundreds of Python's numbers
    would have to be made, kept and found again.
    """

    plan_id: int
    # [B, w], row by row; w: most tokens that a row may yield.  What lies behind `num_new` is nothing.
    token_ids: Ints = field(default_factory=ints)
    num_new: Ints = field(default_factory=ints)  # [B]: of these, each row's
    told: dict[str, object] = {}  # by features, by name
    # By row: why its request cannot go on.  It alone ends; the row's tokens mean nothing.
    failed: dict[int, str] = {}
    num_late_compilations: int = 0  # kernels that the worker has compiled since it was ready

    @classmethod
    def of(cls, plan_id: int, tokens: Sequence[Sequence[int]], **fields: Any) -> Self:
        """A result in which each row has yielded these tokens."""
        width = max(map(len, tokens), default=0)
        padded = ints(token for row in tokens for token in [*row, *[0] * (width - len(row))])
        return cls(plan_id=plan_id, token_ids=padded, num_new=ints(map(len, tokens)), **fields)

    @property
    def tokens(self) -> list[list[int]]:
        """Each row's new tokens."""
        width = len(self.token_ids) // max(1, len(self.num_new))
        return [
            self.token_ids[row * width : row * width + num].tolist() for row, num in enumerate(self.num_new)
        ]
