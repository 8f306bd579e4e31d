"""What a proposer declares is given to it, or it is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid import LLM
from pellucid.spec.registry import PROPOSERS
from tests.llm.test_invariance import BASE


def open_with(tiny: Path, name: str, **options: object) -> LLM:
    PROPOSERS.register(name, f"tests.spec.toy:{name}")
    speculative = {"method": name, "num_speculative_tokens": 4}
    return LLM(str(tiny), **(BASE | options), speculative_config=speculative)


def test_a_proposer_that_reads_layers_that_there_are_not_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="reads what enters layers 1, 9, but the model has 2"):
        open_with(tiny, "TappingProposer")
