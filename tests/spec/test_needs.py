"""What a proposer declares is given to it, or it is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid import LLM
from pellucid.spec.registry import PROPOSERS
from tests.llm.test_invariance import BASE
from tests.spec.test_ngram import random_prompts


def open_with(tiny: Path, name: str, **options: object) -> LLM:
    PROPOSERS.register(name, f"tests.spec.toy:{name}")
    speculative = {"method": name, "num_speculative_tokens": 4}
    return LLM(str(tiny), **(BASE | options), speculative_config=speculative)


def test_a_proposer_that_reads_layers_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="reads the output of model.layers.0, model.layers.1"):
        open_with(tiny, "TappingProposer")


def test_a_proposer_that_looks_back_is_refused_unless_nothing_is_cached(
    tiny: Path,
) -> None:
    with pytest.raises(ValueError, match="last 1 tokens of a cached prefix again.*enable_prefix_caching"):
        open_with(tiny, "LookbackProposer")
    with open_with(tiny, "LookbackProposer", enable_prefix_caching=False) as llm:
        assert llm.generate(random_prompts(1, 5), use_tqdm=False)[0].finished
