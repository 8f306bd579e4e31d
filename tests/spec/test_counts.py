"""What was drafted for a request, and what stood, is told with its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid import LLM, SamplingParams
from pellucid.types import DraftCounts
from tests.llm.test_invariance import BASE
from tests.spec.test_ngram import random_prompts

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


@pytest.mark.parametrize("options", [{}, {"depth": 2, "num_gpu_blocks_override": 20}], ids=str)
def test_answers_counts_are_the_engines(tiny: Path, options: dict[str, int]) -> None:
    """Also of requests that lose their slot in between."""
    with LLM(str(tiny), **BASE, **options, speculative_config=NGRAM) as llm:  # type: ignore[arg-type]
        params = [SamplingParams(temperature=i % 2 / 2, seed=i, max_tokens=30 + i) for i in range(20)]
        outputs = llm.generate(random_prompts(20, 50), params, use_tqdm=False)
        stats = llm.llm_engine.stats
    total = DraftCounts()
    for output in outputs:
        drafts = output.metrics.drafts
        assert 0 <= drafts.num_accepted_tokens <= drafts.num_draft_tokens <= 3 * drafts.num_drafts
        total = total.plus(drafts)
    if not options:
        assert total == (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
    assert total.num_accepted_tokens > 20
    assert total.tokens_a_verification == 1 + total.num_accepted_tokens / total.num_drafts


def test_who_drafts_nothing_has_no_counts(tiny: Path) -> None:
    with LLM(str(tiny), **BASE) as llm:  # type: ignore[arg-type]
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert output.metrics.drafts == DraftCounts() and output.metrics.drafts.acceptance_rate == 0
