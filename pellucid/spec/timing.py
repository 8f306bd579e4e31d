"""What steps take, timed at start: plain ones, and those that verify and make drafts.

wants.py goes by it, so that it need not be found out while requests wait.  Rows go on and on, as those of
requests do, one step launched while the one before it runs; all of them read and write page 0 alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter

from msgspec.structs import replace

from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, ints
from pellucid.spec.costs import kinds_to_time
from pellucid.spec.drafter import Timed
from pellucid.worker.runner import ModelRunner
from pellucid.worker.warm_up import Part, step_of

NUM_STEPS = 4  # of a kind; between each two of them a time is taken, and the shortest counts
MOST_ROWS, MOST_TOKENS = 256, 4096  # of a step
MOST_SECONDS = {"cuda": 1.0, "cpu": 0.4}  # for all; a kind that is begun is seen twice


def time_steps(
    runner: ModelRunner[object], resolved: Resolved, pages_a_block: int, *, keeps_kv: bool, is_padded: bool
) -> Iterator[Timed]:
    """Where drafts are to be as many as they are worth, and no other rank must be asked.

    More drafts take no less.  keeps_kv: does the drafter?  is_padded: are steps, to what is recorded?
    """
    num_drafts, parallel = runner.slots.shape.num_drafts, resolved.user.parallel
    end = time.perf_counter() + MOST_SECONDS[resolved.platform.device]
    is_alone = parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1
    if not (num_drafts and resolved.speculative.is_adaptive and is_alone):
        return
    rows, all_or_one = min(resolved.max_num_seqs, MOST_ROWS), keeps_kv and is_padded
    kinds = kinds_to_time(rows, num_drafts, all_or_one=all_or_one, is_padded=is_padded)
    for num_rows, same in groupby(kinds, key=itemgetter(0)):
        timed = dict[tuple[int, int], float]()
        for _, verified, made in same:
            fits = num_rows * (1 + verified) <= min(MOST_TOKENS, resolved.max_num_batched_tokens)
            if fits and length_of(verified) < resolved.max_model_len and time.perf_counter() < end:
                first = first_of(num_rows, verified, made, resolved, pages_a_block)
                timed[verified, made] = quickest(runner, first, end)
        for kind in timed:
            yield Timed(num_rows, *kind, min(seconds for more, seconds in timed.items() if more >= kind))
        if time.perf_counter() > end:
            return


def length_of(num_drafts: int) -> int:
    """Most tokens that a row has in the end, with drafts."""
    return (2 + NUM_STEPS) * (1 + num_drafts)


def first_of(num_rows: int, verified: int, made: int, resolved: Resolved, pages_a_block: int) -> StepPlan:
    """The first step of such rows, which have pages for those behind it."""
    length = length_of(verified)
    plan = step_of([Part(1 + verified, verified)] * num_rows, resolved, pages_a_block, asked=0)
    pages = ints([0] * (-(-(length + 1) // resolved.block_size) * pages_a_block))
    admitted = [replace(new, limit=length, pages=pages) for new in plan.admitted]
    return replace(plan, num_propose=made, admitted=admitted)


def quickest(runner: ModelRunner[object], first: StepPlan, end: float) -> float:
    """Seconds of a step like it.  end: of the time for it, on the clock."""
    again, times = replace(first, admitted=[]), list[float]()
    pending = runner.execute(first)
    for _ in range(NUM_STEPS):
        following = runner.execute(again)
        pending.wait()
        times.append(time.perf_counter())
        pending = following
        if times[-1] > end and len(times) > 1:
            break
    pending.wait()
    slots = first.rows.slots.tolist()
    runner.slots.retire(slots)  # the proposer is not told: it need not remember them
    runner.features.retire(slots)
    return min(after - before for before, after in pairwise(times))
