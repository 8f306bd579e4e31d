"""What all routes share: the engine, the options, the names of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import HTTPConnection

from pellucid.async_llm import AsyncLLM, Mailbox
from pellucid.lora.request import LoRARequest
from pellucid.sampling_params import SamplingParams
from pellucid.server.errors import ApiError, overloaded, unknown_model, users_fault
from pellucid.server.metrics import Metrics
from pellucid.server.options import ServeOptions
from pellucid.server.parsers.compose import Parsers
from pellucid.server.preprocess import Preprocessor
from pellucid.server.stored_responses import StoredResponses
from pellucid.server.tracing import Tracer
from pellucid.text.outputs import OutputKind
from pellucid.text.prompts import TokenPrompt


@dataclass(slots=True, kw_only=True)
class Server:
    """One served model."""

    llm: AsyncLLM
    options: ServeOptions
    metrics: Metrics
    preprocessor: Preprocessor
    names: tuple[str, ...]  # of the model; answers carry the first
    responses: StoredResponses
    adapters: dict[str, LoRARequest] = field(default_factory=dict[str, LoRARequest])  # by name
    parsers: Parsers = field(default_factory=Parsers)
    thoughts_end: int | None = None  # the token that ends what the model thinks, if one does
    created: int = field(default_factory=lambda: int(time.time()))
    tracer: Tracer | None = None
    is_paused: bool = False  # the engine stands still
    is_draining: bool = False  # takes nothing new
    falls_asleep: bool = False  # as soon as what runs has ended
    num_requests: int = 0  # under way

    def submit(
        self,
        prompts: Sequence[TokenPrompt],
        sampling: SamplingParams,
        *,
        priority: int | None,
        is_streamed: bool,
        grammar: str | None = None,
        model: str | None = None,
        kv_transfer: str | None = None,
    ) -> Mailbox:
        """Hand prompts to the engine.

        grammar: what `check_wish` has returned.  kv_transfer: what `kv_wish` has.  model: one of its names
        or an adapter's.  Raises a 400 for what it cannot serve, a 404 for another model, a 503 if it cannot
        now.
        """
        lora = self.adapter(model)
        with users_fault(sampling.__dict__):
            if sampling.logprobs is not None and not self.llm.has_tokenizer:
                raise ValueError("logprobs are shown with text, but this server has no tokenizer")
        self.check_room(len(prompts) * sampling.n)
        for _ in prompts:
            self.metrics.accepted(sampling.n)
        kind = OutputKind.DELTA if is_streamed else OutputKind.FINAL_ONLY
        with users_fault({**sampling.__dict__, "priority": priority}):
            return self.llm.open(
                prompts,
                sampling,
                priority=priority or 0,
                kind=kind,
                grammar=grammar,
                lora=lora,
                kv_transfer=kv_transfer,
            )

    def adapter(self, model: str | None) -> str | None:
        """What the engine takes as the adapter of this name; None: it is the model's."""
        if model is None or model in self.names:
            return None
        if model not in self.adapters:
            raise unknown_model(model)
        with users_fault({"model": None}):
            return self.llm.adapter(self.adapters[model])

    def check_room(self, num_new: int) -> None:
        """Raise a 503 if the engine is gone, or too many completions wait for it."""
        most, waiting = self.options.max_waiting, self.llm.num_waiting
        at_once = most + self.llm.resolved.max_num_seqs * len(self.llm.stats_per_engine)
        if num_new > at_once:
            raise ApiError(
                400, f"the request asks for {num_new:,} completions, at most {at_once:,} are taken"
            )
        if self.llm.error is not None:
            raise overloaded(self.llm.error)
        if self.llm.is_sleeping or self.falls_asleep:
            raise overloaded("the engine is asleep; POST /wake_up, and try again when it answers")
        if waiting and waiting + num_new > most:
            raise overloaded(f"{waiting} completions wait for the engine, max_waiting is {most}; try again")


CLIENT = "pellucid.client"  # in a request's scope, as the guard has found it


def client_of(connection: HTTPConnection) -> str:
    """Who asks: an address and which of the server's keys it has brought; nobody can feign to be another."""
    return connection.scope[CLIENT]


def server_of(connection: HTTPConnection) -> Server:
    """The server that a route serves."""
    return cast(Server, connection.app.state.server)
