"""/metrics: Prometheus, with vLLM's names, types and labels.

What the engine counts is read when somebody asks; what happens to each completion is noted as it happens, in
plain lists, since that is once for every token of every stream.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pellucid.async_llm import AsyncLLM
from pellucid.observe.statistics import STEP_TOKENS, EngineStats
from pellucid.sleep.state import STATES
from pellucid.types import FinishReason, Request, SeqUpdate

# Seconds.
FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, .. up to `most`."""
    bounds = [float(digit * 10**power) for power in range(12) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= most)


class Histogram:
    """How often values were at most each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """What somebody else has counted: values up to each bound, and larger ones."""
        histogram = cls(bounds)
        histogram.sum, histogram._counts = total, list(counts)
        return histogram

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, values up to it), as Prometheus wants them."""
        total, result = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result


@dataclass(slots=True)
class _Family:
    """The completions of one prompt."""

    num_under_way: int = 0
    most_tokens: int = 0  # of those that have ended


@dataclass(slots=True)
class _Life:
    """A completion under way.  Seconds of time.monotonic."""

    num_prompt_tokens: int
    arrival: float
    is_quiet: bool  # after its first tokens all others come at once
    num_tokens: int = 0
    num_cached: int = 0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class Metrics:
    """An observer of all completions, and a collector for Prometheus."""

    def __init__(
        self, llm: AsyncLLM, model_name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._llm, self._model_name, self._clock = llm, model_name, clock
        tokens = token_bounds(llm.max_model_len)
        self._first_token = Histogram(FIRST_TOKEN)
        self._inter_token = Histogram(PER_TOKEN)
        self._per_token = Histogram(PER_TOKEN)
        self._whole = Histogram(WHOLE)
        self._queue = Histogram(WHOLE)
        self._inference = Histogram(WHOLE)
        self._prefill = Histogram(WHOLE)
        self._decode = Histogram(WHOLE)
        self._num_prompt = Histogram(tokens)
        self._num_computed = Histogram(tokens)
        self._num_generated = Histogram(tokens)
        self._most_generated = Histogram(tokens)
        self._max_tokens = Histogram(tokens)
        self._n = Histogram(CHOICES)
        self._num_ended = dict.fromkeys(FinishReason, 0)
        self._num_parsed = dict.fromkeys(((True, True), (True, False), (False, True), (False, False)), 0)
        self._answered: dict[tuple[str, str, int], int] = {}  # by method, route and status
        self._durations: dict[tuple[str, str], Histogram] = {}  # by method and route
        self._lives: dict[str, _Life] = {}
        self._families: dict[str, _Family] = {}  # by what the ids of their requests begin with
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        llm.watch(self)

    def text(self) -> bytes:
        """What /metrics answers."""
        return generate_latest(self._registry)

    # The observer

    def begins(self, request: Request) -> None:
        self._lives[request.id] = _Life(len(request.prompt_token_ids), request.arrival, request.is_quiet)
        self._families.setdefault(_family_of(request.id), _Family()).num_under_way += 1
        if request.sampling.max_tokens is not None:
            self._max_tokens.observe(request.sampling.max_tokens)

    def accepted(self, n: int) -> None:
        """A prompt with n completions has come in."""
        self._n.observe(n)

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """A request over HTTP has had its answer, all of it."""
        key = (method, handler, status)
        self._answered[key] = self._answered.get(key, 0) + 1
        self._durations.setdefault((method, handler), Histogram(WHOLE)).observe(seconds)

    def parsed(self, has_calls: bool, *, is_streamed: bool) -> None:
        """A tool parser has looked at a whole answer, or at what is new of a stream."""
        self._num_parsed[is_streamed, has_calls] += 1

    def advances(self, update: SeqUpdate, finish_reason: FinishReason | None) -> None:
        life = self._lives[update.request_id]
        if update.new_token_ids:
            self._note_tokens(life, update)
        if finish_reason is not None:
            del self._lives[update.request_id]
            self._note_end(life, finish_reason)
            self._note_family(_family_of(update.request_id), life.num_tokens)

    def _note_tokens(self, life: _Life, update: SeqUpdate) -> None:
        now = self._clock()
        if life.num_tokens:
            # Of a quiet request the steps between are not known one by one, but their mean is.
            num_steps = len(update.new_token_ids) if life.is_quiet else update.num_steps
            self._inter_token.observe((now - life.last_token) / num_steps, num_steps)
        else:
            self._first_token.observe(now - life.arrival)
            life.first_token = now
            life.first_scheduled, life.num_cached = update.first_scheduled, update.num_cached_tokens
        life.last_token = now
        life.num_tokens += len(update.new_token_ids)

    def _note_end(self, life: _Life, reason: FinishReason) -> None:
        now = self._clock()
        self._num_ended[reason] += 1
        self._whole.observe(now - life.arrival)
        self._num_prompt.observe(life.num_prompt_tokens)
        self._num_generated.observe(life.num_tokens)
        if not life.num_tokens:
            return
        self._num_computed.observe(life.num_prompt_tokens - life.num_cached)
        self._queue.observe(life.first_scheduled - life.arrival)
        self._prefill.observe(life.first_token - life.first_scheduled)
        self._inference.observe(life.last_token - life.first_scheduled)
        self._decode.observe(life.last_token - life.first_token)
        if life.num_tokens > 1:
            self._per_token.observe((life.last_token - life.first_token) / (life.num_tokens - 1))

    def _note_family(self, name: str, num_tokens: int) -> None:
        family = self._families[name]
        family.num_under_way -= 1
        family.most_tokens = max(family.most_tokens, num_tokens)
        if not family.num_under_way:
            del self._families[name]
            self._most_generated.observe(family.most_tokens)

    # The collector

    def collect(self) -> Iterator[Metric]:
        """Every metric; Prometheus' client calls this."""
        engines = self._llm.stats_per_engine
        yield from self._gauges(engines)
        yield from self._counters(engines)
        yield from self._histograms()
        yield from self._http()
        yield self._steps(engines)
        yield self._cache_config(len(engines))
        yield self._proposer(len(engines))

    def _labels(self, engine: int) -> list[str]:
        return [self._model_name, str(engine)]

    def _gauges(self, engines: Sequence[EngineStats]) -> Iterator[Metric]:
        for name, text, read in GAUGES:
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for index, stats in enumerate(engines):
                family.add_metric(self._labels(index), read(stats))
            yield family
        family = GaugeMetricFamily(
            "pellucid:spec_decode_saved_seconds", "What drafts have saved, or cost.", labels=LABELS
        )
        for index, stats in enumerate(engines):
            family.add_metric(self._labels(index), stats.draft_seconds_saved)
        yield family
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 at the state in which it is.", labels=[*LABELS, "sleep_state"]
        )
        for index, stats in enumerate(engines):
            for level, state in enumerate(STATES):
                family.add_metric([*self._labels(index), state], stats.sleep.level == level)
        yield family

    def _counters(self, engines: Sequence[EngineStats]) -> Iterator[Metric]:
        for name, text, read in COUNTERS:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for index, stats in enumerate(engines):
                family.add_metric(self._labels(index), read(stats))
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts, by their place.",
            labels=[*LABELS, "position"],
        )
        for index, stats in enumerate(engines):
            for position, count in enumerate(stats.num_accepted_per_position):
                family.add_metric([*self._labels(index), str(position)], count)
        yield family
        family = CounterMetricFamily(
            "pellucid:spec_decode_num_steps",
            "Steps, by whether drafts were verified.",
            labels=[*LABELS, "state"],
        )
        for index, stats in enumerate(engines):
            num_off = stats.num_steps - stats.num_verifying_steps
            for state, num in (("on", stats.num_verifying_steps), ("off", num_off)):
                family.add_metric([*self._labels(index), state], num)
        yield family
        for name in sorted({name for stats in engines for name in stats.of_features}):
            kind = GaugeMetricFamily if name.endswith("_now") else CounterMetricFamily
            text = f"{name[0].upper()}{name[1:]}, of a feature.".replace("_", " ")
            family = kind(f"pellucid:{name}", text, labels=LABELS)
            for index, stats in enumerate(engines):
                family.add_metric(self._labels(index), stats.of_features.get(name, 0))
            yield family
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Tokens of prompts.", labels=[*LABELS, "source"]
        )
        for index, stats in enumerate(engines):
            num_computed = stats.num_prompt_tokens - stats.num_cached_tokens
            family.add_metric([*self._labels(index), "local_compute"], num_computed)
            family.add_metric([*self._labels(index), "local_cache_hit"], stats.num_cached_tokens)
        yield family
        family = CounterMetricFamily(
            "vllm:tool_call_parser_invocations",
            "Answers, or pieces of streams, in which tool calls were looked for.",
            labels=["model_name", "mode", "outcome", "request_type"],
        )
        for (is_streamed, has_calls), count in self._num_parsed.items():
            mode = "streaming" if is_streamed else "non_streaming"
            outcome = "tool_call" if has_calls else "no_tool_call"
            family.add_metric([self._model_name, mode, outcome, "chat_completions"], count)
        yield family
        family = CounterMetricFamily(
            "vllm:request_success", "Completions that have ended.", labels=[*LABELS, "finished_reason"]
        )
        for reason, count in self._num_ended.items():
            family.add_metric([*self._labels(0), reason.value], count)
        yield family

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self._first_token),
            ("inter_token_latency_seconds", "Between two steps' tokens.", self._inter_token),
            ("request_time_per_output_token_seconds", "Mean time of a token.", self._per_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", self._whole),
            ("request_queue_time_seconds", "Before the first step.", self._queue),
            ("request_inference_time_seconds", "From the first step to the end.", self._inference),
            ("request_prefill_time_seconds", "From the first step to the first token.", self._prefill),
            ("request_decode_time_seconds", "From the first token to the last.", self._decode),
            ("request_prompt_tokens", "Tokens of prompts.", self._num_prompt),
            ("request_prefill_kv_computed_tokens", "Tokens of prompts not cached.", self._num_computed),
            ("request_generation_tokens", "Tokens generated.", self._num_generated),
            (
                "request_max_num_generation_tokens",
                "Tokens of the longest of a prompt's completions.",
                self._most_generated,
            ),
            ("request_params_max_tokens", "max_tokens as asked for.", self._max_tokens),
            ("request_params_n", "n as asked for.", self._n),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self._labels(0), histogram.buckets(), histogram.sum)
            yield family

    def _http(self) -> Iterator[Metric]:
        """Under the names that vLLM's have."""
        requests = CounterMetricFamily(
            "http_requests", "Answers over HTTP.", labels=["method", "handler", "status"]
        )
        for (method, handler, status), count in self._answered.items():
            requests.add_metric([method, handler, str(status)], count)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a request's head to the end of its answer.",
            labels=["method", "handler"],
        )
        for labels, histogram in self._durations.items():
            durations.add_metric(labels, histogram.buckets(), histogram.sum)
        yield durations

    def _steps(self, engines: Sequence[EngineStats]) -> Metric:
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
        for index, stats in enumerate(engines):
            sizes = Histogram.of(
                [float(bound) for bound in STEP_TOKENS], stats.num_steps_by_tokens, stats.num_step_tokens
            )
            family.add_metric(self._labels(index), sizes.buckets(), sizes.sum)
        return family

    def _proposer(self, num_engines: int) -> Metric:
        speculative = self._llm.resolved.speculative
        facts = {
            "proposer": speculative.method,
            "num_speculative_tokens": str(speculative.num_speculative_tokens),
            "rejection_sample_method": speculative.rejection_sample_method,
        }
        family = GaugeMetricFamily("pellucid:spec_decode_info", "What drafts.", labels=[*LABELS, *facts])
        for index in range(num_engines):
            family.add_metric([*self._labels(index), *facts.values()], 1)
        return family

    def _cache_config(self, num_engines: int) -> Metric:
        resolved = self._llm.resolved
        cache = resolved.user.cache
        facts = {
            "block_size": str(resolved.block_size),
            "cache_dtype": resolved.kv_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": str(self._llm.num_pages),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=[*LABELS, *facts])
        for index in range(num_engines):
            family.add_metric([*self._labels(index), *facts.values()], 1)
        return family


def _family_of(request_id: str) -> str:
    """`fan_out` numbers the completions of a prompt behind a line."""
    return request_id.partition("_")[0]


LABELS = ["model_name", "engine"]
Reading = tuple[str, str, Callable[[EngineStats], float]]
GAUGES: tuple[Reading, ...] = (
    ("num_requests_running", "Completions that the engine works on.", lambda s: s.num_running),
    ("num_requests_waiting", "Completions that wait for the engine.", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", lambda s: s.kv_usage),
)
COUNTERS: tuple[Reading, ...] = (
    ("prompt_tokens", "Tokens of prompts.", lambda s: s.num_prompt_tokens),
    ("prompt_tokens_cached", "Tokens of prompts found in the cache.", lambda s: s.num_cached_tokens),
    ("prefix_cache_queries", "Tokens looked for in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.num_sampled_tokens),
    ("num_preemptions", "Completions that had to begin anew.", lambda s: s.num_preemptions),
    ("spec_decode_num_drafts", "Rows with drafts.", lambda s: s.num_drafts),
    ("spec_decode_num_draft_tokens", "Drafts.", lambda s: s.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafts that stood.", lambda s: s.num_accepted_tokens),
)
