"""Runs a workload through `LLM.generate`, warm and several times, and makes figures of the median run."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from pellucid.cli.limits import Machine, ModelCost, run_limit
from pellucid.cli.workloads import Workload
from pellucid.config import EngineConfig
from pellucid.llm import LLM
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.draft import open_draft
from pellucid.observe.statistics import EngineStats
from pellucid.platform import detect
from pellucid.resolve import Resolved, resolve
from pellucid.sampling_params import SamplingParams
from pellucid.types import RequestOutput

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
LIMITS: tuple[str, ...] = (
    "experts_read_per_layer_and_step",
    "limit_gigabytes",
    "limit_teraflops",
    "machine_gigabytes_per_second",
    "machine_teraflops_per_second",
    "limit_seconds",
    "share_of_limit",
)
WATCH_SECONDS = 0.05
FEWEST_STEPS = 8  # of which the host's time is looked at: it is counted before a step, the step behind it


def plan_run(options: dict[str, object]) -> Resolved:
    """What the engine will decide, before it takes its memory."""
    config = EngineConfig.from_options(options)
    checkpoint = Checkpoint.open(config.model)
    return resolve(config, detect(config.device.device), checkpoint, open_draft(config, checkpoint))


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How drafts fared in a run; all zero without speculation."""

    counters: dict[str, int | list[int]]  # EngineStats.spec_decode, of this run alone
    is_synthetic: bool = False  # they stood by chance

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> Self:
        old, new = before.spec_decode, after.spec_decode
        return cls(
            counters={name: _difference(new[name], old[name]) for name in new},
            is_synthetic=after.is_synthetic,
        )

    def figures(self) -> dict[str, object]:
        """The counters, tokens a verification yields, measured and expected, and the shares that stood."""
        num_drafts = self.counters["spec_decode_num_drafts"]
        per_position = self.counters["spec_decode_num_accepted_tokens_per_pos"]
        assert isinstance(num_drafts, int) and isinstance(per_position, list), self.counters
        if not num_drafts:
            return {
                **self.counters,
                "is_synthetic": self.is_synthetic,
                "mean_accepted_length": None,
                "expected_accepted_length": None,
                "acceptance_rates": None,
            }
        rates = [num / num_drafts for num in per_position]
        return {
            **self.counters,
            "is_synthetic": self.is_synthetic,
            "mean_accepted_length": 1 + sum(rates),
            "expected_accepted_length": expected_length(rates[0], len(rates)),
            "acceptance_rates": rates,
        }


def _difference(new: int | tuple[int, ...], old: int | tuple[int, ...]) -> int | list[int]:
    """new - old, of numbers or position by position."""
    if isinstance(new, tuple) and isinstance(old, tuple):
        return [b - a for a, b in zip(old, new, strict=True)]
    assert isinstance(new, int) and isinstance(old, int), (new, old)
    return new - old


def expected_length(rate: float, num_drafts: int) -> float:
    """Tokens a verification yields if every draft stood with probability `rate`, whatever came before.

    (1 - a^(k+1)) / (1 - a) (Leviathan, Kalman, Matias 2023).
    """
    return sum(rate**i for i in range(num_drafts + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a workload, all of its requests at once.  Times in seconds."""

    seconds: float
    num_steps: int  # of each data-parallel engine, on average
    host_seconds: float  # of a step, median over the run's moments
    first_token: float  # median over the requests
    peak_kv_usage: float  # share of the blocks
    num_cached_tokens: int
    num_preemptions: int
    num_late_compilations: int
    acceptance: Acceptance


def measure(
    llm: LLM, workload: Workload, machine: Machine, *, repeat: int, temperature: float
) -> dict[str, object]:
    """Warm up, run `repeat` times with an empty prefix cache, and return the figures of the median run."""
    resolved = llm.llm_engine.resolved
    num_engines = resolved.user.parallel.num_engines
    run_once(llm, workload.warm_up(num_engines * resolved.max_num_batched_tokens), temperature)
    runs = [run_once(llm, workload, temperature) for _ in range(repeat)]
    median = sorted(runs, key=lambda run: run.seconds)[(repeat - 1) // 2]
    return {
        "model": resolved.checkpoint.name,
        "device": resolved.platform.name,
        "dtype": resolved.dtype,
        **_speed(workload, median, on_gpu=resolved.platform.device == "cuda"),
        **_limits(workload, median, resolved, machine),
        "all_seconds": [run.seconds for run in runs],
    }


def run_once(llm: LLM, workload: Workload, temperature: float) -> Run:
    """Run a workload.  Raises ValueError if a request ends in an error or with another number of tokens."""
    llm.reset_prefix_cache()
    sampling = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=num)
        for num in workload.output_lens
    ]
    before = llm.llm_engine.stats
    with RunWatch(llm) as watch:
        began = time.perf_counter()
        outputs = llm.generate(workload.prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
    after = llm.llm_engine.stats
    num_engines = len(llm.llm_engine.stats_per_engine)
    return Run(
        seconds=seconds,
        num_steps=round((after.num_steps - before.num_steps) / num_engines),
        host_seconds=statistics.median(watch.host_seconds or [host_seconds_of_a_step(before, after)]),
        first_token=statistics.median(map(_checked_first_token, outputs, workload.output_lens)),
        peak_kv_usage=watch.peak,
        num_cached_tokens=after.num_cached_tokens - before.num_cached_tokens,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        num_late_compilations=after.num_late_compilations,  # of the warm-up, too
        acceptance=Acceptance.between(before, after),
    )


def _checked_first_token(output: RequestOutput, num_expected: int) -> float:
    num = len(output.outputs[0].token_ids)
    if output.error or num != num_expected:
        reason = output.error or f"it has {num} tokens, not {num_expected}"
        raise ValueError(f"request {output.request_id} did not run to its end: {reason}")
    assert output.metrics.first_token_time is not None, "a finished request has had its first token"
    return output.metrics.first_token_time - output.metrics.arrival_time


@dataclass
class RunWatch:
    """Looks now and then at an engine, from a thread beside the run."""

    llm: LLM
    peak: float = 0.0  # of the KV cache's use
    host_seconds: list[float] = field(default_factory=list[float])  # of a step, between two looks
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        before = self.llm.llm_engine.stats
        while not self._done.wait(WATCH_SECONDS):
            now = self.llm.llm_engine.stats
            self.peak = max(self.peak, now.kv_usage)
            if now.num_steps - before.num_steps >= FEWEST_STEPS:
                self.host_seconds.append(host_seconds_of_a_step(before, now))
                before = now


def host_seconds_of_a_step(before: EngineStats, after: EngineStats) -> float:
    """The mean over the steps between two looks."""
    return (after.host_seconds - before.host_seconds) / max(1, after.num_steps - before.num_steps)


def _speed(workload: Workload, run: Run, *, on_gpu: bool) -> dict[str, object]:
    num_in, num_out = workload.num_prompt_tokens, workload.num_output_tokens
    # All requests of a latency run are equally long: a token of each is a step, whatever the engine counts.
    num_steps = max(workload.output_lens) if workload.name.startswith("latency") else run.num_steps
    return {
        "workload": workload.name,
        "num_requests": len(workload.prompts),
        "num_prompt_tokens": num_in,
        "num_output_tokens": num_out,
        "seconds": run.seconds,
        "prompt_tokens_per_second": num_in / run.seconds,
        "output_tokens_per_second": num_out / run.seconds,
        "total_tokens_per_second": (num_in + num_out) / run.seconds,
        "num_steps": run.num_steps,
        "ms_per_step": 1000 * run.seconds / num_steps,
        # On a CPU the forward runs inside `submit`, so host and device cannot be told apart.
        "host_ms_per_step": 1000 * run.host_seconds if on_gpu else None,
        "first_token_ms": 1000 * run.first_token,
        "peak_kv_usage": run.peak_kv_usage,
        "num_cached_tokens": run.num_cached_tokens,
        "num_preemptions": run.num_preemptions,
        "num_late_compilations": run.num_late_compilations,
        **run.acceptance.figures(),
    }


def _limits(workload: Workload, run: Run, resolved: Resolved, machine: Machine) -> Mapping[str, object]:
    """What the machine allows, where that is known: of plain weights, and a token a step."""
    config, parallel = resolved.checkpoint.config, resolved.user.parallel
    stored = config.get("quantization_config") or config.get("compression_config")
    if stored or resolved.user.device.quantization is not None or resolved.num_spec:
        return dict.fromkeys(LIMITS)
    cost = ModelCost.from_config(
        config, bytes_per_weight=DTYPE_BYTES[resolved.dtype], bytes_per_kv=DTYPE_BYTES[resolved.kv_dtype]
    )
    engine = machine.times(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    num_engines, slots = parallel.num_engines, resolved.max_num_seqs
    whole = engine.times(num_engines)
    if parallel.shares_experts:  # steps are of all engines
        cost = replace(cost, num_copies=num_engines)
        limits = [run_limit(cost, workload.requests, num_engines * slots, whole)]
    else:  # each has its share of the requests
        shares = (workload.requests[i::num_engines] for i in range(num_engines))
        limits = [run_limit(cost, share, slots, engine) for share in shares]
    limit_seconds = max(limit.seconds for limit in limits)
    figures = (
        sum(limit.num_hit for limit in limits) / len(limits) if cost.num_experts else None,
        sum(limit.num_bytes for limit in limits) / 1e9,
        sum(limit.flops for limit in limits) / 1e12,
        whole.bandwidth / 1e9,
        whole.flops / 1e12,
        limit_seconds,
        limit_seconds / run.seconds,
    )
    return dict(zip(LIMITS, figures, strict=True))
