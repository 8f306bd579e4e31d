"""What a server tells of its requests: spans, lines in a log, statistics, counts of answers."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from pellucid.observe.statistics import EngineStats
from pellucid.server.http_metrics import HttpMetrics
from pellucid.server.lives import CALLER, Life, Lives, RequestLog
from pellucid.server.options import ServeOptions
from pellucid.server.statistics_log import lines
from pellucid.server.tracing import Tracer
from pellucid.sleep.state import AWAKE
from pellucid.types import FinishReason, SeqUpdate
from tests.forked import Nursery
from tests.patience import PATIENCE, eventually
from tests.schedule.device import make_request
from tests.server.conftest import Running, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def lived(caller: dict[str, str], *tellers: Any) -> Life:
    """One completion's life, of three tokens."""
    told: list[Life] = []
    now = [10.0]
    listener: Any = SimpleNamespace(tell=told.append)
    lives = Lives([listener, *tellers], clock=lambda: now[0])
    token = CALLER.set(caller)
    lives.begins(make_request("a", 5, arrival=9.0))
    CALLER.reset(token)
    now[0] = 10.5
    lives.advances(SeqUpdate("a", [1], first_scheduled=10.0, num_cached_tokens=4), None)
    now[0] = 12.0
    lives.advances(SeqUpdate("a", [2, 3], finish_reason=FinishReason.STOP), FinishReason.STOP)
    return told[0]


def test_a_life_has_its_times() -> None:
    life = lived({"client": "me"})
    assert (life.num_prompt_tokens, life.num_tokens, life.num_cached_tokens) == (5, 3, 4)
    assert (life.first_scheduled, life.first_token, life.end) == (10.0, 10.5, 12.0)


def test_a_line_tells_of_a_request_and_of_its_prompt_only_if_asked() -> None:
    said: list[str] = []
    lived({"client": "me"}, RequestLog(write=said.append), RequestLog(lambda ids: "Hi", write=said.append))
    assert said[0] == (
        "request a; of me; 5 prompt tokens (4 cached); 3 generated; ended by stop; queue 1.000 s; "
        "first token 1.500 s; all 3.000 s"
    )
    assert said[1] == said[0] + "; prompt 'Hi'"


def test_a_span_is_vllms_and_its_parent_the_callers() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer("", "m", exporter)
    lived({"traceparent": PARENT, "client": "me"}, tracer)
    tracer.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request" and span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE == f"{span.parent.trace_id:032x}"
    facts = dict(span.attributes or {})
    assert facts["gen_ai.usage.prompt_tokens"] == 5 and facts["gen_ai.usage.completion_tokens"] == 3
    assert facts["gen_ai.latency.time_to_first_token"] == 1.5 and facts["gen_ai.latency.e2e"] == 3.0
    assert facts["gen_ai.response.model"] == "m"
    parts = ("queue", "model_prefill", "model_decode", "model_inference")
    assert [facts[f"gen_ai.latency.time_in_{part}"] for part in parts] == [1.0, 0.5, 1.5, 2.0]
    assert span.end_time is not None and span.start_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(3.0)
    since = time.monotonic() - 9.0  # when the request came
    assert span.start_time / 1e9 == pytest.approx(time.time() - since, abs=5.0)


@pytest.fixture
def collector() -> Generator[tuple[str, list[bytes]], None, None]:
    """Where spans are sent: its address, and what has come."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()


def test_a_server_sends_spans_and_writes_lines(
    collector: tuple[str, list[bytes]], capfd: pytest.CaptureFixture[str], nursery: Nursery
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    endpoint, bodies = collector
    options = ["--otlp-traces-endpoint", endpoint, "--enable-log-requests", "--log-stats-interval", "0.2"]
    with running("--verbose", *options, forks=nursery) as server:
        body = {"prompt": "Once upon a secret", "max_tokens": 40, "ignore_eos": True}
        reply = httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"traceparent": PARENT}, timeout=PATIENCE
        )
        assert reply.status_code == 200
        said = [""]

        def says(*words: str) -> bool:
            said[0] += capfd.readouterr().err
            return all(word in said[0] for word in words)

        eventually(lambda: says("Avg generation throughput", "40 generated; ended by length; queue"))
    assert says("; of 127.0.0.1; ") and not says("secret"), "no prompt that nobody asked for"
    (sent,) = bodies
    assert bytes.fromhex(TRACE) in sent and b"llm_request" in sent


def test_prompts_are_shown_only_with_their_requests() -> None:
    with pytest.raises(ValueError, match="log_prompts needs enable_log_requests"):
        ServeOptions(log_prompts=True)


def stats(**changes: Any) -> EngineStats:
    none = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    empty: Any = {**none, "num_accepted_per_position": (), "num_steps_by_tokens": (), "is_synthetic": False}
    empty |= {"sleep": AWAKE, "of_features": {}}
    return EngineStats(**{**empty, **changes})


def test_statistics_are_vllms_lines() -> None:
    before = stats(num_steps=1, num_accepted_per_position=(1, 0, 0))
    after = replace(
        before, num_accepted_per_position=(10, 4, 2), num_steps=9,
        num_prompt_tokens=100, num_cached_tokens=25, num_sampled_tokens=50,
        num_running=2, num_waiting=1, kv_usage=0.5,
        num_drafts=10, num_draft_tokens=30, num_accepted_tokens=15, num_verifying_steps=6,
        draft_seconds_saved=1.25, proposer="eagle3",
    )  # fmt: skip
    engine, drafts = lines([before], [after], 10.0)
    assert engine == (
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 2 reqs, Waiting: 1 reqs, GPU KV cache usage: 50.0%, Prefix cache hit rate: 25.0%"
    )
    assert drafts == (
        "SpecDecoding metrics: Drafts by: eagle3, Mean acceptance length: 2.50, Accepted: 15 tokens, "
        "Drafted: 30 tokens, Avg Draft acceptance rate: 50.0%, "
        "Per-position acceptance rate: 0.900, 0.400, 0.200, "
        "Steps with drafts: 75.0%, of 3.00 a request, Saved: 1.25 s"
    )
    assert lines([before], [before], 10.0) == [], "nothing to tell"


def test_answers_are_counted_by_route_and_status(server: Running) -> None:
    def count(handler: str, status: int) -> float:
        return server.metric("http_requests_total", handler=handler, status=str(status))

    httpx.get(f"{server.url}/v1/models")
    before = count("/v1/models", 200)
    httpx.get(f"{server.url}/v1/models/")
    assert count("/v1/models", 200) == before + 1
    httpx.post(f"{server.url}/v1/completions", json={})
    assert count("/v1/completions", 400) >= 1
    httpx.get(f"{server.url}/v1/responses/resp_1")
    assert count("/v1/responses/{id}", 404) >= 1
    httpx.get(f"{server.url}/wp-login.php")
    assert count("none", 404) >= 1
    assert server.metric("http_request_duration_seconds_count", handler="/v1/models") >= before + 1


@pytest.mark.parametrize("status", [200, None])
def test_an_answer_that_never_began_has_a_status_of_its_own(status: int | None) -> None:
    told: list[tuple[str, str, int, float]] = []
    metrics: Any = SimpleNamespace(answered=lambda *said: told.append(said))
    nothing: Any = None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.01)
        if status is None:
            raise ConnectionError("the client has gone")
        await send({"type": "http.response.start", "status": status})

    async def send(message: Message) -> None:
        pass

    async def run() -> None:
        with suppress(ConnectionError):
            scope = {"type": "http", "method": "GET", "path": "/a", "root_path": ""}
            await HttpMetrics(app, metrics, ["/a"])(scope, nothing, send)

    asyncio.run(run())
    ((method, route, found, seconds),) = told
    assert (method, route, found) == ("GET", "/a", status or 499) and seconds >= 0.01


def test_routes_are_named_as_they_are_written() -> None:
    nothing: Any = None
    names = HttpMetrics(nothing, nothing, ["/a", "/a/{id}", "/a/{id}/b", "/m/{name:path}"])
    paths = ["/a", "/a/", "/a/1", "/a/1/b", "/a/1/c", "/m/x/y", "/z"]
    assert [names._handler(path) for path in paths] == [
        *("/a", "/a", "/a/{id}", "/a/{id}/b", "none", "/m/{name:path}", "none")
    ]
