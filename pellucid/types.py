"""What goes into the engine and what comes back.

Plain data without torch: a `Request` with its `SamplingParams` (sampling_params.py) goes in, `SeqUpdate`
comes out as token ids, `RequestOutput` is what the user gets, with text.  Knows no blocks, slots or steps.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pellucid.sampling_params import SamplingParams

# The error of a request that contradicts itself, which shows when its tokens are chosen.
STUCK = (
    "no token is left that may come next: allowed_token_ids, bad_words, min_tokens and the grammar, as far "
    "as the request has them, together rule out all; loosen one of them"
)


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words; `ERROR` carries a message in `SeqUpdate.error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to generate, validated by whoever made it and trusted from here on.

    `arrival` is in seconds of `time.monotonic`.  `lora`, `cache_salt` key the prefix cache.
    """

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    prior_token_ids: list[int] = field(default_factory=list[int])  # of its answer, sampled elsewhere
    seed: int = 0  # of the noise; already drawn if the user gave none
    eos_token_ids: tuple[int, ...] = ()  # the model's; they end the text unless sampling.ignore_eos
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    lora: str | None = None  # an adapter: `AdapterRef.encode` of lora/request.py
    cache_salt: str | None = None
    grammar: str | None = None  # from sampling.structured_outputs; see sample/grammars/base.py
    is_quiet: bool = False  # nobody looks before the end: one update for the first tokens, one for the rest
    is_streamed: bool = False  # its user sees tokens as they come, so prompts beside it are paced
    priority: int = 0  # lower runs first, under the priority policy
    arrival: float = 0.0
    kv_transfer: str | None = None  # where its KV is, or who wants it: connectors/peer/params.py

    @property
    def num_known(self) -> int:
        """Tokens that it comes with."""
        return len(self.prompt_token_ids) + len(self.prior_token_ids)

    @property
    def cache_key(self) -> tuple[str | None, str | None]:
        """Requests share cached prefixes only if theirs are the same: of an adapter, what it holds."""
        adapter = None if self.lora is None else self.lora.partition(" ")[0]
        return adapter, self.cache_salt

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every id that ends the text (and that min_tokens holds back)."""
        eos: Iterable[int] = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset(eos) | frozenset(self.sampling.stop_token_ids or ())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from raw logits: the chosen token first, then the most likely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token; 1 is the most likely


class DraftCounts(NamedTuple):
    """What has been drafted for a request."""

    num_drafts: int = 0  # its verifications
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Of the draft tokens."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def tokens_a_verification(self) -> float:
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(slots=True)
class SeqUpdate:
    """What one step changed for one request; the engine's answer, without text."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions 1.., as chunks finish
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string; None for the model's own eos
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; told with the first token, as is
    first_scheduled: float = 0.0  # seconds of time.monotonic; both may be 0 in later updates
    error: str | None = None
    num_steps: int = 1  # that it tells of, those of `extend` included
    extras: dict[str, Any] | None = None  # features' own, by name: plain data; newer ones replace older ones
    drafts: DraftCounts | None = None  # of the whole request; told with its end, if it had any

    @property
    def says_anything(self) -> bool:
        return bool(self.new_token_ids or self.finish_reason or self.prompt_logprobs or self.extras)

    def extend(self, newer: SeqUpdate) -> None:
        """Say what a later update of the same request says, too.  Neither is an error."""
        self.new_token_ids += newer.new_token_ids
        if newer.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *newer.logprobs]
        if newer.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *newer.prompt_logprobs]
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, newer.num_cached_tokens)
        self.first_scheduled = self.first_scheduled or newer.first_scheduled
        self.num_steps += newer.num_steps
        self.drafts = newer.drafts or self.drafts
        if newer.extras is not None:
            self.extras = {**(self.extras or {}), **newer.extras}


@dataclass(frozen=True, slots=True)
class Logprob:
    """vLLM's: the log-probability of a token, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    extras: dict[str, Any] | None = None  # what features have added, by name

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds of `time.monotonic` at which a request reached each point of its life; and its drafts."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    drafts: DraftCounts = DraftCounts()  # of its completions that the engine has ended, not a stop string


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt; also answers `output["text"]` and `output["token_ids"]` (of completion 0)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None

    def __getitem__(self, key: str) -> str | list[int]:
        if key == "text":
            return self.outputs[0].text
        if key == "token_ids":
            return self.outputs[0].token_ids
        raise KeyError(
            f"{key!r}: a RequestOutput answers ['text'] and ['token_ids']; its fields are attributes"
        )
