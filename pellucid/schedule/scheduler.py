"""Decides what each step computes: counts of tokens, slots and pages, never token ids.

There are no phases.  Every sequence has tokens that are known and tokens that are computed, and a step closes
the gap under one token budget: decodes first, then prompt chunks, then admissions, then drafts.  Plans are
made while older ones are in flight; `commit` corrects what was an upper bound.  Decodes are planned and
committed all at once, in the columns of table.py; one by one only when they begin, end, or lack a block.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile, tee

import numpy as np
from numpy.typing import NDArray

from pellucid.features.base import AskingRow
from pellucid.features.host import HostFeatures
from pellucid.kv.hashes import Prefix, root_digest
from pellucid.kv.manager import KVManager, PrefixHit
from pellucid.schedule.counters import SchedulerCounters
from pellucid.schedule.news import NO_NEWS, NOBODY_GOES_ON, Going, Landed, News
from pellucid.schedule.plan import (
    FEATURE_BITS,
    HOST_BOUND,
    NOBODY,
    STREAMED,
    Admission,
    Column,
    Row,
    StepPlan,
    StepResult,
    ints,
)
from pellucid.schedule.prefill_budget import PrefillBudget, UnlimitedPrefill
from pellucid.schedule.queue import AgeQueue
from pellucid.schedule.sequence import Sequence, Status
from pellucid.schedule.step import Flight, SchedulerOptions, Step, deal
from pellucid.schedule.stop_tokens import StopTokens
from pellucid.schedule.table import NEVER, Table
from pellucid.spec.wants import Wants
from pellucid.types import DraftCounts, FinishReason, Request, SeqUpdate

UPKEEP = 8  # plans: once in so many, what can wait is done for many sequences at once


class Scheduler:
    """Owns all sequences, slots and (through `kv`) pages.  One thread."""

    def __init__(
        self,
        options: SchedulerOptions,
        kv: KVManager,
        prefill_budget: PrefillBudget | None = None,
        features: HostFeatures | None = None,
    ) -> None:
        self.options, self.kv = options, kv
        self.features = features or HostFeatures()
        most_new = 1 + options.num_spec
        self.table = Table(options.num_slots, options.max_model_len, most_new, self.features.watched)
        self.wants = Wants.of(self.table, options)
        self._stops = StopTokens()
        self.prefill_budget: PrefillBudget = prefill_budget or UnlimitedPrefill()
        self.counters = SchedulerCounters(
            num_accepted_per_position=[0] * (options.tree_depth or options.num_spec)
        )
        self._sequences: dict[int, Sequence] = {}  # unfinished, by id
        self._by_request: dict[str, Sequence] = {}
        self._waiting = AgeQueue()
        self._running = AgeQueue()  # in slots
        self._prefilling = AgeQueue()  # of these, whose prompts are not yet all planned
        self._decoding = NOBODY  # slots, the first goes first; made anew when somebody comes or goes
        self._has_joined = False  # somebody, behind all others, since they were last in order
        self._blocked: Sequence | None = None  # for which there are no pages until some are freed
        self._slots = list(range(options.num_slots - 1, -1, -1))
        self._draining: deque[tuple[int, int]] = deque()  # slots, each free when that plan has landed
        self._retired: list[int] = []  # slots that the next plan reports
        self.watermark = int(options.watermark * kv.pool.num_pages)
        self._inflight: deque[Flight] = deque()
        self._next_seq_id = self._next_plan_id = 0
        self._num_asking = 0  # sequences in slots that ask for any feature
        self._num_streams = 0  # that decode, and whose users read along
        self._newest = -1  # plan that was made
        self._num_landed = 0  # plans with rows
        self._committed = -1

    # Requests come and go

    def add(self, request: Request) -> SeqUpdate | None:
        """Take a request.  One that could never run is answered at once."""
        assert request.id not in self._by_request, f"request id {request.id!r} is in use"
        limit = self._limit(request)
        refusal = self._refuse(request, limit)
        if refusal is not None:
            return SeqUpdate(request.id, finish_reason=FinishReason.ERROR, error=refusal)
        tokens, seq_id = ints(request.prompt_token_ids), self._next_seq_id
        tokens.extend(request.prior_token_ids)
        self._next_seq_id += 1
        by_priority = self.options.policy == "priority"
        seq = Sequence(
            id=seq_id,
            request=request,
            key=(request.priority, request.arrival, seq_id) if by_priority else (0, 0.0, seq_id),
            limit=limit,
            prefix=Prefix(root_digest(*request.cache_key), self.kv.block_size),
            prompt_len=len(request.prompt_token_ids),
            tokens=tokens,
            stop_token_ids=request.stop_token_ids,
            asked=self.features.asks(request),
            num_reported=len(tokens),
        )
        self.features.enter(seq)
        self._waiting.add(seq)
        self._sequences[seq_id] = self._by_request[request.id] = seq
        return None

    def _limit(self, request: Request) -> int:
        longest, max_tokens = self.options.max_model_len, request.sampling.max_tokens
        return longest if max_tokens is None else min(longest, len(request.prompt_token_ids) + max_tokens)

    def _refuse(self, request: Request, limit: int) -> str | None:
        """Law 10: why this request could never run, in words."""
        prompt_len = len(request.prompt_token_ids)
        longest, room = self.options.max_model_len, self.kv.max_tokens - self.options.num_spec
        if not prompt_len:
            return "the prompt has no tokens; give at least one"
        if prompt_len >= longest:
            return (
                f"prompt has {prompt_len:,} tokens, max_model_len is {longest:,} with the answer; "
                "raise --max-model-len or shorten it"
            )
        if request.num_known >= max(limit, prompt_len + 1):
            return (
                f"the request comes with {request.num_known:,} tokens, its limit is {limit:,}; "
                "prior_token_ids must leave one to sample"
            )
        if limit > room:
            return (
                f"the request may grow to {limit:,} tokens, the KV cache holds {room:,}; "
                "lower max_tokens or give the cache more memory"
            )
        return None

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> SeqUpdate | None:
        """End a request early; None if it is not there (any more)."""
        seq = self._by_request.get(request_id)
        if seq is None:
            return None
        unreported = self._unreported(seq)
        if seq.status is Status.RUNNING:
            self._retire(seq)
            self._decoding = self.table.in_use(self._decoding)
        elif seq.status is Status.WAITING:
            self._waiting.remove(seq)
        self._forget(seq)
        update = seq.update(unreported)
        update.finish_reason = reason
        return update

    def fail_all(self, message: str) -> list[SeqUpdate]:
        """Answer every request with an error: the workers are gone, and with them all state."""
        updates = [seq.update(self._unreported(seq)) for seq in self._sequences.values()]
        for update in updates:
            update.finish_reason, update.error = FinishReason.ERROR, message
        for seq in list(self._sequences.values()):
            self._forget(seq)
        return updates

    def _forget(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        del self._sequences[seq.id], self._by_request[seq.request.id]

    def _unreported(self, seq: Sequence) -> list[int]:
        """The tokens of a quiet sequence that no update has brought."""
        if not seq.request.is_quiet:
            return []
        tokens = self.table.tokens(seq.slot) if seq.status is Status.RUNNING else seq.tokens
        return tokens[seq.num_reported :].tolist()

    def took(self, seconds: float) -> None:
        """The oldest plan has come home, so long after the one before it or after its own start."""
        self.prefill_budget.took(seconds)
        self.wants.took(seconds)

    # Plan

    def next_plan(self) -> StepPlan | None:
        """The next step, or None if nothing is ready.  Either way time passes (law 1)."""
        options, t = self.options, self.table
        step = Step(self._next_plan_id, options.max_num_batched_tokens)
        self._next_plan_id += 1
        kept = self._prompt_share()
        if len(self._decoding):
            self._plan_decodes(step, kept)
        if kept:
            if self._num_streams:
                self._limit_prompts(step)
            if len(self._prefilling):
                self._plan_chunks(step)
            self._admit_waiting(step)
            if step.joining:
                self._decoding = np.concatenate((self._decoding, step.joining))
                self._has_joined = True
        if options.num_spec and not self.wants.rests(step):
            self._plan_drafts(step)
        carried = self.features.carry()
        if not step.num_rows and not carried:
            return None
        retired, self._retired = self._retired, []
        self._tell_prefill_budget(step)
        self.wants.planned(step)
        rows = step.rows()
        self._newest = step.id
        self._inflight.append(Flight(step.id, rows, t.epoch[rows.slots], t.ids[rows.slots]))
        if carried:
            step.asked |= self.features.asked_by(carried)
        is_open = bool(step.asked & self.features.with_late)
        return step.to_plan(rows, self._committed, retired, carried, is_open=is_open)

    def _plan_decodes(self, step: Step, kept: int) -> None:
        """A token for each decoding sequence that is ready; who finds no room goes first in the next step.

        kept: tokens of the budget that are for prompts.
        """
        t, slots = self.table, self._ready(step, kept)
        planned = t.planned[slots] + 1
        if np.count_nonzero(planned > t.due[slots]):
            slots = self._unfinished(slots)
            planned = t.planned[slots] + 1
            capacity = self.kv.capacity[slots] - self.options.reach
            step.is_short = bool(np.count_nonzero(planned > capacity))
        if step.is_short:
            slots = self._attend(step, slots)
            planned = t.planned[slots] + 1
        elif step.id % UPKEEP == 0:
            self._grow_ahead(step, slots)
        t.planned[slots] = planned
        if self.options.pp > 1:
            t.ready_at[slots] = step.id + self.options.pp
        step.decodes = slots
        if self._num_asking:
            asked = t.asked[slots]
            step.asked = int(np.bitwise_or.reduce(asked))
            if step.asked & HOST_BOUND:  # the host must see this row before the next one
                t.ready_at[slots[asked & HOST_BOUND > 0]] = NEVER

    def _ready(self, step: Step, kept: int) -> Column:
        """Who decodes in this step, if there are blocks: a pipeline's share, and no more than the budget."""
        t, slots = self.table, self._decoding
        is_ready = t.ready_at[slots] <= step.id
        if np.count_nonzero(is_ready) < len(slots):
            slots = slots[is_ready]
        most = min(-(-len(self._decoding) // self.options.pp), step.budget - kept)
        if len(slots) > most:
            first = int(np.flatnonzero(self._decoding == slots[most])[0])
            self._decoding = np.roll(self._decoding, -first)
            slots = slots[:most]
        elif self._has_joined and step.id % UPKEEP == 0:
            self._sort_decodes()
        return slots

    def _sort_decodes(self) -> None:
        """The longest first, from the next step on: what attention does last is short then."""
        lengths, self._has_joined = self.table.planned[self._decoding], False
        if np.count_nonzero(lengths[1:] > lengths[:-1]):
            self._decoding = self._decoding[np.argsort(-lengths, kind="stable")]

    def _unfinished(self, slots: Column) -> Column:
        """Those that the rows in flight do not surely finish; the others are planned no more."""
        t = self.table
        is_ending = t.first_queries(slots) + 1 >= t.limit[slots]
        if np.count_nonzero(is_ending):
            t.ready_at[slots[is_ending]] = NEVER
            slots = slots[~is_ending]
        return slots

    def _plan_drafts(self, step: Step) -> None:
        """What every token and every prompt have left of the budget is for drafts, which may be wrong."""
        t, slots = self.table, step.decodes
        left = self.options.max_num_batched_tokens - step.num_tokens
        draft = self._with_blocks(step, slots, deal(t.drafts[slots], left))
        if np.count_nonzero(draft):
            t.planned[slots] += draft
            t.drafted[slots] += draft
            step.add_drafts(draft)
        sampled = np.concatenate((slots, np.array(step.joining))) if step.joining else slots
        step.num_propose = self.wants.num_propose(sampled, [row.slot for row in step.chunks])
        want = t.want[sampled]  # and they are there for the next step
        if step.asked & HOST_BOUND:  # of theirs the host learns later
            want[t.asked[sampled] & HOST_BOUND > 0] = 0
        t.drafts[sampled] = want

    def _with_blocks(self, step: Step, slots: Column, draft: Column) -> Column:
        """As many of the drafts as there are blocks for: nobody is preempted for them."""
        if not step.is_short:
            return draft
        t, capacity = self.table, self.kv.capacity
        behind = t.planned[slots] + self.options.num_behind
        written = behind + draft
        written = np.minimum(written, t.limit[slots] + self.options.num_spec)
        if self._grow(step, slots, written):
            return draft
        is_short = written > capacity[slots]
        short, wanted = self._grow_first(step, slots[is_short], written[is_short])
        for slot, num_tokens in zip(short.tolist(), wanted.tolist(), strict=True):
            self._grow_one(step, slot, num_tokens)
        has_room = written <= capacity[slots]
        return np.where(has_room, draft, np.clip(capacity[slots] - behind, 0, draft))

    def _prompt_share(self) -> int:
        """Tokens that decodes leave to prompts, so that neither starves the other; 0 if none can go on."""
        can_admit = len(self._waiting) and self._slots and self._waiting.oldest is not self._blocked
        if len(self._prefilling) or can_admit:
            return max(1, self.options.max_num_batched_tokens // 8)
        return 0

    def _limit_prompts(self, step: Step) -> None:
        """Streams wait for the whole step: prompts get of it what these can bear."""
        t = self.table
        start = int(t.planned[self._prefilling.oldest.slot]) if len(self._prefilling) else 0
        num_waiting = len(self._prefilling) + len(self._waiting)
        num_draft = min(int(t.drafts[step.decodes].sum()), step.budget)
        room = self.prefill_budget.room(step.num_tokens + num_draft, start, num_waiting)
        step.max_tokens = min(step.max_tokens, step.num_tokens + room)

    def _tell_prefill_budget(self, step: Step) -> None:
        reach = 0
        for row in step.chunks:
            reach += row.num_query * (2 * int(self.table.planned[row.slot]) - row.num_query) // 2
        self.prefill_budget.planned(step.num_tokens - step.num_chunked, step.num_chunked, reach)

    def _plan_chunks(self, step: Step) -> None:
        for seq in self._prefilling:
            is_there = seq.status is Status.RUNNING  # else an older one has just preempted it
            if is_there and step.budget > 0 and self.table.ready_at[seq.slot] <= step.id:
                self._plan_chunk(step, seq)
                if self.table.is_decoding(seq.slot):
                    self._prefilling.remove(seq)

    def _plan_chunk(self, step: Step, seq: Sequence) -> None:
        t, slot = self.table, seq.slot
        start, num_known = int(t.planned[slot]), int(t.known[slot])
        end = min(num_known, start + step.budget)
        self._pass_windows(np.array([slot]))
        has_more = end == num_known and self._grow_one_ahead(step, seq, end)
        if not has_more and not self._reserve(step, seq, end + self.options.num_behind):
            return
        step.add_chunk(Row(slot, end - start, 0, seq.num_logits(start, end, num_known)))
        t.planned[slot] = end
        if end == num_known:
            step.asked |= seq.asked
            self._begin_decoding(step, seq)
        else:
            step.asked |= seq.asked & ~self.features.sampling_only
        if end >= self.kv.publish_at[slot]:
            # Law 8: known tokens are published when planned; stream order makes the blocks valid in time.
            self.kv.publish(slot, seq.prefix, t.token_ids[slot, :end])

    def _begin_decoding(self, step: Step, seq: Sequence) -> None:
        """The last chunk is planned; it samples."""
        t, slot = self.table, seq.slot
        step.joining.append(slot)
        self._num_streams += seq.request.is_streamed
        is_over = seq.host_bound or t.known[slot] + 1 >= seq.limit
        t.ready_at[slot] = NEVER if is_over else step.id + self.options.pp

    # Admission

    def _admit_waiting(self, step: Step) -> None:
        while len(self._waiting) and self._slots and step.budget > 0 and not step.has_preempted:
            seq = self._waiting.oldest
            hit = self.kv.match(seq.prefix, seq.tokens, seq.max_cached)
            if not self.features.may_run(seq, self._running):
                self._blocked = seq
                break
            if self.features.holds(seq, hit):
                self._waiting.remove(seq)
                seq.status = Status.HELD  # without slot and pages
            elif self._has_room(step, seq, hit):
                self._admit(step, seq, hit)
            else:
                # A chunk of this step becomes a decode, which may give way, or a prefix to share.
                self._blocked = None if step.chunks else seq
                break

    def _has_room(self, step: Step, seq: Sequence, hit: PrefixHit) -> bool:
        """Pages for all its known tokens and the first drafts, and some to spare for those that run.

        Sequences of lower priority make room; equals do not.
        """
        num_tokens = len(seq.tokens) + self.options.num_behind
        while (lacking := self.kv.lacking(hit, num_tokens, self.watermark)) > 0:
            running = reversed(self._running)
            lower = [v for v in running if v.key[0] > seq.key[0] and not step.has_chunk(v.slot)]
            if self._make_room(step, lower, lacking, hit):
                continue
            if len(lower) < self.num_running:
                return False
            # All that run would give way to it: for them no page need be spared.
            alone = self.kv.lacking(hit, num_tokens, 0)
            made = self._make_room(step, lower, alone, hit)
            return made and self.kv.lacking(hit, num_tokens, 0) <= 0  # what they leave may be lent at once
        return True

    def _admit(self, step: Step, seq: Sequence, hit: PrefixHit) -> None:
        self._waiting.remove(seq)
        self._running.add(seq)
        seq.status, seq.slot = Status.RUNNING, self._slots.pop()
        self.kv.adopt(seq.slot, hit)
        self.wants.begin(seq.slot)  # which looks at what was there
        self.table.enter(seq.slot, seq, hit.num_tokens, step.id)
        self._num_asking += seq.asked > 0
        self._stops.add(seq.stop_token_ids)
        if not seq.first_scheduled:
            seq.first_scheduled = time.monotonic()
            seq.num_cached_tokens = min(hit.num_tokens, seq.prompt_len)
            self.counters.num_prompt_tokens += seq.prompt_len
            self.counters.num_cached_tokens += seq.num_cached_tokens
        step.admitted.append(self._admission(seq, hit))
        self._plan_chunk(step, seq)
        if not self.table.is_decoding(seq.slot):
            self._prefilling.add(seq)

    def _admission(self, seq: Sequence, hit: PrefixHit) -> Admission:
        """Law 2: the only way on which sampled token ids travel back to the device."""
        request = seq.request
        return Admission(
            seq_id=seq.id,
            slot=seq.slot,
            token_ids=seq.tokens,
            prompt_len=seq.prompt_len,
            num_computed=hit.num_tokens,
            limit=seq.limit,
            seed=request.seed,
            sampling=request.sampling,
            stop_token_ids=tuple(sorted(seq.stop_token_ids)),
            bad_words_token_ids=request.bad_words_token_ids,
            asked=seq.asked & FEATURE_BITS,
            ride=seq.ride,
            pages=ints(hit.pages.tobytes()),
        )

    # Blocks and slots

    def _attend(self, step: Step, slots: Column) -> Column:
        """Blocks for those decodes that lack one, or soon will: who gets none is left out of this step."""
        self._pass_windows(self._decoding)
        if self._grow_ahead(step, slots):
            return slots
        t, capacity = self.table, self.kv.capacity
        wanted = t.planned[slots] + 1 + self.options.num_behind  # law 3
        wanted = np.minimum(wanted, t.limit[slots] + self.options.num_spec)
        if self._grow(step, slots, wanted):
            return slots
        is_short = wanted > capacity[slots]
        short, lacking = self._grow_first(step, slots[is_short], wanted[is_short])
        while len(short):
            (seq,) = t.occupants(short[:1])
            self._reserve(step, seq, int(lacking[0]))
            is_there = capacity[short[1:]] > 0  # else an older one has just preempted it
            short, lacking = self._grow_first(step, short[1:][is_there], lacking[1:][is_there])
        return slots[wanted <= capacity[slots]]

    def _grow_ahead(self, step: Step, slots: Column) -> bool:
        """What lacks until the next upkeep, and a block more; False, and none, if there are few."""
        t, num_spec = self.table, self.options.num_spec
        if not self._has_plenty(len(slots)):
            return False
        most = t.limit[slots] + num_spec
        soon = np.minimum(t.planned[slots] + (UPKEEP + 1) * (1 + num_spec), most)
        later = np.minimum(soon + self.kv.block_size, most)
        return self._grow(step, slots, soon, later)

    def _has_plenty(self, num_rows: int) -> bool:
        """May so many have blocks that they do not need yet, and nobody is preempted for them?"""
        return self.kv.pool.num_free >= 2 * num_rows * self.kv.pages_a_block

    def _grow(self, step: Step, slots: Column, num_tokens: Column, at_once: Column | None = None) -> bool:
        """Blocks for so many tokens of each slot; False, and none, if the pool is short.

        at_once: tokens for which those get blocks that lack any.
        """
        t, capacity = self.table, self.kv.capacity
        is_short = num_tokens > capacity[slots]
        if not np.count_nonzero(is_short):
            return True
        slots, wanted = slots[is_short], (num_tokens if at_once is None else at_once)[is_short]
        new = self.kv.grow(slots, wanted)
        if new is None:
            return False
        step.grow(new)
        t.due[slots] = np.minimum(capacity[slots] - self.options.reach, t.limit[slots] - 1)
        return True

    def _grow_first(self, step: Step, slots: Column, num_tokens: Column) -> tuple[Column, Column]:
        """The same for as many of the first slots as there are pages for.  Returns the others."""
        num = self.kv.num_growing(slots, num_tokens)
        if num:
            self._grow(step, slots[:num], num_tokens[:num])
        return slots[num:], num_tokens[num:]

    def _grow_one(self, step: Step, slot: int, num_tokens: int) -> bool:
        """The same for one slot."""
        t, capacity = self.table, self.kv.capacity
        if num_tokens <= capacity[slot]:
            return True
        new = self.kv.grow_one(slot, num_tokens)
        if new is None:
            return False
        step.grow(new)
        t.due[slot] = min(int(capacity[slot]) - self.options.reach, int(t.limit[slot]) - 1)
        return True

    def _grow_one_ahead(self, step: Step, seq: Sequence, end: int) -> bool:
        """The same for what its first decodes write behind `end`; `_grow_ahead` is for those that decode."""
        num_spec = self.options.num_spec
        soon = min(end + (UPKEEP + 1) * (1 + num_spec), seq.limit + num_spec)
        return self._has_plenty(self.options.num_slots) and self._grow_one(step, seq.slot, soon)

    def _reserve(self, step: Step, seq: Sequence, num_tokens: int) -> bool:
        """Law 3: blocks for the most tokens that may be there, and for the drafts to be proposed behind them.

        Law 7: only a younger sequence makes room.
        """
        while not self._grow_one(step, seq.slot, num_tokens):
            younger = takewhile(lambda other: other.key > seq.key, reversed(self._running))
            if not self._make_room(step, younger, self.kv.lacking_behind(seq.slot, num_tokens)):
                return False
        return True

    def _pass_windows(self, slots: Column) -> None:
        """Law 5: what windows have passed is free, for work later in stream order."""
        if self.kv.gives_back and self.kv.pass_windows(slots, self.table.first_queries(slots)):
            self._blocked = None

    def _make_room(
        self, step: Step, victims: Iterable[Sequence], lacking: int, hit: PrefixHit | None = None
    ) -> bool:
        """Preempt the first of these, until so many pages are free; nobody, if all are not enough.

        victims: the youngest first.
        """
        victims, seen = tee(victims)
        num = self.kv.num_to_release((victim.slot for victim in seen), lacking, hit)
        if num is None:
            return False
        for victim in list(islice(victims, num)):
            self._preempt(step, victim)
        return True

    def _preempt(self, step: Step, victim: Sequence) -> None:
        """Send a sequence back to the queue; it will be computed again."""
        if step.take_back_decode(victim.slot):
            self.table.planned[victim.slot] -= 1
        victim.tokens = ints(self.table.tokens(victim.slot).tobytes())
        self._retire(victim)
        self._decoding = self.table.in_use(self._decoding)
        victim.status = Status.WAITING
        self._waiting.add(victim)
        step.has_preempted = True
        self.counters.num_preemptions += 1

    def _retire(self, seq: Sequence, dropped: int = 0) -> None:
        """Finish, abort, preemption.  dropped: of its tokens, those behind a stop.

        Law 5: pages are free at once, for work later in stream order; the slot when its last row has landed.
        The caller takes it out of `_decoding`, with all others that leave.
        """
        t, slot = self.table, seq.slot
        tokens, num_computed = t.tokens(slot), int(t.computed[slot])
        tokens = tokens[: len(tokens) - dropped]
        if num_computed >= self.kv.publish_at[slot]:  # law 8: those of sampled tokens at commit, or now
            self.kv.publish(slot, seq.prefix, tokens[:num_computed])
        self._blocked = None
        self.features.vacate(seq, tokens, num_computed)
        self.kv.release(slot)
        self._retired.append(slot)
        self._running.remove(seq)
        if t.planned[slot] > num_computed:
            self._draining.append((self._newest, slot))
        else:
            self._slots.append(slot)
        if t.is_decoding(slot):
            self._num_streams -= seq.request.is_streamed
        else:
            self._prefilling.remove(seq)
        self._num_asking -= seq.asked > 0
        self._stops.remove(seq.stop_token_ids)
        if t.verified[0, slot]:
            seq.drafts = seq.drafts.plus(DraftCounts(*t.verified[:, slot].tolist()))
        t.leave(slot)
        seq.slot = -1

    def release(self, seq_id: int) -> None:
        """A feature holds it no more: admission finds in the cache what that has brought, or computes it."""
        seq = self._sequences.get(seq_id)
        if seq is not None and seq.status is Status.HELD:
            seq.status = Status.WAITING
            self._waiting.add(seq)

    def request_of(self, seq_id: int) -> str | None:
        """The id of its request, unless that has ended."""
        return self._sequences[seq_id].request.id if seq_id in self._sequences else None

    def look_again(self) -> None:
        """A feature has given pages back: the head of the queue may find room."""
        self._blocked = None

    # Commit

    def commit(self, plan: StepPlan, result: StepResult) -> News:
        """Take in what a plan yielded.  Plans come home in the order in which they were made."""
        assert result.plan_id == plan.id, f"plan {plan.id} is due, plan {result.plan_id} came home"
        self._committed = plan.id
        flight = self._inflight.popleft()
        news = self._land(flight, result) if len(flight.rows) else NO_NEWS
        while self._draining and self._draining[0][0] <= plan.id:
            self._slots.append(self._draining.popleft()[1])
        return news

    def _land(self, flight: Flight, result: StepResult) -> News:
        """All rows at once; then one by one those that begin, end, or have more to tell than tokens."""
        t = self.table
        slots, query, draft = flight.rows.slots, flight.rows.num_query, flight.rows.num_draft
        num_new = np.frombuffer(result.num_new, dtype=np.int32)
        tokens = np.frombuffer(result.token_ids, dtype=np.int32).reshape(len(slots), -1)
        self.wants.landed(slots, None if query is None else num_new)
        index = self._alive(flight)  # of the rows that are left; None: all
        if index is not None:
            slots, num_new, tokens = slots[index], num_new[index], tokens[index]
            query = None if query is None else query[index]
            draft = None if draft is None else draft[index]
        self.counters.num_sampled_tokens += len(slots) if query is None else int(num_new.sum())
        computed = self._advance(slots, query, draft, num_new)
        if not tokens.shape[1]:
            pass  # chunks alone, or rows that are all stale
        elif query is None:
            t.land(slots, computed, tokens)
        else:
            all_yield = np.count_nonzero(num_new) == len(slots)
            owners = slots if all_yield else np.where(num_new > 0, slots, t.spare)
            t.land(owners, computed - num_new + 1, tokens)
        is_due = computed >= t.end[slots]
        if self._stops:
            self._find_stops(slots, tokens, is_due)
        if result.failed:
            is_due |= np.isin(np.arange(len(slots)) if index is None else index, list(result.failed))
        is_reported = t.is_reported[slots]
        landed: dict[int, Landed] = {}
        failed: list[SeqUpdate] = []
        if np.count_nonzero(is_due):
            due = np.flatnonzero(is_due)
            rows = (due if index is None else index[due]).tolist()  # of the plan
            columns = rows, slots[due].tolist(), num_new[due].tolist(), tokens[due].tolist()
            for row, slot, num, new in zip(*columns, strict=True):
                if row in result.failed:
                    failed.append(self._fail(slot, num, result.failed[row]))
                else:
                    landed[row] = self._land_row(slot, new[:num])
            self._decoding = t.in_use(self._decoding)
            is_reported &= ~is_due
        self._num_landed += 1
        if self._num_landed % UPKEEP == 0:
            self._publish_some()
            self._pass_windows(self._decoding)
        if self._num_landed % UPKEEP == 0 or self.wants.has_switched:
            self.wants.choose(self._decoding, waits=len(self._waiting) > 0)
        going = self._going(slots, num_new, tokens, is_reported)
        return News(landed, going, failed) if landed or failed or len(going) else NO_NEWS

    def _alive(self, flight: Flight) -> Column | None:
        """Law 4: which rows are not stale; None: all."""
        if flight.rows.slots is self._decoding:
            return None  # else it would have been made anew
        is_alive = self.table.epoch[flight.rows.slots] == flight.epochs
        return None if np.count_nonzero(is_alive) == len(is_alive) else np.flatnonzero(is_alive)

    def _going(
        self,
        slots: Column,
        num_new: NDArray[np.int32],
        tokens: NDArray[np.int32],
        is_reported: NDArray[np.bool_],
    ) -> Going:
        """is_reported: who merely goes on, and has a reader for each token."""
        num_reported = np.count_nonzero(is_reported)
        if not num_reported:
            return NOBODY_GOES_ON
        if num_reported < len(slots):
            slots, num_new, tokens = slots[is_reported], num_new[is_reported], tokens[is_reported]
        return Going(self.table.names[slots], num_new, tokens)

    def _find_stops(self, slots: Column, tokens: NDArray[np.int32], is_due: NDArray[np.bool_]) -> None:
        """Who has got one of its own stop tokens is due, and nobody for another's."""
        found = np.flatnonzero(self._stops.are_in(tokens) & ~is_due)
        if len(found):
            new: list[list[int]] = tokens[found].tolist()
            seqs = self.table.occupants(slots[found])
            is_due[found] = [not s.stop_token_ids.isdisjoint(n) for s, n in zip(seqs, new, strict=True)]

    def _advance(
        self, slots: Column, query: Column | None, draft: Column | None, num_new: NDArray[np.int32]
    ) -> Column:
        """Count what rows have computed; law 3: give back what was planned for drafts that do not stand."""
        t = self.table
        if query is None:
            computed = t.computed[slots] + 1
        elif draft is None:
            computed = t.computed[slots] + query
        else:
            fell = np.minimum(draft, query - num_new.astype(np.int64))  # of a chunk 0
            stood = draft - fell
            for verified, num in zip(t.verified, (np.minimum(draft, 1), draft, stood), strict=True):
                verified[slots] += num
            computed = t.computed[slots] + (query - fell)
            t.planned[slots] -= fell
            self.counters.count_drafts(draft, stood)
            self.wants.learn(slots, draft, num_new)
        t.computed[slots] = computed
        return computed

    def _land_row(self, slot: int, new: list[int]) -> Landed:
        """A row that is due."""
        t = self.table
        seq = t.seqs[slot]
        assert seq is not None, f"a row of slot {slot} is alive, but nobody is there"
        update = seq.update(new)
        if new:
            return Landed(seq, update, self._land_tokens(seq, update))
        assert t.computed[slot] < t.known[slot], f"a row yielded nothing, below the limit of {seq.limit}"
        return Landed(seq, update, 0)

    def _land_tokens(self, seq: Sequence, update: SeqUpdate) -> int:
        """Of a sequence that begins, ends, or is watched.  Returns how many of its new tokens count."""
        t, slot, num_new = self.table, seq.slot, len(update.new_token_ids)
        num_tokens = int(t.computed[slot]) + 1
        if not seq.stop_token_ids.isdisjoint(update.new_token_ids):
            seq.stop(update, num_tokens - num_new)
        dropped = num_new - len(update.new_token_ids)
        num_tokens -= dropped
        self.counters.num_sampled_tokens -= dropped
        if num_tokens >= seq.limit and update.finish_reason is None:
            update.finish_reason = FinishReason.LENGTH
        if seq.request.is_quiet:
            is_due = update.finish_reason is not None or seq.num_reported == seq.prompt_len
            update.new_token_ids = t.token_ids[slot, seq.num_reported : num_tokens].tolist() if is_due else []
            seq.num_reported = num_tokens if is_due else seq.num_reported
        if update.finish_reason is not None:
            self.wants.end(slot)
            self._retire(seq, dropped)
            self._forget(seq)
            update.drafts = seq.drafts if seq.drafts.num_drafts else None
            return num_new - dropped
        t.end[slot] = seq.limit - 1
        if seq.asked:
            t.asked[slot] &= ~self.features.prompt_only
            t.end[slot] = 0 if t.is_watched(slot) else seq.limit - 1
        if seq.host_bound:
            t.ready_at[slot] = 0
        return num_new

    def _publish_some(self) -> None:
        """Law 8: blocks of sampled tokens, of those that are overdue most; of the others another time."""
        t, slots = self.table, self._decoding
        overdue = t.computed[slots] - self.kv.publish_at[slots]
        due = np.flatnonzero(overdue >= 0)
        most = max(4, self.options.num_slots // 32)
        if len(due) > most:
            due = due[np.argpartition(-overdue[due], most)[:most]]
        slots = slots[due]
        for seq, num_computed in zip(t.occupants(slots), t.computed[slots].tolist(), strict=True):
            self.kv.publish(seq.slot, seq.prefix, t.token_ids[seq.slot, :num_computed])

    def _fail(self, slot: int, num_new: int, message: str) -> SeqUpdate:
        """End a sequence of which a worker has said what is wrong; others have nothing to do with it."""
        self.table.computed[slot] -= num_new  # its row's tokens mean nothing
        update = self.abort(self.table.names[slot], FinishReason.ERROR)
        assert update is not None, f"a row of slot {slot} is alive, but nobody is there"
        update.error = message
        return update

    # What others ask

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, those that wait for a load included."""
        return len(self._sequences) - self.num_running

    def running(self) -> list[Sequence]:
        """Sequences in slots, oldest first."""
        return list(self._running)

    def waiting(self, most: int) -> list[Sequence]:
        """The first `most` sequences of the queue."""
        return self._waiting.first(most)

    def rows_asking(self, plan: StepPlan, bits: int) -> list[AskingRow]:
        """Whose requests ask for one of these features; of the plan that was made last."""
        t, slots = self.table, plan.rows.slots
        rows: list[AskingRow] = []
        for index in np.flatnonzero(t.asked[slots] & bits).tolist():
            slot = int(slots[index])
            seq = t.seqs[slot]
            if seq is not None:
                num_draft = 0 if plan.rows.num_draft is None else int(plan.rows.num_draft[index])
                tokens, samples = t.tokens(slot), t.is_decoding(slot)
                rows.append(AskingRow(index, seq.request, tokens, num_draft, samples))
        return rows

    def num_tokens(self, seq: Sequence) -> int:
        """Those of a running sequence that have landed, the prompt included."""
        return len(self.table.tokens(seq.slot))

    def expect_drafts(self, seq: Sequence, num_draft: int, *, are_forced: bool = False) -> None:
        """The host has seen what a host-bound sequence has drafted; its next row may verify so many."""
        self.table.drafts[seq.slot] = num_draft if are_forced else min(num_draft, self.table.want[seq.slot])

    def rows_in_flight(self) -> Flight:
        """The plan that comes home next."""
        return self._inflight[0]

    def clear_prefix_cache(self) -> None:
        """Forget every prefix.  Sequences that run keep their pages, and go on publishing."""
        self.kv.clear()
        self.features.forget()

    def check(self, inflight: Iterable[StepPlan]) -> None:
        """Assert the invariants between two steps; `inflight`: plans that have not been committed."""
        t, running = self.table, list(self._running)
        assert len(running) == len(self._decoding) + len(self._prefilling), "who runs"
        num_streams = np.count_nonzero(t.asked[self._decoding] & STREAMED)
        assert num_streams == self._num_streams, "whose users read along"
        self.kv.check([seq.slot for seq in running])
        draining = [slot for _, slot in self._draining]
        taken = [*(seq.slot for seq in running), *draining]
        assert sorted(taken + self._slots) == list(range(self.options.num_slots)), "slots"
        plans = list(inflight)
        assert [plan.id for plan in plans] == [flight.plan_id for flight in self._inflight], "plans in flight"
        num_query, num_draft = np.zeros((2, len(t.planned)), dtype=np.int64)
        for plan, flight in zip(plans, self._inflight, strict=True):
            for row, epoch in zip(plan.rows, flight.epochs.tolist(), strict=True):
                is_alive = epoch == t.epoch[row.slot]
                assert is_alive or row.slot in draining, "a stale row's slot is free"
                num_query[row.slot] += row.num_query * is_alive
                num_draft[row.slot] += row.num_draft * is_alive
        for seq in running:
            slot = seq.slot
            assert seq.status is Status.RUNNING, f"sequence {seq.id} runs, but is {seq.status}"
            assert t.seqs[slot] is seq and t.ids[slot] == seq.id, "whose slot it is"
            assert t.planned[slot] == t.computed[slot] + num_query[slot], "upper bound"
            is_decoding = t.is_decoding(slot)
            assert (slot in self._decoding) == is_decoding, "who decodes"
            assert t.drafted[slot] - t.verified[1, slot] == num_draft[slot], "drafts in flight"
            written = min(int(t.planned[slot]), seq.limit + self.options.num_spec)
            assert self.kv.capacity[slot] >= written, "a row in flight has no block"
            first = int(t.first_queries(np.array([slot]))[0])
            assert self.kv.is_private_from(slot, first), "its next row writes a shared block"
            assert self.kv.sees_from(slot, first), "its next row sees what has been given back"
