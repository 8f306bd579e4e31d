"""Log-probabilities as updates bring them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pellucid.features.base import HostFeature, RowKind
from pellucid.schedule.news import News
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.sequence import Sequence
from pellucid.types import Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Entries:
    """By row of the plan, one for each position; the first of an entry's tokens is the one that is there."""

    rows: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])


class Logprobs(HostFeature):
    """Of the tokens that are sampled."""

    rows = RowKind.SAMPLING
    is_watched = True

    def asks(self, request: Request) -> bool:
        return request.sampling.logprobs is not None

    def land(self, told: Entries, news: News, scheduler: Scheduler) -> None:
        for index, entries in told.rows.items():
            if landed := news.landed.get(index):
                landed.update.logprobs = entries[: landed.num_new]


class PromptLogprobs(HostFeature):
    """Of each token of the prompt but the first, as its chunks come home."""

    rows = RowKind.PROMPT
    is_watched = True

    def asks(self, request: Request) -> bool:
        return request.sampling.prompt_logprobs is not None

    def enter(self, seq: Sequence) -> None:
        seq.scored_end = seq.prompt_len - 1
        if seq.request.prior_token_ids:  # they were told before the first token
            seq.num_scored = seq.scored_end

    def land(self, told: Entries, news: News, scheduler: Scheduler) -> None:
        for index, entries in told.rows.items():
            if landed := news.landed.get(index):
                # A chunk asks for what has not arrived, and chunks come home in order: none comes twice.
                landed.update.prompt_logprobs = entries
                landed.seq.num_scored += len(entries)
