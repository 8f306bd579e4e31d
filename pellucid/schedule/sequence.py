"""One request as the scheduler sees it.  It never leaves the host's process.

How far it has come while it is in a slot is counted in the columns of table.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pellucid.kv.hashes import Prefix
from pellucid.schedule.plan import HOST_BOUND, Ints
from pellucid.types import DraftCounts, FinishReason, Request, SeqUpdate

Key = tuple[int, float, int]  # the order of age: (priority, arrival, id)


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue
    HELD = "waiting for what a feature brings"
    RUNNING = "running"  # in a slot
    FINISHED = "finished"  # answered


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Made from a Request; counts are in tokens."""

    id: int
    request: Request
    key: Key
    limit: int  # most tokens, prompt included
    prefix: Prefix
    prompt_len: int
    tokens: Ints  # known when it was last out of a slot: the prompt, and what had been generated until then
    stop_token_ids: frozenset[int]
    status: Status = Status.WAITING
    slot: int = -1  # while it runs
    asked: int = 0  # bits of what it asks for: table.py
    ride: dict[str, object] = field(default_factory=dict[str, object])  # to its features in workers, by name
    # Positions of the prompt whose logits are wanted, too: from the first one that has not arrived, over all
    # stays, to the end of them.
    num_scored: int = 0
    scored_end: int = 0
    drafts: DraftCounts = DraftCounts()  # of stays that have ended
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    first_scheduled: float = 0.0  # seconds of time.monotonic; 0 is not yet
    num_reported: int = 0  # of a quiet one's tokens, the prompt and those that updates have brought

    @property
    def host_bound(self) -> bool:
        """Must the host see each token before the next one?  Then it has one row in flight at most."""
        return bool(self.asked & HOST_BOUND)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def min_len(self) -> int:
        """No stop token counts before there are this many tokens."""
        return self.prompt_len + self.request.sampling.min_tokens

    @property
    def max_cached(self) -> int:
        """Most tokens to take from the prefix cache; the next token and wanted logits need a forward."""
        return self.num_scored if self.num_scored < self.scored_end else len(self.tokens) - 1

    def num_logits(self, start: int, end: int, num_known: int) -> int:
        """Trailing positions of a chunk of known tokens whose logits are wanted."""
        first_wanted = max(start, self.num_scored)
        num_logits = end - first_wanted if first_wanted < min(end, self.scored_end) else 0
        return max(1, num_logits) if end == num_known else num_logits  # the last one is sampled

    def update(self, new: list[int]) -> SeqUpdate:
        """What the user is told of `new` tokens."""
        return SeqUpdate(
            self.request.id, new, None, None, None, None, self.num_cached_tokens, self.first_scheduled
        )

    def stop(self, update: SeqUpdate, num_before: int) -> None:
        """End the update's new tokens behind the first one that ends the text, if min_tokens lets it.

        num_before: tokens before the new ones.
        """
        first = self.min_len - num_before - 1  # index of the first token that may stop
        for i, token in enumerate(update.new_token_ids):
            if i >= first and token in self.stop_token_ids:
                is_eos = token in self.request.eos_token_ids and not self.request.sampling.ignore_eos
                update.new_token_ids = update.new_token_ids[: i + 1]
                update.finish_reason = FinishReason.STOP
                update.stop_reason = None if is_eos else token
                return
