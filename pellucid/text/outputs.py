"""The engine's updates to the outputs that users get, with text, n completions of a prompt in one output.

It also finds stop strings, which the engine cannot see, and tells which requests to abort for them.
Knows nothing about how tokens are made.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from pellucid.text.completion import Completion, logprob_dict
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    SeqUpdate,
)


class OutputKind(enum.Enum):
    """How much of a request each of its outputs shows."""

    CUMULATIVE = "cumulative"  # all n completions so far
    DELTA = "delta"  # what is new in the completion that changed
    FINAL_ONLY = "final only"  # one output, when all n completions are finished


@dataclass(frozen=True, slots=True)
class Parent:
    """Which completion of which user's request an engine's request is."""

    request_id: str
    index: int  # 0 .. n-1
    n: int


def fan_out(request: Request, request_id: str | None = None) -> list[tuple[Request, Parent]]:
    """One engine request for each of the n completions, with ids and seeds of their own.

    request_id: the user's, if the engine's is another.
    """
    n, request_id = request.sampling.n, request.id if request_id is None else request_id
    if n == 1:
        return [(request, Parent(request_id, 0, 1))]
    sampling = request.sampling.clone(n=1)
    return [
        (
            replace(request, id=f"{request.id}_{i}", seed=_wrap_int64(request.seed + i), sampling=sampling),
            Parent(request_id, i, n),
        )
        for i in range(n)
    ]


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def join_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Two DELTA outputs of a request as one: `newer`, with what `older` had before it.  Both are used up."""
    completions = {completion.index: completion for completion in older.outputs}
    for completion in newer.outputs:
        before = completions.get(completion.index)
        completions[completion.index] = completion if before is None else _join(before, completion)
    newer.outputs = list(completions.values())
    if newer.prompt_logprobs is not None:
        newer.prompt_logprobs = [*(older.prompt_logprobs or ()), *newer.prompt_logprobs]
    return newer


def _join(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    """As `join_deltas`."""
    newer.text = older.text + newer.text
    older.token_ids += newer.token_ids
    newer.token_ids = older.token_ids
    if older.logprobs is not None and newer.logprobs is not None:
        older.logprobs += newer.logprobs
        newer.logprobs = older.logprobs
    return newer


class Observer(Protocol):
    """Wants to know what becomes of each completion: of every request that the engine is given."""

    def begins(self, request: Request) -> None: ...

    def advances(self, update: SeqUpdate, finish_reason: FinishReason | None) -> None:
        """The engine has said something; finish_reason is set by stop strings, too, which it cannot see."""
        ...


class OutputProcessor:
    """Builds a RequestOutput from each SeqUpdate that shows the user something.

    tokenizer: None gives token ids alone.  clock: seconds, for the metrics.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.observers: list[Observer] = []
        self._tokenizer = tokenizer
        self._clock = clock
        self._answers: dict[str, _Answer] = {}  # by the user's request id
        self._running: dict[str, tuple[_Answer, Completion]] = {}  # by the engine's request id
        self._to_abort: list[str] = []

    def add(
        self,
        request: Request,
        *,
        prompt: str | None = None,
        parent: Parent | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> None:
        """Expect updates for `request`.

        prompt: its text, if known.  parent: from `fan_out`; None for a request of its own.
        Raises ValueError if a request of this id is running.
        """
        parent = parent or Parent(request.id, 0, 1)
        answer = self._answers.get(parent.request_id)
        if request.id in self._running or (answer is not None and parent.index in answer.completions):
            raise ValueError(f"request id {parent.request_id!r} is already running; choose another")
        completion = Completion(request, parent.index, self._tokenizer)
        if answer is None:
            answer = _Answer(request, parent, prompt, kind, self._tokenizer)
            self._answers[parent.request_id] = answer
        answer.completions[parent.index] = completion
        answer.running[request.id] = None
        self._running[request.id] = (answer, completion)
        for observer in self.observers:
            observer.begins(request)

    def update(self, update: SeqUpdate) -> RequestOutput | None:
        """Take in what one step changed; None if there is nothing to show.

        Updates of unknown requests are ignored: the engine may be a step ahead of a stop string or an abort.
        """
        running = self._running.get(update.request_id)
        if running is None:
            return None
        answer, completion = running
        completion.extend(update)
        for observer in self.observers:
            observer.advances(update, completion.finish_reason)
        if answer.is_quiet and completion.finish_reason is None:
            return None
        if completion.finish_reason is not None:
            del self._running[update.request_id], answer.running[update.request_id]
            if update.finish_reason is None:
                assert completion.matched_stop, update
                self._to_abort.append(update.request_id)
        answer.note(update, completion, self._clock())
        if answer.finished:
            del self._answers[answer.request_id]
        return answer.output(
            completion, has_news=bool(update.new_token_ids) or update.finish_reason is not None
        )

    def take_aborts(self) -> list[str]:
        """Engine requests that a stop string ended since the last call; the engine must abort them."""
        taken, self._to_abort = self._to_abort, []
        return taken

    def engine_ids(self, request_id: str) -> list[str]:
        """The engine's ids of a user's unfinished request; empty if there is none."""
        answer = self._answers.get(request_id)
        return [] if answer is None else list(answer.running)

    def fail_all(self, error: str) -> list[RequestOutput]:
        """End every request with an error, when the engine has died."""
        ends = [SeqUpdate(i, finish_reason=FinishReason.ERROR, error=error) for i in list(self._running)]
        return [output for end in ends if (output := self.update(end)) is not None]

    def is_running(self, request_id: str) -> bool:
        """Has a user's request of this id not got its last output?"""
        return request_id in self._answers

    @property
    def num_completions(self) -> int:
        """Completions that have not ended."""
        return len(self._running)

    @property
    def num_requests(self) -> int:
        """Users' requests that have not got their last output."""
        return len(self._answers)


class _Answer:
    """All completions of one user's request, and what they have in common."""

    def __init__(
        self,
        request: Request,
        parent: Parent,
        prompt: str | None,
        kind: OutputKind,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = parent.request_id
        self.completions: dict[int, Completion] = {}
        self.running: dict[str, None] = {}  # the engine's ids of those that have not ended, in order
        self._n = parent.n
        self._num_finished = 0
        self.is_quiet = False  # tokens alone change nothing of it any more
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids
        self._kind = kind
        self._tokenizer = tokenizer if request.sampling.detokenize else None
        self._metrics = RequestMetrics(arrival_time=request.arrival)
        self._num_top = request.sampling.prompt_logprobs
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [
            None
        ]  # nothing comes before the first token
        self._num_prompt_logprobs_out = 0
        self._num_cached_tokens = 0
        self._error: str | None = None

    @property
    def finished(self) -> bool:
        return self._num_finished == self._n

    def note(self, update: SeqUpdate, completion: Completion, now: float) -> None:
        """Keep what an update says about the request as a whole."""
        self._num_finished += completion.finish_reason is not None
        self._error = update.error or self._error
        if completion.index == 0:  # the others find its prompt in the cache, which says nothing
            self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
            self._add_prompt_logprobs(update)
        if self._metrics.first_scheduled_time is None and update.first_scheduled:
            self._metrics = replace(self._metrics, first_scheduled_time=update.first_scheduled)
        if self._metrics.first_token_time is None and update.new_token_ids:
            self._metrics = replace(self._metrics, first_token_time=now)
            self.is_quiet = self._kind is OutputKind.FINAL_ONLY and self._n == 1 and self._num_top is None
        if update.drafts is not None:
            self._metrics = replace(self._metrics, drafts=self._metrics.drafts.plus(update.drafts))
        if self.finished:
            self._metrics = replace(self._metrics, finished_time=now)

    def output(self, changed: Completion, *, has_news: bool) -> RequestOutput | None:
        """What the user is shown after `changed` has changed."""
        if not (self.finished if self._kind is OutputKind.FINAL_ONLY else has_news):
            return None
        if self._kind is OutputKind.DELTA:
            completions = [changed.delta()]
        else:
            completions = [self.completions[i].snapshot() for i in sorted(self.completions)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            prompt_logprobs=self._take_prompt_logprobs(),
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics,
            error=self._error,
        )

    def _add_prompt_logprobs(self, update: SeqUpdate) -> None:
        if self._num_top is None or update.prompt_logprobs is None:
            return
        for entry in update.prompt_logprobs:
            self._prompt_logprobs.append(logprob_dict(entry, self._num_top, self._tokenizer))

    def _take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """All of them, or in deltas those not yet shown."""
        if self._num_top is None:
            return None
        first = self._num_prompt_logprobs_out
        if self._kind is OutputKind.DELTA:
            self._num_prompt_logprobs_out = len(self._prompt_logprobs)
        return self._prompt_logprobs[first:]
