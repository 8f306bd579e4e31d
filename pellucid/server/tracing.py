"""A span for each completion, sent to a collector by OTLP: with vLLM's name and attributes.

Its parent is the caller's, by the headers `traceparent` and `tracestate`.  Needs the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pellucid.server.lives import Life

HEADERS = ("traceparent", "tracestate")
SPAN = "llm_request"


class Tracer:
    """Tells an exporter of lives.  endpoint: of a collector, http://HOST:4318/v1/traces.

    Raises ValueError where OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        """exporter: OpenTelemetry's, if not one to that endpoint."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                "otlp_traces_endpoint needs OpenTelemetry: pip install 'pellucid[otel]'"
            ) from error
        self._model, self._kind = model, trace.SpanKind.SERVER
        self._extract = TraceContextTextMapPropagator().extract
        self._provider = TracerProvider(resource=Resource.create({"service.name": "pellucid"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("pellucid")
        self._offset = time.time() - time.monotonic()

    def tell(self, life: Life) -> None:
        carrier = {name: life.caller[name] for name in HEADERS if name in life.caller}
        span = self._tracer.start_span(
            SPAN,
            context=self._extract(carrier) if carrier else None,
            kind=self._kind,
            start_time=self._nanoseconds(life.request.arrival),
            attributes=dict(self._attributes(life)),
        )
        span.end(self._nanoseconds(life.end))

    def shutdown(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()

    def _attributes(self, life: Life) -> Iterator[tuple[str, Any]]:
        request, sampling = life.request, life.request.sampling
        yield "gen_ai.response.model", self._model
        yield "gen_ai.request.id", request.id
        yield "gen_ai.request.n", sampling.n
        yield "gen_ai.request.temperature", sampling.temperature
        yield "gen_ai.request.top_p", sampling.top_p
        if sampling.max_tokens is not None:
            yield "gen_ai.request.max_tokens", sampling.max_tokens
        yield "gen_ai.usage.prompt_tokens", life.num_prompt_tokens
        yield "gen_ai.usage.completion_tokens", life.num_tokens
        yield "gen_ai.response.finish_reason", life.finish_reason.value if life.finish_reason else ""
        yield "gen_ai.latency.e2e", life.end - request.arrival
        if life.num_tokens:
            yield "gen_ai.latency.time_in_queue", life.first_scheduled - request.arrival
            yield "gen_ai.latency.time_to_first_token", life.first_token - request.arrival
            yield "gen_ai.latency.time_in_model_prefill", life.first_token - life.first_scheduled
            yield "gen_ai.latency.time_in_model_decode", life.end - life.first_token
            yield "gen_ai.latency.time_in_model_inference", life.end - life.first_scheduled

    def _nanoseconds(self, seconds: float) -> int:
        """Since 1970."""
        return int((seconds + self._offset) * 1e9)
