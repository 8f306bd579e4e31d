"""A block diffusion head fills in what plain torch fills in, however the engine has cut the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from pellucid import LLM
from tests.llm.test_invariance import BASE
from tests.spec import heads
from tests.spec.test_draft_model import worker_of
from tests.spec.test_heads import NUM, check

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": heads.WINDOW}


def compare(tiny: Path, folder: Path, *kinds: str, **options: object) -> None:
    config = {"model": str(folder), "num_speculative_tokens": NUM}
    check(tiny, config, heads.dflash(*kinds), load_file(folder / "model.safetensors"), **options)


def test_drafts_are_those_of_the_masked_places(tiny: Path, tmp_path: Path) -> None:
    compare(tiny, heads.write_dflash(tmp_path), FULL, FULL)


def test_it_may_have_a_vocabulary_and_a_mask_of_its_own_and_layers_with_windows(
    tiny: Path, tmp_path: Path
) -> None:
    """Queries of those see what lies before them alone."""
    compare(
        tiny, heads.write_dflash(tmp_path, has_own=True, **MIXED), SLIDING, FULL, num_gpu_blocks_override=40
    )


def test_the_speculators_project_s_config_says_the_same(tiny: Path, tmp_path: Path) -> None:
    folder = heads.write_dflash_speculators(tmp_path)
    with LLM(str(tiny), **BASE, speculative_config={"model": str(folder)}) as llm:
        (head,) = worker_of(llm.llm_engine.engine).models[1:]
        proposer = worker_of(llm.llm_engine.engine).runner.launcher.step.proposer  # type: ignore[attr-defined]
    assert len(head.attention_layers) == 2 and proposer.needs.taps == (1, 2)


REFUSED = {
    "blocks of 6, the newest token among them; use at most 5": ({}, {"num_speculative_tokens": 6}),
    "attention_sink_bias .* is True, but False is what is supported": (
        {"dflash_config": {"attention_sink_bias": True, "mask_token_id": 1, "target_layer_ids": [0, 1]}}, {},
    ),
    "has no 'target_layer_ids'": ({"dflash_config": {"mask_token_id": 1}}, {}),
    "mask_token_id .* is 320, must be below the model's vocab_size, 320": (
        {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [0, 1]}}, {},
    ),
    "reads what enters layers 1, 3, but the model has 2": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]}}, {},
    ),
    "layers with windows, and no sliding_window": ({"layer_types": [SLIDING, FULL]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_named(tiny: Path, tmp_path: Path, words: str) -> None:
    changes, options = REFUSED[words]
    folder = heads.write_dflash(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        LLM(str(tiny), **BASE, speculative_config={"model": str(folder), **options})
