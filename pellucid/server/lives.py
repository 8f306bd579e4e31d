"""The life of each completion, told when it has ended: to a log, and to who traces requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from pellucid.types import FinishReason, Request, SeqUpdate

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # whoever asks for these lines has them without --verbose
NO_ONE: Mapping[str, str] = {}
# Of the HTTP request that is being answered: who asks, and the headers that traces travel in.
CALLER: ContextVar[Mapping[str, str]] = ContextVar("caller", default=NO_ONE)


@dataclass(slots=True)
class Life:
    """A completion.  Seconds of time.monotonic; 0 for what has not happened."""

    request: Request
    caller: Mapping[str, str]
    num_tokens: int = 0
    num_cached_tokens: int = 0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    end: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class Teller(Protocol):
    """Is told of each completion that has ended."""

    def tell(self, life: Life) -> None: ...


class Lives:
    """An observer of all completions.  clock: seconds."""

    def __init__(self, tellers: Sequence[Teller], clock: Callable[[], float] = time.monotonic) -> None:
        self._tellers, self._clock = tellers, clock
        self._lives: dict[str, Life] = {}

    def begins(self, request: Request) -> None:
        self._lives[request.id] = Life(request, CALLER.get())

    def advances(self, update: SeqUpdate, finish_reason: FinishReason | None) -> None:
        life = self._lives[update.request_id]
        if update.new_token_ids:
            if not life.num_tokens:
                life.first_token = self._clock()
                life.first_scheduled = update.first_scheduled
                life.num_cached_tokens = update.num_cached_tokens
            life.num_tokens += len(update.new_token_ids)
        if finish_reason is None:
            return
        del self._lives[update.request_id]
        life.end, life.finish_reason, life.error = self._clock(), finish_reason, update.error
        for teller in self._tellers:
            teller.tell(life)


@dataclass(slots=True)
class RequestLog:
    """One line for each completion.  decode: shows the beginning of prompts, too."""

    decode: Callable[[Sequence[int]], str] | None = None
    most_tokens: int = 200
    write: Callable[[str], None] = field(default=logger.info)

    def tell(self, life: Life) -> None:
        request, reason = life.request, life.finish_reason
        assert reason is not None, "it has ended"
        parts = [
            f"request {request.id}",
            f"of {life.caller.get('client') or 'nobody'}",
            f"{life.num_prompt_tokens} prompt tokens ({life.num_cached_tokens} cached)",
            f"{life.num_tokens} generated",
            f"ended by {reason.value}{f' ({life.error})' if life.error else ''}",
        ]
        if life.num_tokens:
            parts += [
                f"queue {life.first_scheduled - request.arrival:.3f} s",
                f"first token {life.first_token - request.arrival:.3f} s",
            ]
        parts.append(f"all {life.end - request.arrival:.3f} s")
        if self.decode is not None:
            parts.append(f"prompt {self.decode(request.prompt_token_ids[: self.most_tokens])!r}")
        self.write("; ".join(parts))
