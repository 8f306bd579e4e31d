"""One request as the scheduler sees it.  It never leaves the host's process.

Its counts have a time dimension: *committed* is what results have told, *planned* is the most that may be
there once every row in flight has come home.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

from pellucid.kv.manager import BlockTable
from pellucid.schedule.plan import Ints, Row
from pellucid.types import FinishReason, Request, SeqUpdate

NEVER = sys.maxsize
Key = tuple[int, float, int]  # the order of age: (priority, arrival, id)


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue
    WAITING_KV = "waiting for a connector's load"
    RUNNING = "running"  # in a slot
    FINISHED = "finished"  # answered


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Made from a Request; counts are in tokens."""

    id: int
    request: Request
    key: Key
    limit: int  # most tokens, prompt included
    table: BlockTable
    prompt_len: int
    tokens: Ints  # committed: the prompt and what has been generated
    host_bound: bool  # the host must see each token before the next one: not planned while in flight
    stop_token_ids: frozenset[int]
    min_len: int  # no stop token counts before there are this many tokens
    is_quiet: bool = False  # updates bring its first tokens, and at the end all others
    is_streamed: bool = False  # somebody waits for each of its tokens
    status: Status = Status.WAITING
    epoch: int = 0  # of its stay in a slot; a row with an older one is stale
    num_prompt_logprobs: int = 0  # that have arrived, over all stays: of the first positions
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    first_scheduled: float = 0.0  # seconds of time.monotonic; 0 is not yet
    num_told: int = 0  # of a quiet one's `tokens`, the prompt and those that updates have brought
    may_load: bool = True  # the connector has not been asked yet

    # The stay in a slot; `enter` gives them their beginning.
    slot: int = -1
    prefill_len: int = 0  # tokens known at admission: computed in chunks, the last of which samples
    num_computed: int = 0  # tokens with KV, exact at the last commit
    num_planned: int = 0  # upper bound of num_computed, with what is in flight
    num_unsure: int = 0  # drafts in flight
    num_inflight: int = 0  # rows
    num_drafts: int = 0  # that the device holds for the next row
    ready_at: int = NEVER  # first plan that may carry the next row; NEVER while the host holds it back
    decode_row: Row | None = None  # the last one, to be used again
    # A row of one token concerns nobody else while it begins below these many computed tokens: there is a
    # block for it, and it is not the last one (planned); it fills no block and ends nothing (landed).
    calm_plan: int = 0
    calm_landing: int = 0
    drafts: list[int] = field(default_factory=list[int])  # of a host-bound sequence

    def enter(self, slot: int, num_cached: int, plan_id: int) -> None:
        """Begin a stay in `slot`, with the KV of `num_cached` tokens already there."""
        self.status, self.slot = Status.RUNNING, slot
        self.prefill_len = len(self.tokens)
        self.num_computed = self.num_planned = num_cached
        self.ready_at = plan_id

    def leave(self) -> None:
        """End the stay: rows in flight are stale from now on, and no plan may carry another."""
        self.epoch += 1
        self.slot, self.ready_at = -1, NEVER
        self.num_inflight = self.num_drafts = self.num_unsure = 0
        self.calm_plan = self.calm_landing = 0
        self.decode_row = None
        self.drafts = []

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def may_end(self) -> bool:
        """May one of the model's own stop tokens come next?"""
        return bool(self.request.eos_token_ids) and len(self.tokens) >= self.min_len

    @property
    def is_decoding(self) -> bool:
        """Has every known token been planned, so that the next row samples?"""
        return self.num_planned >= self.prefill_len

    @property
    def num_certain(self) -> int:
        """The lower bound of len(tokens) when all in flight has landed."""
        return self.num_planned + 1 - self.num_unsure if self.is_decoding else self.prefill_len

    @property
    def num_wanted_logprobs(self) -> int:
        """Prompt positions whose successor's log-probability the user wants."""
        return 0 if self.request.sampling.prompt_logprobs is None else self.prompt_len - 1

    @property
    def max_cached(self) -> int:
        """Most tokens to take from the prefix cache; the next token and wanted logprobs need a forward."""
        if self.num_prompt_logprobs < self.num_wanted_logprobs:
            return self.num_prompt_logprobs
        return len(self.tokens) - 1

    @property
    def first_write(self) -> int:
        """The least position that a row planned from now on may write."""
        return self.num_certain - 1 if self.is_decoding else self.num_planned

    def make_decode_row(self, num_draft: int) -> Row:
        """The row that computes the last token known, and `num_draft` drafts behind it."""
        num_query = 1 + num_draft
        self.decode_row = Row(self.id, self.epoch, self.slot, num_query, num_draft, num_query)
        return self.decode_row

    def next_chunk(self, budget: int) -> Row:
        """The next chunk of known tokens, at most `budget` of them."""
        start = self.num_planned
        end = min(self.prefill_len, start + budget)
        first_wanted = max(start, self.num_prompt_logprobs)
        num_logits = end - first_wanted if first_wanted < min(end, self.num_wanted_logprobs) else 0
        if end == self.prefill_len:
            num_logits = max(1, num_logits)  # the last one is sampled
        return Row(self.id, self.epoch, self.slot, end - start, 0, num_logits)

    def update(self, new: list[int]) -> SeqUpdate:
        """What the user is told of `new` tokens."""
        return SeqUpdate(
            self.request.id, new, None, None, None, None, self.num_cached_tokens, self.first_scheduled
        )

    def take_untold(self) -> list[int]:
        """The tokens of a quiet sequence that no update has brought; they count as brought from now on."""
        if not self.is_quiet:
            return []
        untold = self.tokens[self.num_told :].tolist()
        self.num_told = len(self.tokens)
        return untold

    def stop(self, update: SeqUpdate) -> None:
        """End the update's new tokens behind the first one that ends the text, if min_tokens lets it."""
        first = self.min_len - len(self.tokens) - 1  # index of the first token that may stop
        for i, token in enumerate(update.new_token_ids):
            if i >= first and token in self.stop_token_ids:
                is_eos = token in self.request.eos_token_ids and not self.request.sampling.ignore_eos
                update.new_token_ids = update.new_token_ids[: i + 1]
                update.finish_reason = FinishReason.STOP
                update.stop_reason = None if is_eos else token
                return
