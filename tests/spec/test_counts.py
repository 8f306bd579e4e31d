"""What was drafted for a request, and what stood, is told with its answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pellucid import LLM, SamplingParams
from pellucid.schedule.counters import SchedulerCounters
from pellucid.types import DraftCounts, RequestOutput
from tests.llm.test_invariance import BASE
from tests.spec.test_ngram import random_prompts

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


@pytest.mark.parametrize("options", [{}, {"depth": 2, "num_gpu_blocks_override": 20}], ids=str)
def test_answers_counts_are_the_engines(tiny: Path, options: dict[str, int]) -> None:
    """Also of requests that lose their slot in between; and by position they are those of a count by hand."""
    with LLM(str(tiny), **BASE, **options, speculative_config=NGRAM) as llm:  # type: ignore[arg-type]
        params = [
            SamplingParams(temperature=i % 2 / 2, seed=i, max_tokens=30 + i, ignore_eos=True)
            for i in range(20)
        ]
        outputs, stood = list[RequestOutput](), Counter[int]()
        engine, before = llm.llm_engine, Counter[str]()
        for prompt, each in zip(random_prompts(20, 50), params, strict=True):
            engine.add_request(prompt, each)
        while not engine.is_finished():
            for output in engine.step():
                num, before[output.request_id] = before[output.request_id], len(output.outputs[0].token_ids)
                stood[before[output.request_id] - num - 1] += 1
                outputs += [output] if output.finished else []
        llm.llm_engine.engine.scheduler.wants.switch.saved = 1.5  # type: ignore[union-attr]
        stats = llm.llm_engine.stats
    assert stats.draft_seconds_saved == 1.5 and 0 < stats.num_verifying_steps < stats.num_drafts
    total = DraftCounts()
    for output in outputs:
        drafts = output.metrics.drafts
        assert 0 <= drafts.num_accepted_tokens <= drafts.num_draft_tokens <= 3 * drafts.num_drafts
        total = total.plus(drafts)
    if not options:
        assert total == (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
    assert total.num_accepted_tokens > 20
    assert stats.num_sampled_tokens == sum(range(30, 50))
    by_hand = tuple(sum(num for drafts, num in stood.items() if drafts > place) for place in range(3))
    assert stats.num_accepted_per_position == by_hand and by_hand[0] > by_hand[2] > 0
    assert total.acceptance_rate == total.num_accepted_tokens / total.num_draft_tokens
    assert total.tokens_a_verification == 1 + total.num_accepted_tokens / total.num_drafts


def test_who_drafts_nothing_has_no_counts(tiny: Path) -> None:
    with LLM(str(tiny), **BASE) as llm:  # type: ignore[arg-type]
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert output.metrics.drafts == DraftCounts() and output.metrics.drafts.acceptance_rate == 0


def test_rows_of_a_step_are_counted_one_by_one_and_the_step_once() -> None:
    counters = SchedulerCounters(num_accepted_per_position=[0] * 4)
    for draft, stood in (([2, 0, 3, 4], [1, 0, 3, 0]), ([0, 0], [0, 0])):
        counters.count_drafts(np.array(draft), np.array(stood))
    assert (counters.num_verifying_steps, counters.num_drafts) == (1, 3)
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (9, 4)
    assert counters.num_accepted_per_position == [2, 1, 1, 0]
