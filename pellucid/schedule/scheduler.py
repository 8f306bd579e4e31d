"""Decides what each step computes: counts of tokens, slots and blocks, never token ids.

There are no phases.  Every sequence has tokens that are known and tokens that are computed, and a step closes
the gap under one token budget: decodes first, then prompt chunks, then admissions.  Plans are made while
older ones are in flight; `commit` corrects what was an upper bound.  Knows nothing of devices or text.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

from pellucid.kv.connector import KVConnector, NullConnector
from pellucid.kv.manager import KVManager, PrefixHit
from pellucid.schedule.chorus import Chorus
from pellucid.schedule.pace import Pace, Unpaced
from pellucid.schedule.plan import Admission, Extras, Ints, Row, StepPlan, StepResult, ints
from pellucid.schedule.queue import AgeQueue
from pellucid.schedule.sequence import NEVER, Sequence, Status
from pellucid.schedule.step import SchedulerOptions, Step
from pellucid.schedule.transfers import Transfers
from pellucid.types import FinishReason, Request, SeqUpdate


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the beginning."""

    num_prompt_tokens: int = 0  # of the requests that were admitted
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0  # rows with drafts that came home
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafts
    num_accepted_per_position: list[int] = field(default_factory=list[int])

    def count_drafts(self, num_draft: int, num_accepted: int) -> None:
        """A row with drafts has come home."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1


@dataclass(frozen=True, slots=True)
class HostBoundRow:
    """What a grammar must see of a sequence to mask its next tokens."""

    request: Request
    token_ids: Ints  # committed, prompt included; not to be changed
    drafts: list[int]


class Scheduler:
    """Owns all sequences, slots and (through `kv`) blocks.  One thread."""

    def __init__(
        self,
        options: SchedulerOptions,
        kv: KVManager,
        connector: KVConnector | None = None,
        pace: Pace | None = None,
    ) -> None:
        assert connector is None or kv.enable_prefix_caching, "loads arrive through the prefix cache"
        self.options, self.kv = options, kv
        self.pace: Pace = pace or Unpaced()
        self.counters = SchedulerCounters(num_accepted_per_position=[0] * options.num_spec)
        self._sequences: dict[int, Sequence] = {}  # unfinished, by id
        self._by_request: dict[str, Sequence] = {}
        self._waiting = AgeQueue()
        self._prefilling = AgeQueue()
        self._decoding: list[Sequence] = []  # the first goes first; a removal replaces the list
        self._last: list[Sequence] = []  # whose rows the last plan had, if it had nothing but decodes
        self._chorus: Chorus | None = None  # of all that decode
        self._slots = list(range(options.num_slots - 1, -1, -1))
        self._quarantine: dict[tuple[int, int], list[int]] = {}  # (seq id, epoch): [slot, rows in flight]
        self._retired: list[int] = []  # slots that the next plan reports
        self._transfers = Transfers(kv, connector or NullConnector())
        self._watermark = [int(options.watermark * pool.num_blocks) for pool in kv.pools]
        self._inflight: deque[list[Sequence]] = deque()  # whose rows they are, of plans not yet committed
        self._next_seq_id = self._next_plan_id = 0
        self._committed = -1

    # Requests come and go

    def add(self, request: Request) -> SeqUpdate | None:
        """Take a request.  One that could never run is answered at once."""
        assert request.id not in self._by_request, f"request id {request.id!r} is in use"
        refusal = self._refuse(request)
        if refusal is not None:
            return SeqUpdate(request.id, finish_reason=FinishReason.ERROR, error=refusal)
        prompt, seq_id = request.prompt_token_ids, self._next_seq_id
        self._next_seq_id += 1
        by_priority = self.options.policy == "priority"
        seq = Sequence(
            id=seq_id,
            request=request,
            key=(request.priority, request.arrival, seq_id) if by_priority else (0, 0.0, seq_id),
            limit=self._limit(request),
            table=self.kv.new_table(request.lora, request.cache_salt),
            prompt_len=len(prompt),
            tokens=ints(prompt),
            host_bound=request.grammar is not None,
            stop_token_ids=request.stop_token_ids,
            is_quiet=request.is_quiet,
            is_streamed=request.is_streamed,
            min_len=len(prompt) + request.sampling.min_tokens,
            num_told=len(prompt),
        )
        self._sequences[seq_id] = self._by_request[request.id] = seq
        self._waiting.add(seq)
        return None

    def _limit(self, request: Request) -> int:
        longest, max_tokens = self.options.max_model_len, request.sampling.max_tokens
        return longest if max_tokens is None else min(longest, len(request.prompt_token_ids) + max_tokens)

    def _refuse(self, request: Request) -> str | None:
        """Law 10: why this request could never run, in words."""
        prompt_len, limit = len(request.prompt_token_ids), self._limit(request)
        longest, room = self.options.max_model_len, self.kv.max_tokens - self.options.num_spec
        if not prompt_len:
            return "the prompt has no tokens; give at least one"
        if prompt_len >= longest:
            return (
                f"prompt has {prompt_len:,} tokens, max_model_len is {longest:,} with the answer; "
                "raise --max-model-len or shorten it"
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
        if seq.status is Status.RUNNING:
            self._retire(seq)
        elif seq.status is Status.WAITING:
            self._waiting.remove(seq)
        # A load under way keeps its blocks until it ends.
        self._forget(seq)
        update = seq.update(seq.take_untold())
        update.finish_reason = reason
        return update

    def fail_all(self, message: str) -> list[SeqUpdate]:
        """Answer every request with an error: the workers are gone, and with them all state."""
        if self._chorus is not None:
            self._chorus.settle(None)  # for its tokens; nobody will find what it publishes
        updates = [seq.update(seq.take_untold()) for seq in self._sequences.values()]
        for update in updates:
            update.finish_reason, update.error = FinishReason.ERROR, message
        for seq in list(self._sequences.values()):
            self._forget(seq)
        return updates

    def _forget(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        del self._sequences[seq.id], self._by_request[seq.request.id]

    # Plan

    def next_plan(self) -> StepPlan | None:
        """The next step, or None if nothing is ready.  Either way time passes (law 1)."""
        options = self.options
        num_propose = options.num_propose(self.num_running)
        step = Step(self._next_plan_id, options.max_num_batched_tokens, num_propose)
        self._next_plan_id += 1
        self._plan_decodes(step)
        if self._prefilling or self._waiting:
            self._pace_prompts(step)
            self._plan_chunks(step)
            self._admit_waiting(step)
        kv_meta = self._transfers.plan_meta()
        if not step.rows and not kv_meta:
            return None
        retired, self._retired = self._retired, []
        self._tell_pace(step)
        self._inflight.append(step.seqs)
        return step.to_plan(self._committed, retired, kv_meta)

    def _plan_decodes(self, step: Step) -> None:
        """A row for each decoding sequence that is ready; who finds no room goes first in the next step."""
        plan_id, next_ready = step.id, step.id + self.options.pp
        kept = self._prompt_share()
        if self._chorus is not None:
            if not kept and self._chorus.plan(step, self.kv):
                return
            self._break_up()
        rows, seqs = step.rows, step.seqs
        share = -(-len(self._decoding) // self.options.pp)  # a pipeline's
        max_rows = min(share, step.budget - kept)
        for seq in self._decoding:
            if seq.ready_at > plan_id:
                continue
            if len(rows) >= max_rows:
                self._let_go_first(seq)
                break
            row = seq.decode_row
            if row is not None and seq.num_planned < seq.calm_plan:
                rows.append(row)
                seqs.append(seq)
                seq.num_planned += 1
                seq.num_inflight += 1
                seq.ready_at = next_ready
            else:
                self._plan_decode(step, seq, kept)
                max_rows = min(share, len(rows) + step.budget - kept)
        if not kept and seqs:
            self._form_chorus(seqs, rows)

    def _form_chorus(self, seqs: list[Sequence], rows: list[Row]) -> None:
        """If a plan has the same rows as the one before, and all that decode, the next ones are like it."""
        are_all = len(seqs) == len(self._decoding) and seqs == self._last
        if are_all and self.options.pp == 1 and not self.options.num_spec:
            self._chorus = Chorus.form(seqs, rows, self.options)
        self._last = seqs

    def _break_up(self) -> None:
        """From now on each sequence goes its own way."""
        self.settle()
        self._chorus = None

    def _plan_decode(self, step: Step, seq: Sequence, kept: int) -> None:
        """A row, if there are blocks for it, that leaves `kept` tokens of the budget."""
        num_draft = min(seq.num_drafts, step.budget - kept - 1)
        num_planned = seq.num_planned + 1 + num_draft
        num_written = num_planned + step.num_propose
        if num_written > seq.table.capacity and not self._reserve(step, seq, num_written):
            return
        row = seq.decode_row
        if row is None or row.num_draft != num_draft:
            row = seq.make_decode_row(num_draft)
        step.add(seq, row)
        seq.num_planned = num_planned
        seq.num_inflight += 1
        seq.num_unsure += num_draft
        seq.ready_at = step.id + self.options.pp
        seq.num_drafts = step.num_propose
        if seq.host_bound or seq.num_certain >= seq.limit:
            self._hold_back(step, seq)
        elif not self.options.num_spec:
            seq.calm_plan = min(seq.table.capacity, seq.limit - 2)

    def _prompt_share(self) -> int:
        """Tokens that decodes leave to prompts, so that neither starves the other."""
        if len(self._prefilling) or (len(self._waiting) and self._slots):
            return max(1, self.options.max_num_batched_tokens // 8)
        return 0

    def _pace_prompts(self, step: Step) -> None:
        """Streams wait for the whole step: prompts get of it what these can bear."""
        if self._prompt_share() and any(seq.is_streamed for seq in self._decoding):
            start = self._prefilling.oldest.num_planned if len(self._prefilling) else 0
            num_waiting = len(self._prefilling) + len(self._waiting)
            room = self.pace.room(step.num_tokens, start, num_waiting)
            step.max_tokens = min(step.max_tokens, step.num_tokens + room)

    def _tell_pace(self, step: Step) -> None:
        num_prompt = reach = 0
        if step.num_chunks:
            for seq, row in step.chunks:
                num_prompt += row.num_query
                reach += row.num_query * (2 * seq.num_planned - row.num_query) // 2
        self.pace.planned(step.num_tokens - num_prompt, num_prompt, reach)

    def _let_go_first(self, seq: Sequence) -> None:
        index = self._decoding.index(seq)
        self._decoding = self._decoding[index:] + self._decoding[:index]

    def _hold_back(self, step: Step, seq: Sequence) -> None:
        """No further row until the host has seen this one: it ends the text, or a grammar must read it."""
        seq.ready_at = NEVER
        if seq.host_bound:
            seq.num_drafts = 0  # the host learns of them with the result
            step.has_grammar = True

    def _plan_chunks(self, step: Step) -> None:
        for seq in self._prefilling:
            if step.budget > 0 and seq.ready_at <= step.id:
                self._plan_chunk(step, seq)

    def _plan_chunk(self, step: Step, seq: Sequence) -> None:
        row = seq.next_chunk(step.budget)
        end = seq.num_planned + row.num_query
        if not self._reserve(step, seq, end + step.num_propose):
            return
        step.add_chunk(seq, row)
        seq.num_planned = end
        seq.num_inflight += 1
        seq.num_drafts = step.num_propose
        if seq.is_decoding:
            self._begin_decoding(step, seq)
        if end >= seq.table.publish_at:
            # Law 8: known tokens are published when planned; stream order makes the blocks valid in time.
            self.kv.publish(seq.table, seq.tokens, end)

    def _begin_decoding(self, step: Step, seq: Sequence) -> None:
        """The last chunk is planned; it samples."""
        self._prefilling.remove(seq)
        # The longest first, and they stay so while all grow alike: what attention does last is then short.
        insort(self._decoding, seq, key=lambda other: -other.num_planned)
        seq.ready_at = step.id + self.options.pp
        if seq.host_bound or seq.num_certain >= seq.limit:
            self._hold_back(step, seq)

    # Admission

    def _admit_waiting(self, step: Step) -> None:
        while len(self._waiting) and self._slots and step.budget > 0 and not step.has_preempted:
            seq = self._waiting.oldest
            hit = self.kv.match(seq.table, seq.tokens, seq.max_cached)
            if self._transfers.start_load(seq, hit, self._watermark):
                self._waiting.remove(seq)
                seq.status = Status.WAITING_KV  # without slot and blocks
            elif self._has_room(step, seq, hit):
                self._admit(step, seq, hit)
            else:
                break

    def _has_room(self, step: Step, seq: Sequence, hit: PrefixHit) -> bool:
        """Blocks for all its known tokens and the first drafts, and some to spare for those that run.

        Sequences of lower priority make room; equals do not.
        """
        num_tokens = self._most(seq, len(seq.tokens) + step.num_propose)
        while not self.kv.can_adopt(hit, num_tokens, self._spare):
            victims = [v for v in self._running() if v.key[0] > seq.key[0] and not step.has_chunk(v.id)]
            if not victims:
                return False
            self._preempt(step, max(victims, key=lambda v: v.key))
        return True

    @property
    def _spare(self) -> list[int]:
        return self._watermark if self.num_running else [0] * len(self._watermark)

    def _admit(self, step: Step, seq: Sequence, hit: PrefixHit) -> None:
        self._waiting.remove(seq)
        self._prefilling.add(seq)
        seq.enter(self._slots.pop(), hit.num_tokens, step.id)
        self.kv.adopt(seq.table, hit)
        if not seq.first_scheduled:
            seq.first_scheduled = time.monotonic()
            seq.num_cached_tokens = hit.num_tokens
            self.counters.num_prompt_tokens += seq.prompt_len
            self.counters.num_cached_tokens += hit.num_tokens
        step.admitted.append(self._admission(seq, hit))
        self._plan_chunk(step, seq)

    def _admission(self, seq: Sequence, hit: PrefixHit) -> Admission:
        """Law 2: the only way on which sampled token ids travel back to the device."""
        request = seq.request
        return Admission(
            seq_id=seq.id,
            slot=seq.slot,
            token_ids=seq.tokens[:],
            prompt_len=seq.prompt_len,
            num_computed=hit.num_tokens,
            limit=seq.limit,
            seed=request.seed,
            sampling=request.sampling,
            stop_token_ids=tuple(sorted(seq.stop_token_ids)),
            bad_words_token_ids=request.bad_words_token_ids,
            blocks=hit.blocks,
        )

    # Blocks and slots

    def _reserve(self, step: Step, seq: Sequence, num_tokens: int) -> bool:
        """Law 3: blocks for the most tokens that may be there, and for the drafts to be proposed behind them.

        Law 7: only a younger sequence makes room.
        """
        num_tokens = self._most(seq, num_tokens)
        while (grown := self.kv.grow([seq.table], [num_tokens])) is None:
            victim = max(self._running(), key=lambda v: v.key)
            if victim.key <= seq.key:
                return False
            self._preempt(step, victim)
        step.grow([seq], grown)
        return True

    def _most(self, seq: Sequence, num_tokens: int) -> int:
        """No drafts are written further behind the limit than a row at it carries."""
        return min(num_tokens, seq.limit + self.options.num_spec)

    def _preempt(self, step: Step, victim: Sequence) -> None:
        """Send a sequence back to the queue; it will be computed again."""
        if step.take_back_decode(victim.id) is not None:
            victim.num_inflight -= 1
        self._retire(victim)
        victim.status = Status.WAITING
        self._waiting.add(victim)
        step.has_preempted = True
        self.counters.num_preemptions += 1

    def _retire(self, seq: Sequence) -> None:
        """Finish, abort, preemption.

        Law 5: blocks are free at once, for work later in stream order; the slot when its last row has landed.
        """
        self._break_up()
        self._transfers.offer_for_save(seq)
        self.kv.release(seq.table)
        self._retired.append(seq.slot)
        if seq.num_inflight:
            self._quarantine[seq.id, seq.epoch] = [seq.slot, seq.num_inflight]
        else:
            self._slots.append(seq.slot)
        if seq.is_decoding:
            self._decoding = self._decoding.copy()  # it may be under iteration
            self._decoding.remove(seq)
        else:
            self._prefilling.remove(seq)
        seq.leave()

    def poll(self) -> None:
        """Take back what the connector has done with, whether or not a step comes home."""
        self._end_transfers([])

    def _end_transfers(self, kv_done: list[object]) -> None:
        for seq_id in self._transfers.end(kv_done):
            seq = self._sequences.get(seq_id)
            if seq is not None and seq.status is Status.WAITING_KV:
                seq.status = Status.WAITING  # admission finds the blocks in the cache, or computes them
                self._waiting.add(seq)

    # Commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[SeqUpdate]:
        """Take in what a plan yielded.  Plans come home in the order in which they were made."""
        assert result.plan_id == plan.id, f"plan {plan.id} is due, plan {result.plan_id} came home"
        self._committed = plan.id
        seqs, updates = self._inflight.popleft(), None
        if self._chorus is not None and seqs is self._chorus.seqs:
            if not result.extras:
                updates = self._chorus.land(result.token_ids, self.kv)
            if updates is None:
                self._break_up()
        if updates is None:
            updates = self._commit_rows(seqs, plan, result)
        self.counters.num_sampled_tokens += len(result.token_ids)
        self._end_transfers(result.kv_done)
        return updates

    def _commit_rows(self, seqs: list[Sequence], plan: StepPlan, result: StepResult) -> list[SeqUpdate]:
        """Row by row."""
        updates: list[SeqUpdate] = []
        extras = result.extras or None
        for index, (seq, row, new) in enumerate(zip(seqs, plan.rows, result.tokens, strict=True)):
            if seq.epoch != row.epoch:
                self._land_stale(row)  # law 4
                continue
            seq.num_inflight -= 1
            if seq.num_computed < seq.calm_landing and new[0] not in seq.stop_token_ids and extras is None:
                seq.num_computed += 1
                seq.tokens.extend(new)
                if not seq.is_quiet:
                    updates.append(seq.update(new))
                continue
            update = self._commit_tokens(seq, row, new) if new else self._commit_chunk(seq, row)
            if extras is not None:
                _add_extras(update, seq, index, extras)
            if update.new_token_ids or update.prompt_logprobs:
                updates.append(update)
        return updates

    def _land_stale(self, row: Row) -> None:
        resting = self._quarantine[row.seq_id, row.epoch]
        resting[1] -= 1
        if not resting[1]:
            self._slots.append(resting[0])
            del self._quarantine[row.seq_id, row.epoch]

    def _commit_chunk(self, seq: Sequence, row: Row) -> SeqUpdate:
        seq.num_computed += row.num_query
        assert seq.num_computed < seq.prefill_len, f"a row yielded nothing, below the limit of {seq.limit}"
        return seq.update([])

    def _commit_tokens(self, seq: Sequence, row: Row, new: list[int]) -> SeqUpdate:
        tokens, update = seq.tokens, seq.update(new)
        wasted = 1 + row.num_draft - len(new)
        seq.num_computed += row.num_query - wasted
        if row.num_draft:
            self.counters.count_drafts(row.num_draft, len(new) - 1)
            seq.num_planned -= wasted  # law 3: correct the upper bound
            seq.num_unsure -= row.num_draft
            if seq.num_certain >= seq.limit:
                seq.ready_at = NEVER  # the rows in flight finish it
        if not seq.stop_token_ids.isdisjoint(new):
            seq.stop(update)
        tokens.extend(update.new_token_ids)
        if seq.num_computed >= seq.table.publish_at:  # law 8: blocks of sampled tokens at commit
            self.kv.publish(seq.table, tokens, min(seq.num_computed, len(tokens)))
        if len(tokens) >= seq.limit and update.finish_reason is None:
            update.finish_reason = FinishReason.LENGTH
        if seq.is_quiet:
            is_due = update.finish_reason is not None or seq.num_told == seq.prompt_len
            update.new_token_ids = seq.take_untold() if is_due else []
        if update.finish_reason is not None:
            self._retire(seq)
            self._forget(seq)
        elif seq.host_bound:
            seq.ready_at = 0
        elif not self.options.num_spec:
            seq.calm_landing = min(seq.table.publish_at - 1, seq.limit - 2)
        return update

    # What others ask

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def has_transfers(self) -> bool:
        """Does a connector hold blocks, be it under way or not yet told to the workers?"""
        return len(self._transfers) > 0

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, those that wait for a load included."""
        return len(self._sequences) - self.num_running

    def settle(self) -> None:
        """Bring all sequences up to date: those of a chorus may be some steps behind."""
        if self._chorus is not None:
            self._chorus.settle(self.kv)

    def running(self) -> list[Sequence]:
        """Sequences in slots, oldest first."""
        return sorted(self._running(), key=lambda seq: seq.key)

    def waiting(self, most: int) -> list[Sequence]:
        """The first `most` sequences of the queue."""
        return list(islice(self._waiting, most))

    def host_bound_rows(self, plan: StepPlan) -> dict[int, HostBoundRow]:
        """By row index, what a grammar must see; asked for the plan that was made last."""
        rows: dict[int, HostBoundRow] = {}
        for index, row in enumerate(plan.rows):
            seq = self._sequences[row.seq_id]
            if seq.host_bound and seq.is_decoding:
                rows[index] = HostBoundRow(seq.request, seq.tokens, seq.drafts[: row.num_draft])
        return rows

    def clear_prefix_cache(self) -> None:
        """Forget every prefix.  Sequences that run keep their blocks, and go on publishing."""
        self.settle()
        self.kv.clear()

    def _running(self) -> Iterable[Sequence]:
        return chain(self._decoding, self._prefilling)

    def check(self, inflight: Iterable[StepPlan]) -> None:
        """Assert the invariants between two steps; `inflight`: plans that have not been committed."""
        self.kv.check([*(s.table.blocks for s in self._running()), *(t.blocks for t in self._transfers)])
        taken = [*(s.slot for s in self._running()), *(slot for slot, _ in self._quarantine.values())]
        assert sorted(taken + self._slots) == list(range(self.options.num_slots)), "slots"
        queries: dict[tuple[int, int], list[int]] = {}
        for row in chain.from_iterable(plan.rows for plan in inflight):
            queries.setdefault((row.seq_id, row.epoch), []).append(row.num_query)
        for seq in self._running():
            mine = queries.pop((seq.id, seq.epoch), [])
            chorus = self._chorus
            num_planned, num_landed = chorus.unsettled if chorus and seq in chorus.seqs else (0, 0)
            assert seq.status is Status.RUNNING, f"sequence {seq.id} runs, but is {seq.status}"
            num_ahead = num_planned - num_landed
            assert seq.num_planned + num_ahead == seq.num_computed + sum(mine), "upper bound"
            assert seq.num_inflight + num_ahead == len(mine), "rows in flight"
            first_write = seq.first_write + num_planned
            assert self.kv.is_private_from(seq.table, first_write), "its next row writes a shared block"
        resting = {key: num_rows for key, (_, num_rows) in self._quarantine.items()}
        assert resting == {key: len(rows) for key, rows in queries.items()}, "quarantine"


def _add_extras(update: SeqUpdate, seq: Sequence, index: int, extras: Extras) -> None:
    """Log-probabilities, and the drafts that a host-bound sequence's grammar must know."""
    if index in extras.logprobs:
        update.logprobs = extras.logprobs[index][: len(update.new_token_ids)]
    if index in extras.prompt_logprobs:
        # A chunk asks for what has not arrived, and chunks come home in order: none comes twice.
        update.prompt_logprobs = extras.prompt_logprobs[index]
        seq.num_prompt_logprobs += len(update.prompt_logprobs)
    # Where no token may end a text, its grammar does, before the next is sampled; behind a draft it cannot.
    if index in extras.drafts and not seq.is_finished and seq.may_end:
        seq.drafts = extras.drafts[index]
        seq.num_drafts = len(seq.drafts)
