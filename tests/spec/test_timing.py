"""Steps are timed at start, and leave no trace."""

from __future__ import annotations

from pathlib import Path

from pellucid import LLM
from pellucid.spec.costs import kinds_to_time
from pellucid.spec.timing import time_steps
from tests.graphs.test_graphs import OPTIONS, Seen, graphed, plainly, run, worker_of

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


def test_recorded_steps_of_all_kinds_are_timed_and_tokens_stay(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS, speculative_config=DRAFTS) as llm:
        worker = worker_of(llm)
        seen = Seen(graphed(worker))
        pages = worker.layout.pages_a_block
        timed = list(time_steps(worker.runner, worker.resolved, pages, keeps_kv=False, is_padded=True))
        kinds = kinds_to_time(worker.resolved.max_num_seqs, 3, is_padded=True)
        assert [each[:3] for each in timed] == kinds[: len(timed)] and len(timed) >= 4
        assert len(seen.found) >= 3 * len(timed) - seen.num_eager > 0
        for rows, num, _, seconds in timed:
            assert all(0 < seconds <= s for r, n, _, s in timed if r == rows and n > num), "more take no less"
        assert run(llm, 24) == plainly(tiny, 24)


def test_steps_are_timed_where_none_are_recorded(tiny: Path) -> None:
    with LLM(
        str(tiny), device="cpu", cpu_kv_cache_gib=0.02, max_num_seqs=2, speculative_config=DRAFTS
    ) as llm:
        timings = llm.llm_engine.engine.scheduler.options.timings
        assert {0, 1} <= {each.made for each in timings.steps if each.num_rows == 1} and not timings.is_padded
