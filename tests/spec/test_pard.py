"""A parallel draft model says of one pass what plain torch says of the same masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pellucid import LLM
from tests.llm.test_invariance import BASE
from tests.spec import heads
from tests.spec.test_heads import NUM, check
from tests.tiny import write_checkpoint

MASK = 319


def write_pard(folder: Path, name: str = "pard_token", mask: int = MASK) -> Path:
    return write_checkpoint(folder / "pard", seed=0, num_hidden_layers=1, **{name: mask})


@pytest.mark.parametrize("name", ["pard_token", "ptd_token_id"])
def test_drafts_are_those_of_its_mask_tokens(tiny: Path, tmp_path: Path, name: str) -> None:
    folder = write_pard(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def reference(
        text: list[int], states: list[torch.Tensor], target: heads.Tensors, w: heads.Tensors, num: int
    ) -> list[int]:
        logits = model(torch.tensor([text + [MASK] * (num - 1)])).logits[0]
        return logits[len(text) - 1 :].argmax(-1).tolist()

    check(tiny, {"model": str(folder), "num_speculative_tokens": NUM}, reference, {})


def method_of(tiny: Path, **config: object) -> str:
    with LLM(str(tiny), **BASE, speculative_config={"num_speculative_tokens": 2, **config}) as llm:
        return llm.llm_engine.resolved.speculative.method


def test_its_config_says_how_it_drafts(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    """vLLM's key asks for it, or against it."""
    model = str(write_pard(tmp_path))
    assert method_of(tiny, model=model) == "pard"
    assert method_of(tiny, model=model, method="draft_model", parallel_drafting=True) == "pard"
    assert method_of(tiny, model=model, parallel_drafting=False) == "draft_model"
    assert method_of(tiny, model=str(tiny_draft)) == "draft_model"


def test_what_cannot_draft_in_parallel_is_refused(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no pard_token; leave out parallel_drafting"):
        method_of(tiny, model=str(tiny_draft), parallel_drafting=True)
    with pytest.raises(ValueError, match="parallel_drafting is for draft models, the method is ngram"):
        method_of(tiny, method="ngram", parallel_drafting=True)
    with pytest.raises(ValueError, match="pard_token of .* is 400, must be below its vocab_size 320"):
        method_of(tiny, model=str(write_pard(tmp_path, mask=400)))
