"""Whole runs of requests in waves, without scheduler and engine: how fast, if drafts cost so and so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pellucid.schedule.plan import Row
from pellucid.schedule.step import Step
from pellucid.schedule.table import Table
from pellucid.spec.drafter import Drafter
from pellucid.spec.wants import Wants

MOST, PROMPT, ANSWER = 4, 64, 128  # drafts, tokens


@dataclass(frozen=True)
class Machine:
    """What its steps take: in plain ones of a single row, and beside that in plain ones of as many rows."""

    cheap_tokens: int  # as many more as make a step twice as long
    running: float  # of the proposer, at all
    each_pass: float
    prompt: float = 0.0  # of the proposer, behind prompts
    keeps_kv: bool = False
    noise: float = 0.05

    def seconds(self, num_rows: int, num_passes: int, num_drafts: int) -> float:
        proposing = self.running + self.each_pass * (num_passes - 1) if num_passes else 0.0
        verifying = num_drafts / (num_rows + self.cheap_tokens)
        return 0.01 * (1 + num_rows / self.cheap_tokens) * (1 + proposing + verifying)


def tokens_a_second(
    machine: Machine, chances: Sequence[float], num_rows: int, *, fixed: int | None = None, seed: int = 0
) -> float:
    """chances: of each draft to stand, wave by wave.  fixed: drafts of every row and step."""
    clock, dice = random.Random(seed), np.random.default_rng(seed)
    table = Table(num_rows, PROMPT + ANSWER + MOST, 1 + MOST)
    most, cheap = (MOST, machine.cheap_tokens) if fixed is None else (fixed, 0)
    wants = Wants(table, most, cheap, drafter=Drafter.KEEPS_KV if machine.keeps_kv else Drafter.STATELESS)
    seconds, num_landed = 0.0, 0
    for chance in chances:
        left, slots = np.full(num_rows, ANSWER), np.arange(num_rows)
        for slot in slots.tolist():
            wants.begin(slot)
        table.drafts[slots] = 0
        has_prompts = True
        while len(slots):
            step, draft = Step(0, 1 << 20), table.drafts[slots].copy()
            if has_prompts:
                for slot in slots.tolist():
                    step.add_chunk(Row(slot, PROMPT, 0, 1))
            else:
                step.decodes = slots
                step.add_drafts(draft)
            step.num_propose = wants.num_propose(slots, slots.tolist() if has_prompts else [])
            wants.planned(step)
            if has_prompts:
                took = machine.seconds(PROMPT * num_rows, 0, 0) * (
                    1 + machine.prompt * (step.num_propose > 0)
                )
            else:
                took = machine.seconds(len(slots), step.num_propose, step.num_drafts)
            stands = (dice.random((len(slots), MOST)) < chance) & (np.arange(MOST) < draft[:, None])
            num_new = np.minimum(1 + stands.cumprod(axis=1).sum(axis=1), left[slots]).astype(np.int32)
            table.drafts[slots] = table.want[slots] * (step.num_propose > 0)
            seconds += took
            wants.learn(slots, draft, num_new)
            wants.took(took * max(0.5, clock.gauss(1, machine.noise)) * (3 if clock.random() < 0.005 else 1))
            wants.landed(int(num_new.sum()))
            left[slots] -= num_new
            slots, has_prompts, num_landed = slots[left[slots] > 0], False, num_landed + 1
            if num_landed % 8 == 0 or wants.has_switched:
                wants.choose(slots)
    return len(chances) * num_rows * ANSWER / seconds
