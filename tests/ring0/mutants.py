"""Break one law at a time, and see that ring 0 notices.

Each fault replaces texts of the real files (or of the toy worker, for the workers' laws) in fresh module
objects; nothing on disk changes.  A fault that nothing shows is a surprise; so is an equivalent that fails.

    python -m tests.ring0.mutants [N] [WORD]    at most N configurations (default 1000), faults with WORD
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import sys
import time
from types import ModuleType

MODULES = {  # in the order of import
    "hashes": "pellucid.kv.hashes",
    "pool": "pellucid.kv.pool",
    "manager": "pellucid.kv.manager",
    "kv.connector": "pellucid.kv.connector",
    "sequence": "pellucid.schedule.sequence",
    "queue": "pellucid.schedule.queue",
    "step": "pellucid.schedule.step",
    "transfers": "pellucid.schedule.transfers",
    "chorus": "pellucid.schedule.chorus",
    "scheduler": "pellucid.schedule.scheduler",
    "core": "pellucid.engine.core",
    "model": "tests.ring0.model",
    "connector": "tests.ring0.connector",
    "worker": "tests.ring0.worker",
    "simulate": "tests.ring0.simulate",
}
Edit = tuple[str, str, str]  # module, text, what replaces it ($ is the text itself)

NEWEST = "max(plan.id - self.pp, plan.committed), self.pipeline"
PHASES = "(self.apply_feedback, self.retire, self.admit)"
VICTIM = "victim = max(self._running(), key=lambda v: v.key)\n            if victim.key <= seq.key:"
STAGES: Edit = ("worker", "        self.flights: list[Flight]", "        connector.stages = self.stages\n$")
START_ALL = "$\n        [self.start(self.pending[-1], stage) for stage in self.stages]"

FAULTS: dict[str, list[Edit]] = {
    "0 a step has more tokens than its budget": [
        ("step", "        self.num_more += row.num_query - 1\n", "")
    ],
    "0 drafts are not counted in the budget": [
        ("scheduler", "num_draft = min(seq.num_drafts, step.budget - kept - 1)", "num_draft = seq.num_drafts")
    ],
    "0 prompts take more than their pace": [
        ("scheduler", "step.max_tokens = min(step.max_tokens, step.num_tokens + room)", "pass")
    ],
    "0 the last chunk asks for no logits": [("sequence", "num_logits = max(1, num_logits)", "pass")],
    "1 an empty tick does not age": [
        ("scheduler", "            return None\n        retired,", "            self._next_plan_id -= 1\n$")
    ],
    "2 a decode is planned before its feedback": [
        ("scheduler", "step.id, step.id + self.options.pp", "step.id, step.id + 1"),
        ("scheduler", "num_draft\n        seq.ready_at = step.id + self.options.pp", "num_draft"),
    ],
    "2 the first decode is planned before its feedback": [
        ("scheduler", "num_planned)\n        seq.ready_at = step.id + self.options.pp", "num_planned)")
    ],
    "2 host-bound planned while in flight": [
        (
            "scheduler",
            "seq.ready_at = NEVER\n        if seq",
            "seq.ready_at = seq.ready_at if seq.host_bound else NEVER\n        if seq",
        )
    ],
    "2 a host-bound sequence never goes on": [
        ("scheduler", "            seq.ready_at = 0\n", "            pass\n")
    ],
    "3 no correction at commit": [("scheduler", "seq.num_planned -= wasted", "pass")],
    "3 blocks for one token, not for 1+k": [
        (
            "scheduler",
            "num_written = num_planned + step.num_propose",
            "num_written = num_planned - num_draft + step.num_propose",
        )
    ],
    "3 no blocks for what a decode drafts": [
        ("scheduler", "num_written = num_planned + step.num_propose", "num_written = num_planned")
    ],
    "3 no blocks for what a prompt drafts": [("scheduler", "end + step.num_propose):", "end):")],
    "3 no room for what an admission drafts": [
        ("scheduler", "len(seq.tokens) + step.num_propose)", "len(seq.tokens))")
    ],
    "3 a calm row without a block": [
        (
            "scheduler",
            "seq.calm_plan = min(seq.table.capacity, seq.limit - 2)",
            "seq.calm_plan = seq.limit - 2",
        )
    ],
    "3 a calm landing overlooks a stop": [
        ("scheduler", "seq.calm_landing and new[0] not in seq.stop_token_ids", "seq.calm_landing")
    ],
    "3 a chorus gets no blocks": [("chorus", "if self._num_planned == self._next_short and", "if False and")],
    "3 a chorus gets blocks a plan too late": [
        ("chorus", "last = capacity - self._starts[indices]", "$ + 1")
    ],
    "3 a chorus goes on past an end": [("chorus", "if self._num_planned == self._num_plans:", "if False:")],
    "3 a chorus overlooks a stop": [("chorus", "if len(self._stop_token_ids)", "if ()")],
    "5 a chorus settles without its rows in flight": [
        ("chorus", "seq.num_inflight += num_planned - num_landed", "seq.num_inflight += 0")
    ],
    "3 a chorus reads too late": [
        ("chorus", "            self._read(turn, kv)\n        if self", "            pass\n        if self")
    ],
    "3 a chorus reads twice": [("chorus", "        self._num_read[turn] = self._num_landed\n", "")],
    "5 one leaves a chorus with counts of old": [
        (
            "scheduler",
            "        self._break_up()\n        self._transfers",
            "        self._chorus = None\n        self._transfers",
        )
    ],
    "8 a chorus publishes what it has planned": [
        (
            "chorus",
            "num_new = self._num_landed - self._settled_landed",
            "num_new = self._num_planned - self._settled_landed",
        )
    ],
    "3 blocks without end": [
        ("scheduler", "return min(num_tokens, seq.limit + self.options.num_spec)", "return num_tokens")
    ],
    "3 blocks to the limit only": [("scheduler", "seq.limit + self.options.num_spec)", "seq.limit)")],
    "3 only the host stops at the limit": [
        ("worker", "tokens = tokens[: slot.limit - root - 1]", "pass"),
        (
            "scheduler",
            "        tokens.extend(update.new_token_ids)",
            "        update.new_token_ids = update.new_token_ids[: seq.limit - len(tokens)]\n$",
        ),
    ],
    "3 tokens behind a stop are kept": [
        ("sequence", "update.new_token_ids = update.new_token_ids[: i + 1]", "pass")
    ],
    "4 no epoch check": [("scheduler", "if seq.epoch != row.epoch:", "if False:")],
    "5 no quarantine of slots": [
        ("scheduler", "        if seq.num_inflight:\n", "        if False:\n"),
        ("scheduler", "self._land_stale(row)  # law 4", "pass"),
        ("scheduler", "assert resting ==", "assert True or resting =="),
    ],
    "5 an abort frees the connector's blocks": [
        (
            "scheduler",
            "        # A load under way keeps",
            "        for t in [t for t in self._transfers if t.is_load and t.seq_id == seq.id]:\n"
            "            self._transfers.take_back_now(t)\n$",
        ),
        (
            "transfers",
            "    def plan_meta(",
            "    def take_back_now(self, transfer):\n"
            "        self._active.remove(transfer)\n"
            "        self._kv.take_back(transfer, publish=False)\n\n$",
        ),
        (
            "transfers",
            "            self._active.remove(transfer)\n",
            "            if transfer not in self._active:\n                continue\n$",
        ),
    ],
    "5 a load starts when it is planned": [
        STAGES,
        ("worker", "self.pipeline.connector.start(job, self)", "job.transfer.is_load or $"),
        ("connector", "self.pending.append(Job(transfer, self.rng.random() < 0.3))", START_ALL),
    ],
    "5 a save starts when it is planned": [
        STAGES,
        ("worker", "self.pipeline.connector.start(job, self)", "job.transfer.is_load and $"),
        ("connector", "self.pending.append(Job(transfer, False))", START_ALL),
    ],
    "5 what a save reads is not held": [
        ("transfers", "            kv.lend_for_save(transfer)\n", ""),
        ("transfers", "self._kv.take_back(transfer,", "transfer.is_load and $"),
        (
            "scheduler",
            "t.blocks for t in self._transfers)",
            "t.blocks for t in self._transfers if t.is_load)",
        ),
    ],
    "6 feedback too early": [("worker", NEWEST, "max(plan.id - self.pp + 1, plan.committed), self.pipeline")],
    "6 no watermark": [("worker", NEWEST, "plan.id - self.pp, self.pipeline")],
    "6 watermark only": [("worker", NEWEST, "plan.committed, self.pipeline")],
    "6 the plan carries no watermark": [("scheduler", "self._committed = plan.id", "pass")],
    "6 admit before feedback": [("worker", PHASES, "(self.retire, self.admit, self.apply_feedback)")],
    "6 retire before feedback": [("worker", PHASES, "(self.retire, self.apply_feedback, self.admit)")],
    "6 retired forgotten by the worker": [("worker", "self.slots[index] = None", "pass")],
    "6 retired lost on an empty tick": [
        ("scheduler", "            return None\n        retired,", "            self._retired = []\n$")
    ],
    "6 a plan with only kv_meta is not submitted": [
        ("scheduler", "if not step.rows and not kv_meta:", "if not step.rows:")
    ],
    "6 compaction on the last stage only": [
        ("worker", "enumerate(feedback.path, 1)", "enumerate(feedback.path * (self.index == self.pp - 1), 1)")
    ],
    "7 a younger one preempts an older one": [
        (
            "scheduler",
            VICTIM,
            "others = [v for v in self._running() if v is not seq and not step.has_chunk(v.id)]\n"
            "            victim = max(others, key=lambda v: v.key, default=seq)\n"
            "            if victim is seq:",
        )
    ],
    "7 priority is ignored": [
        (
            "scheduler",
            VICTIM,
            "others = [v for v in self._running() if not step.has_chunk(v.id)]\n"
            "            victim = max(others, key=lambda v: v.key[1:], default=seq)\n"
            "            if victim.key[1:] <= seq.key[1:]:",
        )
    ],
    "7 an arrival preempts its elders": [("scheduler", "if v.key[0] > seq.key[0] and", "if")],
    "7 a preempted row is not taken back": [("step", "row = self.rows.pop(index)", "row = self.rows[index]")],
    "7 blocks of a preempted row still travel": [
        ("step", "self.grown = [growth.without(row.slot) for growth in self.grown]", "pass")
    ],
    "8 sampled tokens published before their KV": [
        (
            "scheduler",
            "if seq.num_computed >= seq.table.publish_at",
            "if len(tokens) >= seq.table.publish_at",
        ),
        ("scheduler", "min(seq.num_computed, len(tokens))", "len(tokens)"),
    ],
    "8 published past a stop": [("scheduler", "min(seq.num_computed, len(tokens))", "seq.num_computed")],
    "8 prompt published before it is planned": [
        (
            "scheduler",
            "        step.admitted.append(",
            "        self._reserve(step, seq, len(seq.tokens))\n"
            "        self.kv.publish(seq.table, seq.tokens, len(seq.tokens))\n$",
        )
    ],
    "8 full hit without recompute": [("sequence", "return len(self.tokens) - 1", "return len(self.tokens)")],
    "8 failed load published": [
        ("transfers", "publish=transfer.is_load and end.ok", "publish=transfer.is_load")
    ],
    "8 load published before it landed": [
        (
            "transfers",
            "        self._connector.reserved(transfer)",
            "$\n        for pool, blocks, names in zip(kv.pools, transfer.blocks, transfer.digests):\n"
            "            pool.publish(blocks, names)",
        )
    ],
    "8 reference counts ignored": [("pool", "self._refs[block] += 1", "self._refs[block] = 1")],
    "8 an evicted block is still found": [
        ("pool", "            self._forget(block)\n            blocks", "            blocks")
    ],
    "8 a hash forgets its parent": [
        ("hashes", "hashlib.sha256(parent + fresh", "hashlib.sha256(root + fresh")
    ],
    "8 a hit that not every group holds": [
        (
            "manager",
            "            max_tokens = min(max_tokens, len(hits",
            "            min(max_tokens, len(hits",
        )
    ],
    "8 a hit that ends within a block": [("manager", "max_tokens // self.unit * self.unit", "max_tokens")],
    "8 blocks counted in the first group only": [
        (
            "manager",
            "table.capacity = min(map(mul, map(len, table.blocks), self.block_sizes))",
            "table.capacity = len(table.blocks[0]) * self.block_sizes[0]",
        )
    ],
    "9 noise depends on the step": [
        ("worker", "slot.seed, position, bits", "slot.seed + plan.id, position, bits")
    ],
    "9 prompt logprobs counted twice": [
        ("scheduler", "seq.num_prompt_logprobs += len(update.prompt_logprobs)", "pass")
    ],
    "9 prompt logprobs behind a prefix hit": [
        ("sequence", "if self.num_prompt_logprobs < self.num_wanted_logprobs:", "if False:")
    ],
    "10 too long is not answered": [("scheduler", "if prompt_len >= longest:", "if False:")],
    "10 a dead worker is not noticed": [("core", "updates += self._die(error)", "pass")],
    "10 death answers nobody": [
        ("core", "return compiling + self.scheduler.fail_all(self.error)", "return []")
    ],
    "10 who comes after death waits for ever": [
        ("core", "        if self.error is not None:\n", "        if False:\n")
    ],
    "10 a calm landing overlooks the end": [
        ("scheduler", "min(seq.table.publish_at - 1, seq.limit - 2)", "seq.table.publish_at - 1")
    ],
    "10 a quiet one's tokens are not told at its end": [
        (
            "scheduler",
            "seq.take_untold() if is_due else []",
            "seq.take_untold() if seq.num_told == seq.prompt_len else []",
        )
    ],
    "10 an abort is not answered": [("scheduler", "        update.finish_reason = reason\n", "")],
    "10 the last one waits for spare blocks": [
        ("scheduler", "self._watermark if self.num_running else", "self._watermark or")
    ],
    "10 nobody is admitted": [
        ("scheduler", "while len(self._waiting) and self._slots", "while False and self._slots")
    ],
    "10 a loaded sequence is not woken": [
        ("scheduler", "seq.status = Status.WAITING  # admission", "continue  # admission")
    ],
}
EQUIVALENT: dict[str, list[Edit]] = {
    # A sequence's tokens grow when its last chunk has come home, and then the plan that admitted it has run.
    "2 a plan shares its tokens with the host": [
        ("scheduler", "token_ids=seq.tokens[:]", "token_ids=seq.tokens")
    ],
    # The device does not sample a stop token before min_tokens; the host says it again.
    "3 a stop before min_tokens counts": [("sequence", "if i >= first and token", "if token")],
    # Sooner than `newest` it only touches a slot that no row reads before ready_at, and its own blocks.
    "6 feedback as soon as it has come": [("worker", "log[self.num_applied][0] <= newest", "True")],
    # Rows behind the certain end yield nothing, and are stale when they land.
    "3 rows planned behind the certain end": [
        (
            "scheduler",
            "seq.num_drafts = step.num_propose\n        if seq.host_bound or seq.num_certain >= seq.limit:",
            "seq.num_drafts = step.num_propose\n        if seq.host_bound:",
        )
    ],
}


def source_of(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def load_mutant(edits: list[Edit]) -> ModuleType:
    """Execute all modules anew, some of them edited, under their own names.  Returns the simulation."""
    module = ModuleType("none")
    for short, name in MODULES.items():
        source = source_of(name)
        for _, old, new in (edit for edit in edits if edit[0] == short):
            assert source.count(old) == 1, f"{source.count(old)} times in {name}: {old!r}"
            source = source.replace(old, new.replace("$", old))
        module = sys.modules[name] = ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
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
