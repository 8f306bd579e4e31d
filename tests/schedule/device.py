"""For scheduler tests: requests, a scheduler, and a device that yields tokens for each sampling row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pellucid.features.base import AskingRow, HostFeature, RowKind
from pellucid.features.host import HostFeatures
from pellucid.features.logprobs.host import Entries, Logprobs, PromptLogprobs
from pellucid.kv.kinds import Full, Kind
from pellucid.kv.manager import KVManager
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.schedule.scheduler import Scheduler, SchedulerOptions
from pellucid.types import Request, SeqUpdate, TokenLogprobs
from tests.schedule.store import StoreTransfer

BLOCK = 4


def make_request(
    id: str,
    prompt: int | list[int] = 5,
    *,
    max_tokens: int | None = 8,
    priority: int = 0,
    arrival: float = 0.0,
    grammar: str | None = None,
    sampling: SamplingParams | None = None,
    eos: tuple[int, ...] = (),
    is_quiet: bool = False,
) -> Request:
    """A prompt given by its length has tokens that no other request has."""
    own = sum(map(ord, id)) * 1000
    return Request(
        id=id,
        prompt_token_ids=[own + i for i in range(prompt)] if isinstance(prompt, int) else prompt,
        sampling=sampling or SamplingParams(max_tokens=max_tokens),
        priority=priority,
        arrival=arrival,
        grammar=grammar,
        eos_token_ids=eos,
        is_quiet=is_quiet,
    )


def make_kv(
    options: SchedulerOptions, num_pages: int, kinds: tuple[Kind, ...], *, caching: bool = True
) -> KVManager:
    return KVManager(
        kinds,
        num_pages,
        num_slots=options.num_slots,
        max_len=options.max_len,
        max_chunk=options.max_chunk,
        enable_prefix_caching=caching,
    )


def make_scheduler(
    *,
    num_blocks: int = 100,  # pages, of full blocks
    num_slots: int = 8,
    budget: int = 64,
    max_model_len: int = 64,
    pp: int = 1,
    num_spec: int = 0,
    cheap_tokens: int = 0,
    policy: str = "fcfs",
    watermark: float = 0.0,
    store: StoreTransfer | None = None,
    features: Mapping[str, HostFeature] | None = None,
    kinds: tuple[Kind, ...] = (Full(BLOCK),),
) -> Scheduler:
    options = SchedulerOptions(
        max_model_len=max_model_len,
        num_slots=num_slots,
        max_num_batched_tokens=budget,
        pp=pp,
        num_spec=num_spec,
        cheap_tokens=cheap_tokens,
        policy=policy,
        watermark=watermark,
    )
    kv = make_kv(options, num_blocks, kinds)
    features = dict(features or make_features())
    if store is not None:
        features["kv_transfer"] = store
    scheduler = Scheduler(options, kv, features=HostFeatures(features))
    scheduler.features.bind(scheduler, None)  # type: ignore[arg-type]
    return scheduler


class ToyGrammar(HostFeature):
    """The host must see each token."""

    rows, is_watched, is_host_bound = RowKind.SAMPLING, True, True

    def asks(self, request: Request) -> bool:
        return request.grammar is not None

    def late(self, rows: Sequence[AskingRow]) -> dict[int, AskingRow]:
        return {row.index: row for row in rows}


def make_features() -> dict[str, HostFeature]:
    unused: Any = None
    return {
        "grammar": ToyGrammar(unused),
        "logprobs": Logprobs(unused),
        "prompt_logprobs": PromptLogprobs(unused),
    }


@dataclass
class Device:
    """Knows the length of what is in each slot; every sampling row yields as many tokens as `accept` says."""

    next_token: Callable[[int, int], int] = lambda seq_id, position: 100_000 + seq_id * 1000 + position
    accept: int = 0  # drafts accepted of each row
    known: dict[int, int] = field(default_factory=dict[int, int])  # by slot: tokens known
    computed: dict[int, int] = field(default_factory=dict[int, int])
    limit: dict[int, int] = field(default_factory=dict[int, int])
    seq_ids: dict[int, int] = field(default_factory=dict[int, int])

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.admitted:
            self.known[new.slot], self.limit[new.slot] = len(new.token_ids), new.limit
            self.computed[new.slot], self.seq_ids[new.slot] = new.num_computed, new.seq_id
        scores, tokens = Entries(), list[list[int]]()
        for index, row in enumerate(plan.rows):
            start = self.computed[row.slot]
            end = start + row.num_query - row.num_draft
            new = list[int]()
            if end >= self.known[row.slot]:
                num_new = min(1 + min(self.accept, row.num_draft), self.limit[row.slot] - end)
                new = [self.next_token(self.seq_ids[row.slot], end + i) for i in range(num_new)]
                self.known[row.slot] = end + num_new
            num_entries = row.num_logits - (1 + row.num_draft if new else 0)
            if num_entries > 0:
                first = start + row.num_query - row.num_logits
                places = range(first, first + num_entries)
                scores.rows[index] = [TokenLogprobs([p + 1], [0.0], 1) for p in places]
            self.computed[row.slot] = end + max(0, len(new) - 1)
            tokens.append(new)
        told: dict[str, object] = {"prompt_logprobs": scores} if scores.rows else {}
        return StepResult.of(plan.id, tokens, told=told)


def step(scheduler: Scheduler, device: Device) -> tuple[StepPlan, list[SeqUpdate]]:
    """Plan, run, commit; there must be something to do."""
    plan = scheduler.next_plan()
    assert plan is not None, "nothing to do"
    result = device.run(plan)
    news = scheduler.commit(plan, result)
    scheduler.features.land(result.told, news, scheduler)
    updates = news.one_by_one()
    scheduler.check([])
    return plan, updates


def run_to_end(scheduler: Scheduler, device: Device) -> dict[str, list[int]]:
    """All tokens by request, once everything is answered."""
    tokens: dict[str, list[int]] = {}
    while scheduler.has_unfinished:
        for update in step(scheduler, device)[1]:
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
    return tokens
