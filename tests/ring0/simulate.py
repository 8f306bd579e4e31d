"""Ring 0: the real scheduler, KV manager and engine loop on a toy worker, in random configurations.

Pipelines, overlap, chunked prefill, random prefill budgets, chain or tree drafts, prefix cache, windows of
any width, a connector, preemption with priorities, aborts, grammars, stop tokens, prompt logprobs, starved
pools, dying workers: every request must end in autoregression's answer (or its beginning, if it was aborted).

    python -m tests.ring0.simulate [N [FIRST]]    N configurations (default 2000), from the FIRST-th on
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from pellucid.engine.core import Engine
from pellucid.features.base import AskingRow, HostFeature, RowKind
from pellucid.features.grammar.host import Drafts
from pellucid.features.host import HostFeatures
from pellucid.features.logprobs.host import Logprobs, PromptLogprobs
from pellucid.kv.hashes import Prefix, root_digest
from pellucid.kv.kinds import Kind, Window, most_pages
from pellucid.kv.manager import KVManager, PrefixHit
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.news import News
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.sequence import Sequence, Status
from pellucid.schedule.step import SchedulerOptions, Step
from pellucid.spec.switch import Switch
from pellucid.types import FinishReason, Request, SeqUpdate, TokenLogprobs
from tests.ring0.connector import Blocks, Key, ToyConnector, ToyTransfer
from tests.ring0.model import (
    EOS,
    FULL,
    MAX_LEN,
    NUM_LAYERS,
    VOCAB,
    Truth,
    Windows,
    autoregression,
    grammar_bit,
)
from tests.ring0.worker import TREES, ToyExecutor, Toys, WorkerConfig, tree_paths

MAX_STEPS = 3000
MOST_TOYS = 2  # that run at once
WINDOWS: list[Windows] = [
    FULL,
    FULL,
    (None, 5, None, 5),
    (7, 7, 7, 7),
    (None, 3, 9, 3),
    (None, 6, 6, 6),
    (1, None, 4, None),
    (None, None, 2, 12),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to run requests; none of it may show in the answers."""

    worker: WorkerConfig
    depth: int
    caching: bool = True
    policy: str = "fcfs"
    watermark: float = 0.0
    is_steady: bool = False  # requests mostly run to their limits, without drafts or grammars
    vary_drafts: bool = True
    cheap_tokens: int = 0  # of those that do not vary
    arrival_rate: float = 1.0  # chance that the next request arrives, again and again
    abort_rate: float = 0.0  # chance of an abort, a step
    clear_rate: float = 0.0  # chance that the prefix cache is cleared, a step
    remote_rate: float = 0.0  # share of the requests of which a remote store has KV
    save_rate: float = 0.0  # share of the retiring sequences that are saved


@dataclass(slots=True)
class Answer:
    """All that came back for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    toys: list[int] = field(default_factory=list)
    end: SeqUpdate | None = None

    def add(self, update: SeqUpdate) -> None:
        assert self.end is None, "an update behind the last one"
        self.tokens += update.new_token_ids
        self.logprobs += update.logprobs or []
        self.prompt_logprobs += update.prompt_logprobs or []
        self.toys += (update.extras or {}).get("toy", [])
        if update.finish_reason is not None:
            self.end = update


class RandomPrefillBudget:
    """Any room, at least for one token; holds the scheduler to it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num_under_way = rng, 0
        self.most = sys.maxsize  # tokens of the step that is being planned

    def room(self, num_decode: int, start: int, num_waiting: int = 0) -> int:
        room = self.rng.choice([1, 2, 7, 64])
        self.most = num_decode + room
        return room

    def planned(self, num_decode: int, num_prompt: int, reach: int) -> None:
        assert num_decode + num_prompt <= self.most, "more tokens than the prefill budget allows"
        self.most = sys.maxsize
        self.num_under_way += 1

    def took(self, seconds: float) -> None:
        assert self.num_under_way > 0 and seconds >= 0, "a step that was not planned"
        self.num_under_way -= 1


class WatchedScheduler(Scheduler):
    """Holds itself to law 7: nobody is preempted for one that finds no room all the same."""

    wants_at_random: random.Random | None = None  # each row wants other drafts in every step

    def _reserve(self, step: Step, seq: Sequence, num_tokens: int) -> bool:
        before = self._counts
        return self._is_worth_it(before, has_room=super()._reserve(step, seq, num_tokens))

    def _has_room(self, step: Step, seq: Sequence, hit: PrefixHit) -> bool:
        before = self._counts
        return self._is_worth_it(before, has_room=super()._has_room(step, seq, hit))

    def _plan_drafts(self, step: Step) -> None:
        num_preempted = self.counters.num_preemptions
        if self.wants_at_random is not None:
            most = self.wants_at_random.choice([0, self.options.num_spec])
            self.table.want[:] = [self.wants_at_random.randint(0, most) for _ in self.table.want]
        super()._plan_drafts(step)
        assert self.counters.num_preemptions == num_preempted, "preempted for drafts"

    def _is_worth_it(self, before: tuple[int, int], *, has_room: bool) -> bool:
        (num_preempted, num_lent), (were_preempted, were_lent) = self._counts, before
        # What a connector keeps of a victim's blocks, nobody has known.
        assert has_room or num_preempted == were_preempted or num_lent > were_lent, "preempted for nothing"
        return has_room

    @property
    def _counts(self) -> tuple[int, int]:
        return self.counters.num_preemptions, len(self.kv.lent)


class ToyGrammar(HostFeature):
    """Masks of a row: for each draft node the parity of the token that follows it."""

    rows, is_watched, is_host_bound = RowKind.SAMPLING, True, True

    def __init__(self, parents: list[int]) -> None:
        self.paths, self.drafts = tree_paths(parents), dict[str, list[int]]()

    def asks(self, request: Request) -> bool:
        return request.grammar is not None

    def late(self, rows: list[AskingRow]) -> dict[int, list[int]]:  # type: ignore[override]
        return {row.index: [self.bit(row, path) for path in self.paths] for row in rows}

    def bit(self, row: AskingRow, path: list[int]) -> int:
        assert row.samples, "its bit is for rows that sample"
        shown = self.drafts.get(row.request.id, [])[: row.num_draft]
        assert len(shown) == row.num_draft, "drafts that the host has not seen"
        drafts = [shown[node - 1] for node in path if node <= len(shown)]
        return grammar_bit(row.token_ids.tolist() + drafts)

    def land(self, told: Drafts, news: News, scheduler: Scheduler) -> None:
        for index, drafts in told.rows.items():
            landed = news.landed.get(index)
            if landed is None or landed.seq.is_finished:
                continue
            if scheduler.num_tokens(landed.seq) >= landed.seq.min_len:
                self.drafts[landed.seq.request.id] = drafts
                scheduler.expect_drafts(landed.seq, len(drafts))

    def leave(self, request_id: str) -> None:
        self.drafts.pop(request_id, None)


class ToyFeature(HostFeature):
    """Of each token, seven times it and the seed; and two requests of this kind at most run at once.

    What plans carry is checked by the workers (worker.py).
    """

    is_watched = True

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.held = rng, set[str]()
        self.preparing: dict[str, Future[None]] = {}
        self.num_plans = 0

    def asks(self, request: Request) -> bool:
        return request.sampling.extra_args is not None

    def prepare(self, request: Request) -> Future[None] | None:
        self.held.add(request.id)
        if self.rng.random() < 0.5:
            return None
        self.preparing[request.id] = Future()
        return self.preparing[request.id]

    def finish_some(self) -> None:
        while self.preparing and self.rng.random() < 0.5:
            self.preparing.popitem()[1].set_result(None)

    def enter(self, seq: Sequence) -> int:
        assert seq.request.id not in self.preparing, "it is not ready"
        return seq.request.seed

    def gate(self, seq: Sequence, beside: list[Sequence]) -> bool:  # type: ignore[override]
        assert seq not in beside and all(other.request.sampling.extra_args for other in beside)
        return len(beside) < MOST_TOYS

    def ride(self, rows: list[AskingRow]) -> Toys:  # type: ignore[override]
        self.num_plans += 1
        return Toys(self.num_plans, {row.index: row.request.seed for row in rows})

    def late(self, rows: list[AskingRow]) -> Toys:  # type: ignore[override]
        return Toys(self.num_plans, {row.index: row.request.seed for row in rows})

    def land(self, told: dict[int, list[int]], news: News, scheduler: Scheduler) -> None:
        for index, values in told.items():
            if landed := news.landed.get(index):
                assert landed.seq.request.id in self.held, "it has left"
                landed.update.extras = {"toy": values[: landed.num_new]}

    def leave(self, request_id: str) -> None:
        self.held.discard(request_id)


def random_config(rng: random.Random) -> Config:
    is_steady = rng.random() < 0.3
    parents = TREES["none" if is_steady else rng.choice(["none", "chain", "tree", "tree"])]
    pp, windows = 1 if is_steady else rng.randint(1, NUM_LAYERS), rng.choice(WINDOWS)
    spare = rng.choice([0, 0.2, 0.6, 1.5, 10])  # beyond law 10's least, as a share of it
    death = (rng.choice(["submit", "result"]), rng.randrange(60)) if rng.random() < 0.05 else None
    worker = WorkerConfig(
        pp=pp,
        parents=parents,
        block_size=rng.choice([2, 4, 4, 8]),
        num_pages=0,
        num_slots=rng.randint(2, 7),
        windows=windows,
        sizes=rng.choice([(1, 1, 1, 1), (1, 1, 1, 1), (2, 1, 3, 1)]),
        budget=rng.choice([2, 5, 11, 16, 64]),
        laziness=rng.choice([0, 0.3, 0.9]),
        death=death,
        extra=rng.choice([0, 1]),
    )
    caching = rng.random() < 0.9
    return Config(
        worker=replace(worker, num_pages=num_pages(worker, spare)),
        depth=rng.choice([1, pp, pp + 1, pp + 2]),
        caching=caching,
        policy=rng.choice(["fcfs", "priority"]),
        watermark=rng.choice([0, 0.1, 0.3]),
        is_steady=is_steady,
        vary_drafts=rng.random() < 0.7,
        cheap_tokens=rng.choice([0, 4, 1000]),
        arrival_rate=rng.choice([0.1, 0.3, 0.6]),
        abort_rate=rng.choice([0, 0, 0.02, 0.1]),
        clear_rate=rng.choice([0, 0, 0, 0.02]),
        remote_rate=rng.choice([0, 0, 0.7]) * caching,
        save_rate=rng.choice([0, 0, 0.7]) * caching,
    )


def num_pages(worker: WorkerConfig, spare: float) -> int:
    """Law 10's least, and a share of it beside."""
    kinds, num_spec = worker.kinds, worker.num_spec
    least = most_pages(kinds, MAX_LEN + num_spec, worker.budget + num_spec + worker.num_extra)
    return least + int(spare * least)


def random_requests(
    rng: random.Random, *, is_steady: bool = False, windows: Windows = FULL, moved_rate: float = 0.0
) -> list[tuple[Request, Truth]]:
    """Shared prefixes, exact repeats, next turns of a chat (another's output in the prompt), full lengths."""
    shared = [rng.randrange(VOCAB) for _ in range(16)]
    made: list[tuple[Request, Truth]] = []
    for i in range(rng.randint(4, 12)):
        kind, prompt = rng.random(), list[int]()
        if i and kind < 0.5:
            request, truth = rng.choice(made)
            prompt = request.prompt_token_ids if kind < 0.2 else truth.tokens
        elif kind < 0.7:
            prompt = shared[: 4 * rng.randint(1, 4)]
        if not prompt or kind > 0.3:
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        request = random_request(rng, i, prompt[:MAX_LEN])
        if is_steady:
            sampling = request.sampling.clone(max_tokens=None, ignore_eos=rng.random() < 0.8)
            request = replace(request, grammar=None, sampling=sampling)
        truth = autoregression(request, length_limit(request), windows)
        made.append((moved(rng, request, truth) if rng.random() < moved_rate else request, truth))
    return made


def moved(rng: random.Random, request: Request, truth: Truth) -> Request:
    """The same from somewhere within its answer on: another engine has sampled what lies before."""
    start = len(request.prompt_token_ids)
    if start + 1 >= len(truth.tokens):
        return request
    return replace(request, prior_token_ids=truth.tokens[start : rng.randrange(start + 1, len(truth.tokens))])


def random_request(rng: random.Random, index: int, prompt: list[int]) -> Request:
    max_tokens = rng.choice([None, *range(1, 25)])
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(5, max_tokens or 5)]),
        stop_token_ids=rng.choice([None, [7], [1, 9]]),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        extra_args=rng.choice([None, None, None, {"toy": True}]),
    )
    return Request(
        id=f"request-{index}",
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=rng.randrange(3),
        eos_token_ids=EOS,
        grammar="parity" if rng.random() < 0.2 else None,
        is_quiet=rng.random() < 0.5 and sampling.logprobs is None and sampling.prompt_logprobs is None,
        is_streamed=rng.random() < 0.5,
        priority=rng.choice([0, 0, 0, -1, 1]),
        arrival=float(index),
    )


def length_limit(request: Request) -> int:
    """Most tokens of a request, prompt included."""
    max_tokens = request.sampling.max_tokens
    return MAX_LEN if max_tokens is None else min(MAX_LEN, len(request.prompt_token_ids) + max_tokens)


def kv_blocks(truths: list[Truth], worker: WorkerConfig, most: int | None = None) -> dict[Key, Blocks]:
    """The KV of the truths' full blocks, at most the first `most` of each, by kind and digest."""
    blocks: dict[Key, Blocks] = {}
    size = worker.block_size
    for truth in truths:
        prefix = Prefix(root_digest(), size)
        prefix.extend(truth.tokens)
        for number, kind in enumerate(worker.kinds):
            layers = [n for n, window in enumerate(worker.windows) if window == window_of(kind)]
            for i, digest in enumerate(prefix.digests[:most]):
                blocks[number, digest] = {n: truth.caches[n][i * size : (i + 1) * size] for n in layers}
    return blocks


def window_of(kind: Kind) -> int | None:
    return kind.window if isinstance(kind, Window) else None


class Simulation:
    """One configuration, from the first request to the last answer."""

    def __init__(self, config: Config, requests: list[tuple[Request, Truth]], rng: random.Random) -> None:
        self.config, self.rng, self.requests = config, rng, requests
        truths, worker = [truth for _, truth in requests], config.worker
        far = [truth for truth in truths if rng.random() < config.remote_rate]
        remote, truth = kv_blocks(far, worker, rng.randint(1, 5)), kv_blocks(truths, worker)
        self.connector = ToyConnector(remote, truth, worker.kinds, worker.pp, config.save_rate, rng)
        oracle = {(r.seed, *r.prompt_token_ids): t.beyond for r, t in requests}
        self.executor = ToyExecutor(worker, self.connector, oracle, rng)
        self.prefill_budget = RandomPrefillBudget(rng)
        self.toy = ToyFeature(rng)
        self.scheduler = self.make_scheduler()
        self.executor.pool = self.scheduler.kv.pool
        self.engine = Engine(
            self.scheduler,
            self.executor,  # type: ignore[arg-type]
            depth=config.depth,
            check_invariants=True,
        )
        self.engine.patience = 0.0
        self.answers = {request.id: Answer() for request, _ in requests}
        self.aborted: set[str] = set()

    def make_scheduler(self) -> Scheduler:
        config, worker = self.config, self.config.worker
        options = SchedulerOptions(
            max_model_len=MAX_LEN,
            num_slots=worker.num_slots,
            max_num_batched_tokens=worker.budget,
            pp=worker.pp,
            num_spec=worker.num_spec,
            num_extra=worker.num_extra,
            policy=config.policy,
            watermark=config.watermark,
            cheap_tokens=config.cheap_tokens,
        )
        kv = KVManager(
            worker.kinds,
            worker.num_pages,
            num_slots=options.num_slots,
            max_len=options.max_len,
            max_chunk=options.max_chunk,
            enable_prefix_caching=config.caching,
        )
        features: dict[str, HostFeature] = {
            "grammar": ToyGrammar(worker.parents),
            "logprobs": Logprobs(None),  # type: ignore[arg-type]
            "prompt_logprobs": PromptLogprobs(None),  # type: ignore[arg-type]
            "toy": self.toy,
        }
        if config.caching:
            features["kv_transfer"] = ToyTransfer(self.connector)
        scheduler = WatchedScheduler(options, kv, self.prefill_budget, HostFeatures(features))
        scheduler.features.bind(scheduler, None)  # type: ignore[arg-type]
        scheduler.wants.switch = Switch(is_on=True)
        scheduler.wants.took = lambda seconds: None  # no clock decides what these runs do
        if config.vary_drafts:
            scheduler.wants_at_random = self.rng
        return scheduler

    def run(self) -> Counter[str]:
        """Until everything is answered.  Returns statistics."""
        pending, num_steps = [request for request, _ in reversed(self.requests)], 0
        while pending or self.engine.has_work:
            while pending and self.rng.random() < self.config.arrival_rate:
                self.engine.add(pending.pop())
            self.disturb()
            self.step()
            num_steps += 1
            assert num_steps < MAX_STEPS, "livelock"
        self.check_answers()
        assert not self.toy.held, "features do not hear who has left"
        if self.engine.error is None:
            self.check_leaks()
        return self.statistics()

    def disturb(self) -> None:
        living = [id for id, answer in self.answers.items() if answer.end is None]
        if living and self.rng.random() < self.config.abort_rate:
            victim = self.rng.choice([id for id in living if self.awaits_load(id)] or living)
            self.aborted.add(victim)
            self.engine.abort(victim)
        self.toy.finish_some()
        if self.rng.random() < self.config.clear_rate:
            self.engine.call(self.scheduler.clear_prefix_cache)

    def awaits_load(self, request_id: str) -> bool:
        """Whose blocks an abort must leave to the connector."""
        seq = self.scheduler._by_request.get(request_id)
        return seq is not None and seq.status is Status.HELD

    def step(self) -> None:
        running = self.scheduler.running()
        oldest = running[0] if running else None
        toys = [seq for seq in running if seq.request.sampling.extra_args]
        assert len(toys) <= MOST_TOYS, "nobody asks the gate"
        waits = self.scheduler.features.are_busy or self.toy.preparing
        blocks_on_inbox = self.engine.idle and self.engine.has_work and not waits
        assert not blocks_on_inbox, "would wait for ever"
        self.prefill_budget.most = sys.maxsize  # no plan may have come of the last room
        self.connector.tick(self.executor.hear)
        updates = self.engine.step()
        for update in updates:
            self.answers[update.request_id].add(update)
        if self.engine.error is not None:
            assert self.config.worker.death is not None, self.engine.error
            # What ranks have said before it, or with it, is all that it may still have to take in.
            assert not (self.scheduler.has_unfinished or self.engine._preparing), "unanswered after death"
        elif any(update.finish_reason for update in updates):
            pass  # an elder may have come, made room for itself, and gone
        elif oldest is not None and oldest.status.name == "WAITING":
            keys = [seq.key for seq in self.scheduler._sequences.values()]
            assert min(keys) < oldest.key, "the oldest was preempted"

    def check_answers(self) -> None:
        for request, truth in self.requests:
            answer, prompt_len = self.answers[request.id], len(request.prompt_token_ids)
            end, expected = answer.end, truth.tokens[request.num_known :]
            assert end is not None, f"{request.id} was not answered"
            if end.finish_reason is FinishReason.ERROR:
                assert end.error and (self.engine.error or prompt_len >= MAX_LEN), end.error
            elif end.finish_reason is FinishReason.ABORT:
                assert request.id in self.aborted, "aborted by nobody"
            else:
                assert answer.tokens == expected, f"wrong tokens: {answer.tokens}, not {expected}"
                assert end.finish_reason is (FinishReason.STOP if truth.stopped else FinishReason.LENGTH)
            assert answer.tokens == expected[: len(answer.tokens)], "wrong tokens"
            self.check_logprobs(request, truth, answer)
            toys = [7 * token + request.seed for token in answer.tokens]
            assert answer.toys == (toys if request.sampling.extra_args else []), "the toy's values"

    def check_logprobs(self, request: Request, truth: Truth, answer: Answer) -> None:
        if request.sampling.logprobs is not None:
            first = len(request.prior_token_ids)
            assert answer.logprobs == truth.logprobs[first : first + len(answer.tokens)], "logprobs"
        if request.sampling.prompt_logprobs is None or request.prior_token_ids:
            assert not answer.prompt_logprobs
        elif answer.tokens:
            assert answer.prompt_logprobs == truth.prompt_logprobs, "prompt logprobs"
        else:
            assert answer.prompt_logprobs == truth.prompt_logprobs[: len(answer.prompt_logprobs)]

    def check_leaks(self) -> None:
        assert self.scheduler.kv.usage == 0 and not self.scheduler.num_running, "leaked blocks"
        self.scheduler.check([])

    def statistics(self) -> Counter[str]:
        stats, connector = self.engine.stats(), self.connector
        return Counter(
            {
                "steps": stats.num_steps,
                "preemptions": stats.num_preemptions,
                "cached tokens": stats.num_cached_tokens,
                "drafts accepted": self.executor.num_accepted,
                "aborts": len(self.aborted),
                "loads": connector.num_loads,
                "failed loads": connector.num_failed,
                "saves": connector.num_saves,
                "deaths": self.engine.error is not None,
            }
        )


def run(seed: int) -> Counter[str]:
    """One random configuration; raises AssertionError if anything is wrong."""
    rng = random.Random(seed)
    config = random_config(rng)
    requests = random_requests(
        rng, is_steady=config.is_steady, windows=config.worker.windows, moved_rate=rng.choice([0, 0, 0.5])
    )
    return Simulation(config, requests, rng).run()


def main(num_configs: int, first: int = 0) -> None:
    logging.disable(logging.CRITICAL)  # dying workers are part of it
    start, total = time.time(), Counter[str]()
    for seed in range(first, first + num_configs):
        try:
            total += run(seed)
        except Exception as error:
            raise AssertionError(f"configuration {seed}") from error
    figures = ", ".join(f"{total[name]} {name}" for name in sorted(total))
    sys.stdout.write(
        f"{num_configs} configurations equal autoregression: {figures}; {time.time() - start:.1f} s\n"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or [2000]))
