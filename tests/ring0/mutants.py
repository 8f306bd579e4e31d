"""Break one law at a time, and see that ring 0 notices.

Each fault replaces texts of the real files (or of the toy worker, for the workers' laws) in fresh module
objects; nothing on disk changes.  Law 13, which is of several engines, has a simulation of its own.  A fault
that nothing shows is a surprise; so is an equivalent that fails.

    python -m tests.ring0.mutants [N] [WORD]    at most N configurations (default 1000), faults with WORD
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import sys
import time
from types import CodeType, ModuleType

MODULES = {  # in the order of import
    "hashes": "pellucid.kv.hashes",
    "kinds": "pellucid.kv.kinds",
    "layout": "pellucid.kv.layout",
    "sparse": "pellucid.kv.sparse",
    "pool": "pellucid.kv.pool",
    "manager": "pellucid.kv.manager",
    "lending": "pellucid.connectors.lending",
    "connectors.base": "pellucid.connectors.base",
    "sequence": "pellucid.schedule.sequence",
    "queue": "pellucid.schedule.queue",
    "step": "pellucid.schedule.step",
    "transfers": "pellucid.connectors.transfers",
    "host": "pellucid.connectors.host",
    "table": "pellucid.schedule.table",
    "news": "pellucid.schedule.news",
    "features": "pellucid.features.host",
    "wants": "pellucid.spec.wants",
    "stop_tokens": "pellucid.schedule.stop_tokens",
    "scheduler": "pellucid.schedule.scheduler",
    "logprobs": "pellucid.features.logprobs.host",
    "core": "pellucid.engine.core",
    "model": "tests.ring0.model",
    "connector": "tests.ring0.connector",
    "worker": "tests.ring0.worker",
    "simulate": "tests.ring0.simulate",
}
LOCKSTEP = {
    "pace": "pellucid.lockstep.pace",
    "launcher": "pellucid.lockstep.launcher",
    "lockstep": "tests.lockstep.simulate",
}
Edit = tuple[str, str, str]  # module, text, what replaces it ($ is the text itself)

NEWEST = "max(plan.id - self.pp, plan.committed), self.pipeline"
PHASES = "(self.apply_feedback, self.retire, self.admit)"
YOUNGER = "takewhile(lambda other: other.key > seq.key, reversed(self._running))"
ENOUGH = (
    "        if num is None:\n            return False\n        for victim in list(islice(victims, num)):"
)
SUBMITTED = "        self.flights.append(flight)\n"

FAULTS: dict[str, list[Edit]] = {
    "3 no blocks for what a prompt drafts": [("scheduler", "end + self.options.num_behind):", "end):")],
    "3 no room for what an admission drafts": [
        (
            "scheduler",
            "num_tokens = len(seq.tokens) + self.options.num_behind",
            "num_tokens = len(seq.tokens)",
        )
    ],
    "3 tokens behind a stop are kept": [
        ("sequence", "update.new_token_ids = update.new_token_ids[: i + 1]", "pass")
    ],
    "5 a load starts when it is planned": [
        ("worker", SUBMITTED, "$        [stage.start(plan, loads=True) for stage in self.stages]\n"),
        ("worker", "        self.start(plan, loads=True)\n", ""),
    ],
    "5 a save starts when it is planned": [
        ("worker", SUBMITTED, "$        [stage.start(plan, loads=False) for stage in self.stages]\n"),
        ("worker", "        self.start(plan, loads=False)\n", ""),
    ],
    "5 a save starts before its plan's forward": [
        ("worker", "        self.start(plan, loads=True)\n", "$        self.start(plan, loads=False)\n"),
        ("worker", "        self.start(plan, loads=False)\n        return values", "        return values"),
    ],
    "5 the first rank ends a transfer": [
        ("transfers", "        if under_way.num_left:\n            return None\n", "")
    ],
    "8 the last rank's word is all ranks'": [
        ("transfers", "under_way.ok &= ended.ok", "under_way.ok = ended.ok")
    ],
    "5 what a save reads is not held": [("lending", "    kv.hold(transfer.pages)\n", "")],
    "6 feedback too early": [("worker", NEWEST, "max(plan.id - self.pp + 1, plan.committed), self.pipeline")],
    "6 feedback of plans that the host has seen waits": [
        ("worker", NEWEST, "plan.id - self.pp, self.pipeline")
    ],
    "6 feedback of plans that the host has seen alone": [("worker", NEWEST, "plan.committed, self.pipeline")],
    "6 admit before feedback": [("worker", PHASES, "(self.retire, self.admit, self.apply_feedback)")],
    "6 retire before feedback": [("worker", PHASES, "(self.retire, self.apply_feedback, self.admit)")],
    "6 retired forgotten by the worker": [("worker", "self.slots[index] = None", "pass")],
    "6 retired lost on an empty tick": [
        ("scheduler", "            return None\n        retired,", "            self._retired = []\n$")
    ],
    "6 a plan that only carries something is not submitted": [
        ("scheduler", "if not step.num_rows and not carried:", "if not step.num_rows:")
    ],
    "6 compaction on the last stage only": [
        ("worker", "enumerate(feedback.path, 1)", "enumerate(feedback.path * (self.index == self.pp - 1), 1)")
    ],
    "7 a younger one preempts an older one": [
        (
            "scheduler",
            YOUNGER,
            "[v for v in reversed(self._running) if v is not seq and not step.has_chunk(v.slot)]",
        )
    ],
    "7 priority is ignored": [
        (
            "scheduler",
            YOUNGER,
            "sorted(\n"
            "                (v for v in self._running\n"
            "                 if v.key[1:] > seq.key[1:] and not step.has_chunk(v.slot)),\n"
            "                key=lambda victim: victim.key[1:], reverse=True\n"
            "            )",
        ),
    ],
    "7 who is not enough is preempted all the same": [
        (
            "scheduler",
            ENOUGH,
            "        chosen = list(islice(victims, 1 if num is None else num))\n"
            "        for victim in chosen:",
        ),
        (
            "scheduler",
            "victim)\n        return True",
            "victim)\n        return num is not None or bool(chosen)",
        ),
    ],
    "7 shared pages are reckoned to come free": [
        (
            "manager",
            "lacking -= int(np.count_nonzero(refs[pages] == 0))",
            "lacking -= len(np.setdiff1d(pages, [] if hit is None else hit.pages))",
        )
    ],
    "7 pages of the hit are reckoned to come free": [
        ("manager", "            refs[hit.pages] += 1\n", "            pass\n")
    ],
    "7 an arrival preempts its elders": [("scheduler", "if v.key[0] > seq.key[0] and", "if")],
    "8 full hit without recompute": [("sequence", "else len(self.tokens) - 1", "else len(self.tokens)")],
    "8 failed load published": [
        ("transfers", "is_of_use = ok and transfer.is_load", "is_of_use = transfer.is_load")
    ],
    "8 load published before it landed": [
        (
            "host",
            "        self._transfers.begin(transfer, self.connector.load(transfer))",
            "$\n        for i, where, blocks in kv.by_kind(transfer.pages):\n"
            "            kv.pool.publish(i, blocks, [transfer.digests[place] for place in where])",
        )
    ],
    "8 reference counts ignored": [("pool", "self._refs[page] += 1", "self._refs[page] = 1")],
    "8 an evicted block is still found": [
        ("pool", "pages += self._index[kind].pop(digest)", "pages += self._index[kind][digest]"),
    ],
    "8 a hash forgets what lies before its block": [
        ("hashes", "(digest())", "(hashlib.sha256(fresh[offset : offset + 4 * size]).digest())"),
    ],
    "8 a hit valid for one kind only": [
        (
            "manager",
            "for kind, i, _ in self.stripes:\n                del digests",
            "for kind, i, _ in self.stripes[:1]:\n                del digests",
        ),
        (
            "manager",
            "index[digest] for digest in digests[first:]",
            "index.get(digest, [1] * kind.stripes) for digest in digests[first:]",
        ),
    ],
    "8 a window's hit is its last block": [
        (
            "kinds",
            "while place * self.block_size > num * self.block_size - (self.window - 1) and place:",
            "while place == num and place:",
        ),
        (
            "manager",
            "index[digest] for digest in digests[first:]",
            "index.get(digest, [1] * kind.stripes) for digest in digests[first:]",
        ),
    ],
    "5 half a block's stripes are dropped": [
        ("manager", "first:num, which][::-1])", "first:num, which][::-1, : -(-kind.stripes // 2)])"),
    ],
    "5 half a block's stripes are given back behind a window": [
        ("manager", "self.pool.drop(cells)", "self.pool.drop(cells[:, : -(-kind.stripes // 2)])"),
    ],
    "5 windows give back what drafts may fall short of": [
        (
            "scheduler",
            "pass_windows(slots, self.table.first_queries(slots))",
            "pass_windows(slots, self.table.planned[slots])",
        ),
        (
            "scheduler",
            'assert self.kv.sees_from(slot, first), "its next row sees what has been given back"',
            "pass",
        ),
    ],
    "5 who surely ends is planned on, and windows go on without it": [
        ("scheduler", "            slots = self._unfinished(slots)\n", "")
    ],
    "5 a window is a token shorter than what is seen": [
        (
            "kinds",
            "np.maximum(positions - (self.window - 1), 0)",
            "np.maximum(positions - (self.window - 2), 0)",
        ),
    ],
    "5 a window is given back by the row that sees it last": [
        ("scheduler", "        self._pass_windows(np.array([slot]))\n", ""),
        ("scheduler", "        t.planned[slot] = end\n", "$        self._pass_windows(np.array([slot]))\n"),
    ],
    "10 prompts keep what their windows have passed": [
        ("scheduler", "        self._pass_windows(np.array([slot]))\n", ""),
        (
            "scheduler",
            "            self._pass_windows(self._decoding)\n        if self._num_landed",
            "        if self._num_landed",
        ),
    ],
    "10 who lacks a page does not look behind windows": [
        (
            "scheduler",
            "        self._pass_windows(self._decoding)\n        if self._grow",
            "        if self._grow",
        ),
    ],
    "10 a chunk's pages are not reckoned beside its window's": [
        (
            "kinds",
            "size, seen = self.block_size, self.window - 1 + chunk",
            "size, seen = self.block_size, self.window",
        ),
    ],
    "12 a preempted one forgets what it had sampled": [
        ("scheduler", "victim.tokens = ints(self.table.tokens(victim.slot).tobytes())", "pass"),
    ],
    "12 what was sampled elsewhere counts as prompt": [
        ("scheduler", "prompt_len=len(request.prompt_token_ids),", "prompt_len=len(tokens),")
    ],
    "12 what was told elsewhere is told again": [
        ("scheduler", "num_reported=len(tokens),", "num_reported=len(request.prompt_token_ids),")
    ],
    "12 what was sampled elsewhere is sampled again": [
        ("scheduler", "        tokens.extend(request.prior_token_ids)\n", "")
    ],
    "12 who has moved has the seed of its new place": [
        ("scheduler", "seed=request.seed,", "seed=request.seed + len(request.prior_token_ids),")
    ],
    "12 the prompt is scored again elsewhere": [("logprobs", "if seq.request.prior_token_ids:", "if False:")],
    "12 a seed is the stay's": [
        ("scheduler", "seed=request.seed,", "seed=request.seed + int(self.table.epoch[seq.slot]),"),
    ],
    "12 its limit counts from where it goes on": [
        (
            "scheduler",
            "limit=seq.limit,\n            seed",
            "limit=seq.limit + len(seq.tokens) - seq.prompt_len,\n            seed",
        ),
    ],
    "9 noise depends on the step": [
        ("worker", "slot.seed, position, bits", "slot.seed + plan.id, position, bits")
    ],
    "9 prompt logprobs counted twice": [("logprobs", "landed.seq.num_scored += len(entries)", "pass")],
    "9 prompt logprobs behind a prefix hit": [
        ("sequence", "self.num_scored if self.num_scored < self.scored_end else", "")
    ],
    "10 too long is not answered": [("scheduler", "if prompt_len >= longest:", "if False:")],
    "10 a dead worker is not noticed": [
        (
            "core",
            'has failed")\n            self._die(error)',
            'has failed")\n            self._inflight.clear()',
        )
    ],
    "10 death answers nobody": [
        ("core", "self._tell(preparing + self.scheduler.fail_all(self.error))", "pass")
    ],
    "10 who comes after death waits for ever": [
        ("core", "        if self.error is not None:\n", "        if False:\n")
    ],
    "10 an abort is not answered": [("scheduler", "        update.finish_reason = reason\n", "")],
    "10 nobody is admitted": [
        ("scheduler", "while len(self._waiting) and self._slots", "while False and self._slots")
    ],
    "10 a blocked head is not looked at when a connector gives blocks back": [
        ("host", "        self._scheduler.look_again()\n", "")
    ],
    "10 a loaded sequence is not woken": [("host", "self._scheduler.release(transfer.seq_id)", "pass")],
    "0 a step has more tokens than its budget": [
        ("step", "self.num_chunked += row.num_query", "pass"),
    ],
    "0 drafts do not count as tokens of their step": [
        ("step", "self.draft, self.num_drafts = draft, int(draft.sum())", "self.draft = draft"),
    ],
    "0 prompts take more than the prefill budget": [
        ("scheduler", "step.max_tokens = min(step.max_tokens, step.num_tokens + room)", "pass"),
    ],
    "0 the last chunk asks for no logits": [
        ("sequence", "return max(1, num_logits) if end == num_known else num_logits", "return num_logits"),
    ],
    "1 an empty tick does not age": [
        ("scheduler", "            return None\n        retired,", "            self._next_plan_id -= 1\n$"),
    ],
    "2 a decode is planned before its feedback": [
        ("scheduler", "t.ready_at[slots] = step.id + self.options.pp", "t.ready_at[slots] = step.id + 1"),
    ],
    "2 the first decode is planned before its feedback": [
        ("scheduler", "if is_over else step.id + self.options.pp", "if is_over else step.id + 1"),
    ],
    "2 host-bound planned while in flight": [
        (
            "scheduler",
            "t.ready_at[slots[asked & HOST_BOUND > 0]] = NEVER",
            "pass",
        ),
    ],
    "2 a host-bound sequence never goes on": [
        ("scheduler", "            t.ready_at[slot] = 0\n", "            pass\n"),
    ],
    "3 no correction at commit": [
        ("scheduler", "            t.planned[slots] -= fell\n", ""),
    ],
    "3 the certain end is not corrected at commit": [
        ("scheduler", "draft, 1), draft, stood)", "draft, 1), 0, stood)"),
    ],
    "3 accepted drafts are certain when they are planned": [
        ("scheduler", "            t.drafted[slots] += draft\n", ""),
    ],
    "3 blocks for one token, not for 1+k": [
        (
            "scheduler",
            "written = behind + draft",
            "written = behind",
        ),
    ],
    "3 no blocks for what a decode drafts": [
        (
            "scheduler",
            "wanted = t.planned[slots] + 1 + self.options.num_behind  # law 3",
            "wanted = t.planned[slots] + 1",
        ),
        ("scheduler", "behind = t.planned[slots] + self.options.num_behind", "behind = t.planned[slots]"),
        (
            "scheduler",
            "soon = np.minimum(t.planned[slots] + (UPKEEP + 1) * (1 + num_spec), most)",
            "soon = np.minimum(t.planned[slots] + 1, most)",
        ),
        ("scheduler", "later = np.minimum(soon + self.kv.block_size, most)", "later = soon"),
        ("scheduler", "capacity[slots] - self.options.reach, t.limit", "capacity[slots], t.limit"),
    ],
    "3 blocks for the drafts that are wanted, not for all": [
        (
            "scheduler",
            "= t.planned[slots] + 1 + self.options.num_behind",
            "= t.planned[slots] + 1 + t.want[slots]",
        ),
        (
            "scheduler",
            "t.planned[slots] + (UPKEEP + 1) * (1 + num_spec), most)",
            "t.planned[slots] + 1, most)",
        ),
        ("scheduler", "later = np.minimum(soon + self.kv.block_size, most)", "later = soon"),
        ("scheduler", "capacity[slots] - self.options.reach, t.limit", "capacity[slots], t.limit"),
    ],
    "3 no block for what is written beyond the drafts": [
        ("step", "return self.num_spec + self.num_extra", "return self.num_spec"),
    ],
    "3 drafts that nobody has wanted are verified": [
        ("scheduler", "t.drafts[sampled] = want", "t.drafts[sampled] = self.options.num_spec"),
    ],
    "3 as many drafts are asked for as who wants fewest": [
        (
            "scheduler",
            "self.wants.num_propose(sampled, [row.slot for row in step.chunks])",
            "int(want.min(initial=0))",
        ),
    ],
    "3 a host-bound row verifies what the host has not seen": [
        ("scheduler", "want[t.asked[sampled] & HOST_BOUND > 0] = 0", "pass"),
    ],
    "3 drafts that find no block are verified all the same": [
        ("scheduler", "np.where(has_room, draft, np.clip(capacity[slots] - behind, 0, draft))", "draft"),
    ],
    "3 a block is due a token late": [
        (
            "scheduler",
            "capacity = self.kv.capacity[slots] - self.options.reach",
            "capacity = self.kv.capacity[slots] + 1",
        ),
    ],
    "3 nobody attends to who is due": [
        ("scheduler", "if np.count_nonzero(planned > t.due[slots]):", "if False:"),
    ],
    "3 nobody looks whether drafts have blocks": [
        (
            "scheduler",
            "= self.kv.capacity[slots] - self.options.reach",
            "= self.kv.capacity[slots] - self.options.num_behind",
        ),
    ],
    "3 who gets no block decodes all the same": [
        (
            "scheduler",
            "return slots[wanted <= capacity[slots]]",
            "return slots[capacity[slots] > 0]",
        ),
    ],
    "7 who has been preempted decodes all the same": [
        (
            "scheduler",
            "return slots[wanted <= capacity[slots]]",
            "return slots[(wanted <= capacity[slots]) | (capacity[slots] == 0)]",
        ),
    ],
    "3 a landing overlooks a stop": [
        ("scheduler", "self._find_stops(slots, tokens, is_due)", "pass"),
    ],
    "3 stops are forgotten with the first that has them": [
        ("stop_tokens", "            self._counts[stops] -= 1", "            self._counts[stops] = 0"),
    ],
    "3 only few stops are looked for": [
        ("stop_tokens", "for stop in self._ids.tolist():", "for stop in self._ids.tolist()[:1]:"),
    ],
    "10 a landing overlooks the end": [
        ("scheduler", "is_due = computed >= t.end[slots]", "is_due = computed > t.end[slots]"),
    ],
    "10 what a watched row brings is overlooked": [
        (
            "scheduler",
            "t.end[slot] = 0 if t.is_watched(slot) else seq.limit - 1",
            "t.end[slot] = seq.limit - 1",
        ),
    ],
    "3 tokens land a place too late": [
        ("scheduler", "t.land(slots, computed, tokens)", "t.land(slots, computed + 1, tokens)"),
    ],
    "3 chunks overwrite what they compute": [
        (
            "scheduler",
            "np.where(num_new > 0, slots, t.spare)",
            "slots",
        ),
    ],
    "3 one token of a row lands": [
        ("table", "width = tokens.shape[1]", "tokens, width = np.ascontiguousarray(tokens[:, :1]), 1"),
    ],
    "8 upkeep publishes what it has planned": [
        (
            "scheduler",
            "overdue = t.computed[slots] - self.kv.publish_at[slots]",
            "overdue = t.planned[slots] - self.kv.publish_at[slots]",
        ),
        (
            "scheduler",
            "zip(t.occupants(slots), t.computed[slots].tolist(), strict=True)",
            "zip(t.occupants(slots), t.planned[slots].tolist(), strict=True)",
        ),
    ],
    "8 sampled tokens published before their KV": [
        (
            "scheduler",
            "tokens[:num_computed])\n        self._blocked",
            "tokens)\n        self._blocked",
        ),
        (
            "scheduler",
            "        if num_computed >= self.kv.publish_at[slot]:  # law 8",
            "        if len(tokens) >= self.kv.publish_at[slot]:  # law 8",
        ),
    ],
    "4 no epoch check": [
        (
            "scheduler",
            "is_alive = self.table.epoch[flight.rows.slots] == flight.epochs",
            "is_alive = flight.epochs > -1",
        ),
    ],
    "4 the epoch never changes": [
        ("table", "self.epoch[slot] += 1", "pass"),
    ],
    "4 extras by the rows that are left": [
        ("scheduler", "rows = (due if index is None else index[due]).tolist()", "rows = due.tolist()"),
    ],
    "11 a ride of the plan before": [
        (
            "features",
            "        if rides:\n",
            "        rides, self.kept = self.__dict__.get('kept', rides), rides\n$",
        ),
    ],
    "11 what lands is not watched": [("features", "feature.is_watched or feature.is_host_bound", "False")],
    "11 a chunk's bits are forgotten": [
        ("scheduler", "step.asked |= seq.asked & ~self.features.sampling_only", "pass"),
    ],
    "11 the last chunk's bits are forgotten": [
        ("scheduler", "            step.asked |= seq.asked\n", "            pass\n"),
    ],
    "11 bits of decodes are forgotten": [
        ("scheduler", "step.asked = int(np.bitwise_or.reduce(asked))", "pass"),
    ],
    "11 a grammar's bit opens steps in which its rows do not sample": [
        ("features", "return [row for row in rows if row.samples]", "return rows"),
    ],
    "11 features do not hear who has left": [
        ("core", "self._features.leave(update.request_id)", "pass"),
    ],
    "11 nobody asks the gate": [
        ("scheduler", "if not self.features.may_run(seq, self._running):", "if False:"),
    ],
    "11 what is behind a stop is told": [
        ("scheduler", "return num_new - dropped\n", "return num_new\n"),
    ],
    "11 a request is queued before it is ready": [
        ("core", "if not errors and len(done) < len(preparing.futures):", "if False:"),
    ],
    "5 slots do not drain": [
        ("scheduler", "        if t.planned[slot] > num_computed:\n", "        if False:\n"),
        ("scheduler", 'assert is_alive or row.slot in draining, "a stale row\'s slot is free"', "pass"),
    ],
    "5 a slot drains a plan too early": [
        (
            "scheduler",
            "self._draining.append((self._newest, slot))",
            "self._draining.append((self._newest - 1, slot))",
        ),
        ("scheduler", 'assert is_alive or row.slot in draining, "a stale row\'s slot is free"', "pass"),
    ],
    "7 drafts preempt": [
        (
            "scheduler",
            "        if self._grow(step, slots, written):\n            return draft\n",
            "        [self._reserve(step, t.seqs[slot], int(num)) for slot, num in zip(slots, written)]\n$",
        ),
    ],
    "7 a preempted row is not taken back": [
        (
            "step",
            "is_there, self.decodes = len(kept) < len(self.decodes), kept",
            "is_there = len(kept) < len(self.decodes)",
        ),
    ],
    "7 blocks of a preempted row still travel": [
        ("step", "self._taken_back[slot] = len(self._grown)", "pass"),
    ],
    "7 blocks of who takes a preempted one's slot do not travel": [
        ("step", "(slots[order] != slot) | (places[order] >= first)", "slots[order] != slot"),
    ],
    "8 prompt published before it is planned": [
        (
            "scheduler",
            "        step.admitted.append(",
            "        self._reserve(step, seq, len(seq.tokens))\n"
            "        self.kv.publish(seq.slot, seq.prefix, seq.tokens)\n$",
        ),
    ],
    "10 a quiet one's tokens are not told at its end": [
        (
            "scheduler",
            "seq.num_reported : num_tokens].tolist() if is_due else []",
            "seq.num_reported : num_tokens].tolist() if seq.num_reported == seq.prompt_len else []",
        ),
    ],
    "10 who merely goes on is told nothing": [
        ("news", "return [*map(SeqUpdate, names, tokens)]", "return []"),
    ],
    "10 who is looked at is told twice": [
        ("scheduler", "            is_reported &= ~is_due\n", "            pass\n"),
    ],
    "10 a blocked head is not looked at when blocks come free": [
        (
            "scheduler",
            "        self._blocked = None\n        self.features.vacate",
            "        self.features.vacate",
        ),
    ],
    "6 the plan does not say what the host has seen": [
        ("scheduler", "self._committed = plan.id", "pass"),
    ],
    "3 only the host stops at the limit": [
        ("worker", "tokens = tokens[: slot.limit - root - 1]", "pass"),
        (
            "scheduler",
            "        dropped = num_new - len(update.new_token_ids)\n",
            "        room = max(0, seq.limit - num_tokens + num_new)\n"
            "        update.new_token_ids = update.new_token_ids[:room]\n$",
        ),
    ],
    "5 an abort frees the connector's blocks": [
        (
            "host",
            "        self._asked.discard(request_id)\n",
            "$        for t in [t for t in self._transfers if t.is_load]:\n"
            "            if self._scheduler.request_of(t.seq_id) is None:\n"
            "                self.end(t, ok=False)\n",
        )
    ],
    "0 drafts are not counted in the budget": [
        ("scheduler", "left = self.options.max_num_batched_tokens - step.num_tokens", "left = 10**6"),
    ],
    "3 blocks without end": [
        ("scheduler", "most = t.limit[slots] + num_spec", "most = t.limit[slots] + 10**6"),
        (
            "scheduler",
            "written = np.minimum(written, t.limit[slots] + self.options.num_spec)",
            "pass",
        ),
    ],
    "3 blocks to the limit only": [
        ("scheduler", "most = t.limit[slots] + num_spec", "most = t.limit[slots]")
    ],
    "10 the last one waits for spare blocks": [
        ("scheduler", "alone = self.kv.lacking(hit, num_tokens, 0)", "alone = lacking")
    ],
    "3 a slot's blocks travel apart": [("step", 'np.argsort(slots, kind="stable")', "np.arange(len(slots))")],
    "3 a slot's blocks change their order": [
        (
            "step",
            'np.argsort(slots, kind="stable")',
            'len(slots) - 1 - np.argsort(slots[::-1], kind="stable")',
        )
    ],
    "3 a stop of another's ends a text, or none of one's own": [
        ("scheduler", "not s.stop_token_ids.isdisjoint(n)", "s.stop_token_ids.isdisjoint(n)")
    ],
    "10 who begins to decode is forgotten": [
        ("scheduler", "self._decoding = np.concatenate((self._decoding, step.joining))", "pass")
    ],
    "10 of those that decode one is forgotten when they are sorted": [
        ("scheduler", 'self._decoding[np.argsort(-lengths, kind="stable")]', "$[1:]")
    ],
    "10 a stream that has left is counted on": [
        ("scheduler", "            self._num_streams -= seq.request.is_streamed\n", "            pass\n")
    ],
    "10 a prompt of which a part is planned is forgotten": [
        (
            "scheduler",
            "        if not self.table.is_decoding(seq.slot):\n            self._prefilling.add(seq)\n",
            "",
        )
    ],
    "10 a prompt is planned on when it is whole": [
        (
            "scheduler",
            "                if self.table.is_decoding(seq.slot):\n"
            "                    self._prefilling.remove(seq)\n",
            "",
        )
    ],
    "4 who has left decodes on": [("table", "return slots[self.limit[slots] > 0]", "return slots")],
    "3 more drafts are wanted than a row may carry": [
        ("wants", "self._table.want[slot] = self._most", "self._table.want[slot] = self._most + 1"),
        (
            "wants",
            "want[able] = self._as_many_as_pay(able, len(slots))",
            "want[able] = self._as_many_as_pay(able, len(slots)) + self._most",
        ),
    ],
    "13 who has no work takes no part": [("pace", "while self.is_awaited:", "while False:")],
    "13 who has no work begins steps": [("pace", "while self.is_awaited:", "self.follow()\n        $")],
    "13 a step is counted by who has work": [("pace", "self._tick += 1", "self._tick += need != NOTHING")],
    "13 a step begins when one other has come": [
        ("pace", "while late := [engine", "while len(late := [engine"),
        ("pace", "if not heard]:\n            left", "if not heard]) == len(self._lines):\n            left"),
        (
            "pace",
            "in self._heard.items():\n            tick",
            "in self._heard.items():\n            if not heard:\n                continue\n            tick",
        ),
    ],
    "13 who has work pads by its own count": [
        (
            "launcher",
            "self.pace.agree(need_of(counts))",
            "(self.pace.agree(need_of(counts)), need_of(counts))[1]",
        )
    ],
    "13 who has no work pads by the recorded size": [
        ("launcher", "            self._lend(common.num_tokens)", "            self._lend(max(self._empty))")
    ],
    "13 one replays while another launches": [
        ("launcher", "shape = None if need.is_eager else next(fits, None)", "shape = next(fits, None)")
    ],
    "13 others' rows need no places": [("launcher", "and need.num_rows <=", "and 0 <=")],
    "13 others' drafts need no places": [("launcher", "and need.max_query <=", "and 0 <=")],
    "13 drafts that follow need no recording": [("launcher", "2 if counts.num_propose else 1", "1")],
}
EQUIVALENT: dict[str, list[Edit]] = {
    # The KV of tokens behind a stop is there, too.
    "8 published past a stop": [
        (
            "scheduler",
            "self.kv.publish(slot, seq.prefix, tokens[:num_computed])",
            "self.kv.publish(slot, seq.prefix, t.tokens(slot)[:num_computed])",
        )
    ],
    # A sequence's tokens grow when its last chunk has come home, and then the plan that admitted it has run.
    "3 a stop before min_tokens counts": [("sequence", "if i >= first and token", "if token")],
    # Sooner than `newest` it only touches a slot that no row reads before ready_at, and its own blocks.
    "6 feedback as soon as it has come": [("worker", "log[self.num_applied][0] <= newest", "True")],
    # Rows behind the certain end yield nothing, and are stale when they land.
    "3 a chunk's sequence that surely ends is planned on": [
        ("scheduler", "seq.host_bound or t.known[slot] + 1 >= seq.limit", "seq.host_bound")
    ],
}


def source_of(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def modules_of(edits: list[Edit]) -> dict[str, str]:
    """Those that are run to catch a fault, the last of them the simulation."""
    return LOCKSTEP if edits and edits[0][0] in LOCKSTEP else MODULES


def mutate(name: str, edits: list[Edit]) -> CodeType:
    """The code of one of these modules with the edits that are for it."""
    path = modules_of(edits)[name]
    source = source_of(path)
    for _, old, new in (edit for edit in edits if edit[0] == name):
        assert source.count(old) == 1, f"{source.count(old)} times in {name}: {old!r}"
        source = source.replace(old, new.replace("$", old))
    return compile(source, path, "exec")


def load_mutant(edits: list[Edit]) -> ModuleType:
    """Execute all modules anew, some of them edited, under their own names.  Returns the simulation."""
    module = ModuleType("none")
    for short, name in modules_of(edits).items():
        code = mutate(short, edits)
        module = sys.modules[name] = ModuleType(name)
        exec(code, module.__dict__)
    return module


def verdict(job: tuple[list[Edit], int]) -> str | None:
    """How a fault was caught, or None.  In a process of its own."""
    edits, num_configs = job
    logging.disable(logging.CRITICAL)
    simulate = load_mutant(edits)
    for seed in range(num_configs):
        try:
            simulate.run(seed)
        except Exception as error:
            return f"after {seed + 1}: {type(error).__name__} {error}"[:150]
    return None


def main(num_configs: int, word: str) -> int:
    jobs = {name: edits for name, edits in (FAULTS | EQUIVALENT).items() if word in name}
    num_surprises, start = 0, time.time()
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        verdicts = pool.imap(verdict, [(edits, num_configs) for edits in jobs.values()])
        for name, how in zip(jobs, verdicts, strict=True):
            is_surprise = (how is None) != (name in EQUIVALENT)
            num_surprises += is_surprise
            sign = "SURPRISE" if is_surprise else "equivalent" if name in EQUIVALENT else "caught"
            sys.stdout.write(f"{sign:10} {name:50} {how or 'not caught'}\n")
            sys.stdout.flush()
    took = time.time() - start
    sys.stdout.write(
        f"{len(jobs)} mutants of {num_configs} configurations: {num_surprises} surprises; {took:.0f} s\n"
    )
    return num_surprises


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:] if a.isdigit()]
    words = [a for a in sys.argv[1:] if not a.isdigit()]
    sys.exit(1 if main(numbers[0] if numbers else 1000, words[0] if words else "") else 0)
