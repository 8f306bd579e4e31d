"""A toy executor: a pipeline of stages, each with its own slots, its own paged KV and its own idea of time.

It follows the workers' laws (feedback, retired, admitted, grown, forward) on the real StepPlans, runs as late
as it likes, samples and drafts behind the last stage, and may be told to die.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pellucid.connectors.base import Jobs
from pellucid.executor.base import HasFileno, Hear
from pellucid.features.grammar.host import Drafts
from pellucid.features.logprobs.host import Entries
from pellucid.kv.kinds import Kind
from pellucid.kv.layout import LayerCache, choose_kinds, lay_out
from pellucid.kv.pool import PagePool
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Row, StepPlan, StepResult
from pellucid.types import TokenLogprobs
from tests.ring0.connector import ToyConnector
from tests.ring0.model import (
    FULL,
    MASKED,
    MAX_LEN,
    NUM_LAYERS,
    VOCAB,
    Windows,
    attend,
    banned_at,
    draw,
    kv_entry,
    logprob,
)

TREES = {
    "none": [0],
    "chain": [0, 0, 1, 2],
    "tree": [0, 0, 0, 1, 1, 2, 3],
}  # each node's parent; node 0 is the root


def tree_paths(parents: list[int]) -> list[list[int]]:
    """For each node the nodes from below the root down to it."""
    paths: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])
    return paths


@dataclass(frozen=True, slots=True)
class Toys:
    """What a plan carries for the toy feature (simulate.py)."""

    num: int  # of the plan among those that carry any
    rows: dict[int, int]  # seeds


@dataclass(slots=True)
class Slot:
    """A sequence on one stage."""

    token_ids: list[int]  # padded to the row's length
    num_known: int  # tokens known at admission
    prompt_len: int
    num_computed: int
    limit: int
    seed: int
    sampling: SamplingParams
    stops: frozenset[int]
    toy: int | None  # what its admission brought the toy feature
    blocks: list[list[int]]  # each one's pages
    num_drafted: int = 0  # drafts behind its last known token

    def samples(self, row: Row, start: int) -> bool:
        return start + row.num_query - row.num_draft >= self.num_known


@dataclass(frozen=True, slots=True)
class Feedback:
    """What sampling one row taught; every stage applies it to its own slot."""

    slot: int
    root: int  # position of the last token known before
    path: list[int]  # accepted draft nodes
    tokens: list[int]
    drafts: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    pp: int
    parents: list[int]
    block_size: int
    num_pages: int
    num_slots: int
    windows: Windows = FULL
    sizes: tuple[int, ...] = (1,) * NUM_LAYERS  # of what each layer keeps
    budget: int = 64  # tokens a step
    laziness: float = 0.0
    death: tuple[str, int] | None = None  # ("submit" or "result", plan id)
    extra: int = 0  # places that a drafter writes beyond those of its drafts

    @property
    def num_extra(self) -> int:
        return self.extra if self.num_spec else 0

    @property
    def num_spec(self) -> int:
        return len(self.parents) - 1

    @property
    def caches(self) -> list[LayerCache]:
        return [LayerCache(size, window) for size, window in zip(self.sizes, self.windows, strict=True)]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return choose_kinds(self.caches, self.block_size)


class Stage:
    """Some layers of the model."""

    def __init__(self, index: int, config: WorkerConfig, pipeline: ToyExecutor) -> None:
        self.index, self.pp, self.config, self.pipeline = index, config.pp, config, pipeline
        self.layers = range(index * NUM_LAYERS // config.pp, (index + 1) * NUM_LAYERS // config.pp)
        self.max_tokens = MAX_LEN + config.num_spec  # law 3: rows and tables, not one entry more
        self.slots: list[Slot | None] = [None] * config.num_slots  # None is dead
        layout = lay_out(config.kinds, config.caches[self.layers.start : self.layers.stop])
        # Of each layer here the page of a block, and the unit of that page.
        self.places = {
            layer: (layout.tables[place.table].stripe, place.unit)
            for layer, place in zip(self.layers, layout.places, strict=True)
        }
        self.pages_a_block = layout.pages_a_block
        # By page and unit: a block's entries.  What is given back is gone, and what is granted is empty.
        self.kv: dict[int, dict[int, list[int | None]]] = {}
        self.starts: list[int] = []  # where each row of the newest plan begins
        self.num_run = self.num_applied = 0

    def execute(self, plan: StepPlan, hidden: list[list[int]] | None) -> list[list[int]]:
        for phase in (self.apply_feedback, self.retire, self.admit):  # law 6: in this order
            phase(plan)
        for page in self.pipeline.given_back[plan.id]:
            self.kv.pop(page, None)
        self.starts = [self.slot(row.slot).num_computed for row in plan.rows]
        self.check_toys(plan)
        self.start(plan, loads=True)
        values = self.forward(plan, hidden)
        self.start(plan, loads=False)
        return values

    def apply_feedback(self, plan: StepPlan) -> None:
        newest, log = max(plan.id - self.pp, plan.committed), self.pipeline.feedback
        assert self.pipeline.has_left(newest), "waits for a plan that is still in the pipe"
        while self.num_applied < len(log) and log[self.num_applied][0] <= newest:
            for feedback in log[self.num_applied][1]:
                slot = self.slots[feedback.slot]
                if slot is not None:
                    self.apply(slot, feedback)
            self.num_applied += 1

    def apply(self, slot: Slot, feedback: Feedback) -> None:
        for position, token in enumerate(feedback.tokens + feedback.drafts, feedback.root + 1):
            slot.token_ids[position] = token
        slot.num_computed = feedback.root + len(feedback.tokens)
        slot.num_drafted = len(feedback.drafts)
        for layer in self.layers:
            for rank, node in enumerate(feedback.path, 1):  # compaction; does nothing for a chain
                entry = self.load(slot, layer)[feedback.root + node]
                self.store(slot, layer, feedback.root + rank, entry)

    def retire(self, plan: StepPlan) -> None:
        for index in plan.retired:
            self.slots[index] = None

    def admit(self, plan: StepPlan) -> None:
        for new in plan.admitted:
            assert self.slots[new.slot] is None, "the slot is taken"
            self.slots[new.slot] = Slot(
                token_ids=new.token_ids.tolist() + [MASKED] * (self.max_tokens - len(new.token_ids)),
                num_known=len(new.token_ids),
                prompt_len=new.prompt_len,
                num_computed=new.num_computed,
                limit=new.limit,
                seed=new.seed,
                sampling=new.sampling,
                stops=frozenset(new.stop_token_ids),
                toy=new.ride.get("toy"),
                blocks=self.cut(new.pages),
            )
        for index, pages in zip(plan.grown.slots, self.cut(plan.grown.pages), strict=True):
            blocks = self.slot(index).blocks
            blocks.append(pages)
            assert (len(blocks) - 1) * self.config.block_size < self.max_tokens and all(pages), "overflow"
            for page in pages:
                self.kv.pop(page, None)

    def start(self, plan: StepPlan, *, loads: bool) -> None:
        """What the plan carries: loads before its forward, all else behind it."""
        ride = plan.ride.get("kv_transfer")
        if isinstance(ride, Jobs):
            jobs = [job for job in ride.jobs if job.is_load is loads]
            self.pipeline.connector.start(jobs, self)

    def kind(self, layer: int) -> int:
        return sorted({w or 0 for w in self.config.windows}).index(self.config.windows[layer] or 0)

    def cut(self, pages: Sequence[int]) -> list[list[int]]:
        """By block."""
        return [list(pages[i : i + self.pages_a_block]) for i in range(0, len(pages), self.pages_a_block)]

    def entries(self, pages: list[int], layer: int) -> list[int | None]:
        """What a block holds of a layer."""
        stripe, unit = self.places[layer]
        return self.kv.setdefault(pages[stripe], {}).setdefault(unit, [None] * self.config.block_size)

    def check_toys(self, plan: StepPlan) -> None:
        """Law 11: the plan carries what its own rows ask for."""
        ride = plan.ride.get("toy")
        slots = [self.slot(row.slot) for row in plan.rows]
        asking = {i: slot.seed for i, slot in enumerate(slots) if slot.sampling.extra_args}
        assert isinstance(ride, Toys) or not asking, "no ride"
        assert all(slot.toy == (slot.seed if i in asking else None) for i, slot in enumerate(slots))
        if isinstance(ride, Toys):
            assert ride.rows == asking, "another plan's ride"

    def slot(self, index: int) -> Slot:
        slot = self.slots[index]
        assert slot is not None, "a dead slot"
        return slot

    def store(self, slot: Slot, layer: int, position: int, entry: int | None) -> None:
        block, offset = divmod(position, self.config.block_size)
        self.entries(slot.blocks[block], layer)[offset] = entry

    def load(self, slot: Slot, layer: int) -> list[int | None]:
        return [entry for pages in slot.blocks for entry in self.entries(pages, layer)]

    def forward(self, plan: StepPlan, hidden: list[list[int]] | None) -> list[list[int]]:
        """All rows write before any row reads, so rows of one plan may share blocks."""
        values = [self.embed(row) for row in plan.rows] if hidden is None else hidden
        for layer in self.layers:
            for row, given in zip(plan.rows, values, strict=True):
                slot = self.slot(row.slot)
                for position, value in enumerate(given, slot.num_computed):
                    self.store(slot, layer, position, kv_entry(layer, value))
            values = [self.attention(row, self.slot(row.slot), layer) for row in plan.rows]
        for row in plan.rows:
            slot = self.slot(row.slot)
            if not slot.samples(row, slot.num_computed):  # else feedback tells
                slot.num_computed += row.num_query
        return values

    def embed(self, row: Row) -> list[int]:
        slot = self.slot(row.slot)
        assert row.num_draft <= slot.num_drafted, "drafts that nobody has proposed"
        return slot.token_ids[slot.num_computed : slot.num_computed + row.num_query]

    def attention(self, row: Row, slot: Slot, layer: int) -> list[int]:
        """Known tokens see all before them; a draft node sees the known tokens and its ancestors."""
        entries, num_known = self.load(slot, layer), slot.num_computed + row.num_query - row.num_draft
        seen = [entries[:end] for end in range(slot.num_computed + 1, num_known + 1)]
        for path in self.pipeline.paths[1 : row.num_draft + 1]:
            seen.append(entries[:num_known] + [entries[num_known - 1 + node] for node in path])
        return [attend(layer, e, self.config.windows[layer]) for e in seen]  # type: ignore[arg-type]


@dataclass(eq=False)
class Flight:
    """A plan on its way through the stages; also the engine's ticket for it."""

    plan: StepPlan
    pipeline: ToyExecutor
    late: Mapping[str, Any] | None = None  # of the grammar, by row: a bit for each node
    hidden: list[list[int]] | None = None
    result_: StepResult | None = None

    def provide(self, late: Mapping[str, object]) -> None:
        assert self.plan.is_open and self.late is None, "nothing is to follow"
        self.late = late

    @property
    def is_whole(self) -> bool:
        return not self.plan.is_open or self.late is not None

    def wait(self) -> None:
        self.pipeline.die_if_told("result", self.plan.id)
        while self.result_ is None:
            assert self.pipeline.advance(), "the pipeline is stuck"

    def result(self) -> StepResult:
        assert self.result_ is not None, "the engine has waited"
        return self.result_


class ToyExecutor:
    """The stages, sampler and drafter behind the last one, and the freedom to run late."""

    def __init__(
        self,
        config: WorkerConfig,
        connector: ToyConnector,
        oracle: dict[tuple[int, ...], list[int]],
        rng: random.Random,
    ) -> None:
        self.config, self.connector, self.oracle, self.rng = config, connector, oracle, rng
        self.parents, self.paths = config.parents, tree_paths(config.parents)
        self.stages = [Stage(i, config, self) for i in range(config.pp)]
        self.flights: list[Flight] = []
        self.feedback: list[tuple[int, list[Feedback]]] = []
        self.num_accepted = 0
        self.pool: PagePool | None = None  # whose free pages hold nothing any more
        self.given_back: dict[int, list[int]] = {}  # by plan
        self.lines: list[HasFileno] = []

    def start(self, resolved: object) -> object:
        raise NotImplementedError

    def call(self, name: str, *args: object) -> object:
        raise NotImplementedError

    def check(self) -> None:
        pass

    def listen(self, hear: Hear) -> None:
        self.hear = hear

    def shutdown(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> Flight:
        self.die_if_told("submit", plan.id)
        assert sum(row.num_query for row in plan.rows) <= self.config.budget, (
            "more tokens than a step may have"
        )
        runs = [slot for slot, _ in groupby(plan.grown.slots)]
        assert len(set(runs)) == len(runs), "a slot's blocks are not side by side"
        assert plan.num_tokens == sum(row.num_query for row in plan.rows), "miscounted"
        assert self.pool is not None
        self.given_back[plan.id] = list(self.pool.free)
        flight = Flight(plan, self)
        self.flights.append(flight)
        while self.rng.random() > self.config.laziness and self.advance():
            pass
        return flight

    def die_if_told(self, where: str, plan_id: int) -> None:
        if (
            self.config.death is not None
            and self.config.death[0] == where
            and plan_id >= self.config.death[1]
        ):
            raise RuntimeError("worker 0 has died")

    def has_left(self, plan_id: int) -> bool:
        """Have all plans up to this one been sampled?"""
        done = self.stages[-1].num_run
        return done == len(self.flights) or self.flights[done].plan.id > plan_id

    def can_run(self, stage: Stage) -> bool:
        """A stage follows the one before it, and the pipe holds pp plans: older ones have left it."""
        if stage.num_run == (self.stages[stage.index - 1].num_run if stage.index else len(self.flights)):
            return False
        flight = self.flights[stage.num_run]
        if stage is self.stages[-1] and not flight.is_whole:
            return False
        return self.has_left(max(flight.plan.id - self.config.pp, flight.plan.committed))

    def advance(self) -> bool:
        """One stage, any that can, runs its next plan."""
        able = [stage for stage in self.stages if self.can_run(stage)]
        if not able:
            return False
        stage = self.rng.choice(able)
        flight = self.flights[stage.num_run]
        if stage is self.stages[-1]:
            self.finish(flight, stage)
        else:
            flight.hidden = stage.execute(flight.plan, flight.hidden)
        stage.num_run += 1
        return True

    def finish(self, flight: Flight, last: Stage) -> None:
        """The last stage: forward, logits, sample or verify, propose."""
        plan = flight.plan
        hidden = last.execute(plan, flight.hidden)
        logprobs, prompt_logprobs, drafts = Entries(), Entries(), Drafts({})
        late, toys = flight.late or {}, dict[int, list[int]]()
        masks = late.get("grammar", {})
        assert late.get("toy") == plan.ride.get("toy"), "late for another plan"
        tokens: list[list[int]] = []
        learned: list[Feedback] = []
        for i, row in enumerate(plan.rows):
            slot, start = last.slot(row.slot), last.starts[i]
            scores = self.score_prompt(row, slot, start, hidden[i])
            if scores:
                prompt_logprobs.rows[i] = scores
            if not slot.samples(row, start):
                tokens.append([])
                continue
            assert row.num_logits > row.num_draft, "a row samples, but asks for no logits"
            bits = masks.get(i)
            learned.append(self.verify(plan, row, slot, hidden[i], bits))
            tokens.append(learned[-1].tokens)
            if slot.sampling.logprobs is not None:
                logprobs.rows[i] = learned[-1].logprobs
            if bits is not None:
                drafts.rows[i] = list(learned[-1].drafts)
            if slot.toy is not None:
                toys[i] = [7 * token + slot.toy for token in learned[-1].tokens]
        self.feedback.append((plan.id, learned))
        parts = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "grammar": drafts}
        told: dict[str, object] = {name: part for name, part in parts.items() if part.rows}
        if toys:
            told["toy"] = toys
        flight.result_ = StepResult.of(plan.id, tokens, told=told)
        if self.rng.random() < 0.5:
            self.connector.tick(self.hear)

    def score_prompt(self, row: Row, slot: Slot, start: int, hidden: list[int]) -> list[TokenLogprobs]:
        """Prompt logprobs: an entry for each logit before the sampled ones."""
        num_sampled = 1 + row.num_draft if slot.samples(row, start) else 0
        queries = range(row.num_query - row.num_logits, row.num_query - num_sampled)
        return [logprob(hidden[query], slot.token_ids[start + query + 1]) for query in queries]

    def verify(
        self, plan: StepPlan, row: Row, slot: Slot, hidden: list[int], bits: list[int] | None
    ) -> Feedback:
        """One rule for chain and tree: a draft is accepted iff it is the target's own token there."""
        first = row.num_query - 1 - row.num_draft
        root, node, path, tokens, logprobs = slot.num_computed + first, 0, [], [], []
        while node is not None:
            position = root + len(tokens) + 1
            banned = banned_at(position, slot.prompt_len, slot.sampling, slot.stops)
            tokens.append(
                draw(hidden[first + node], slot.seed, position, bits[node] if bits else None, banned)
            )
            logprobs.append(logprob(hidden[first + node], tokens[-1]))
            children = (n for n in range(1, row.num_draft + 1) if self.parents[n] == node)
            node = next((n for n in children if slot.token_ids[root + n] == tokens[-1]), None)
            path += [node] if node is not None else []
        tokens = tokens[: slot.limit - root - 1]  # law 3: the device, too, stops at the limit
        self.num_accepted += len(tokens) - 1
        drafts = self.propose(slot, root + len(tokens), plan.num_propose)
        return Feedback(row.slot, root, path[: len(tokens)], tokens, drafts, logprobs[: len(tokens)])

    def propose(self, slot: Slot, last: int, num_propose: int) -> list[int]:
        """A good but unreliable drafter: right with probability 0.7 below a right parent.

        It has KV of its own, of the tokens from `last` on, perhaps but for the last draft's; and a recorded
        step has all drafts, however few are wanted.  Sometimes it finds fewer than that: the others are no
        tokens.
        """
        most = len(self.parents) - 1 + self.config.num_extra
        num_held = self.rng.choice([num_propose, self.rng.randint(0, num_propose)])
        assert last + most <= self.config.block_size * len(slot.blocks), "no block for a draft's KV"
        truth = self.oracle[(slot.seed, *slot.token_ids[: slot.prompt_len])]
        right, drafts = {0}, []
        for node in range(1, num_propose + 1):
            position = last + len(self.paths[node])
            if node > num_held:
                drafts.append(MASKED)
                continue
            if self.parents[node] in right and position < len(truth) and self.rng.random() < 0.7:
                right.add(node)
            drafts.append(truth[position] if node in right else self.rng.randrange(VOCAB + 1))
        return drafts
