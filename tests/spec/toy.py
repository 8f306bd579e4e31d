"""A proposer that knows how its texts go on, and drafts trees in which often one path is right.

All on the device, so that a CUDA graph may hold it.  Legend: B rows, N texts, L tokens of the longest.
"""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import ClassVar, Self

import torch
from torch import Tensor

from pellucid.config import SpeculativeConfig
from pellucid.forward import ForwardInput
from pellucid.sample.noise import Purpose, uniform
from pellucid.sample.output import SampleOutput
from pellucid.schedule.plan import StepPlan
from pellucid.schedule.scheduler import Scheduler
from pellucid.spec.base import Drafts, DraftShape, Known, Needs, NullProposer
from pellucid.spec.registry import PROPOSERS
from tests.trees import depths_of

WRONG = 299  # tokens; a wrong draft is some other one of these


class TreeProposer(NullProposer):
    """Of a right node's children at most one is right; which one, and whether any, is left to chance."""

    needs = Needs()
    parents: ClassVar[tuple[int, ...]] = ()
    texts: ClassVar[list[list[int]]] = []  # whole ones, prompts included

    def __init__(self, num_drafts: int) -> None:
        assert num_drafts == len(self.parents), (num_drafts, self.parents)
        self.shape = DraftShape(num_drafts, max(depths_of(self.parents)))
        self.nodes = torch.tensor(self.parents, dtype=torch.int8)
        columns = zip_longest(*self.texts, fillvalue=-1)
        self.table = torch.tensor([*zip(*columns, strict=True)], dtype=torch.int32)  # [N, L]

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        return cls(config.num_speculative_tokens)

    def propose(
        self, fwd: ForwardInput, sampled: SampleOutput, known: Known, hidden: Tensor, taps: Tensor | None
    ) -> Drafts:  # fmt: skip
        self.table = self.table.to(fwd.slots.device)
        width = self.table.shape[1]
        texts = known.token_ids[fwd.slots][:, :width]
        is_known = torch.arange(width, device=texts.device) <= known.newest[:, None]
        agrees = ((texts[:, None] == self.table) | ~is_known[:, None]).all(-1)  # [B, N]
        own = self.table[agrees.int().argmax(-1)]
        depths = depths_of(self.parents)
        never = torch.zeros_like(known.newest, dtype=torch.bool)
        right, has_right_child, drafts = [~never], [never], []
        for node, parent in enumerate(self.parents, start=1):
            place = known.newest + depths[node]
            chance = uniform(known.newest * 100 + node, fwd.slots, Purpose.DRAW)
            is_right = right[parent] & ~has_right_child[parent] & (chance < 0.6) & (place < width)
            has_right_child[parent] = has_right_child[parent] | is_right
            right.append(is_right)
            has_right_child.append(never)
            token = own.gather(1, place.clamp(max=width - 1)[:, None])[:, 0].clamp(min=0)
            drafts.append(token.where(is_right, (token + node) % WRONG))
        tokens = torch.stack(drafts, dim=1)
        self.nodes = self.nodes.to(tokens.device)
        return Drafts(tokens, parents=self.nodes.expand_as(tokens))


def tree_config(parents: tuple[int, ...], texts: list[list[int]]) -> dict[str, object]:
    """The options of an engine in this process that drafts such trees."""
    TreeProposer.parents, TreeProposer.texts = parents, texts
    PROPOSERS.register("toy tree", "tests.spec.toy:TreeProposer")
    return {"method": "toy tree", "num_speculative_tokens": len(parents), "adaptive": False}


class TappingProposer(NullProposer):
    """Would read what enters a layer that there is not."""

    needs = Needs(taps=(1, 9))


def want_at_random(scheduler: Scheduler, rng: random.Random, most: int) -> None:
    """Let every row and step want another number of drafts; often nobody wants any."""
    next_plan, want = scheduler.next_plan, scheduler.table.want

    def plan() -> StepPlan | None:
        if rng.random() < 0.3:
            want[:] = 0
        else:
            want[:] = [rng.choice([0, rng.randint(1, most), most]) for _ in want]
        return next_plan()

    scheduler.next_plan = plan  # type: ignore[method-assign]
