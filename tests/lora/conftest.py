"""Adapters of peft's own making, and beside each the model with it merged in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.tiny import write_checkpoint

TARGETS = {
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "some": ["q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"],
    "one": ["k_proj"],
}


def write_adapters(tiny: Path, parent: Path) -> dict[str, Path]:
    """By name, a folder with `adapter` and `merged`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    found: dict[str, Path] = {}
    for seed, (name, targets) in enumerate(TARGETS.items()):
        torch.manual_seed(seed)
        folder = parent / name
        config = LoraConfig(
            r=(4, 8, 6)[seed], lora_alpha=12, target_modules=targets, use_rslora=name == "some",
            rank_pattern={"q_proj": 2} if name == "all" else {}, init_lora_weights=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        tuned = get_peft_model(model, config)
        tuned.save_pretrained(str(folder / "adapter"))
        cast("Any", tuned).merge_and_unload().save_pretrained(folder / "merged")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "merged" / file).write_text((tiny / file).read_text())
        found[name] = folder
    return found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_adapters(tiny, tmp_path_factory.mktemp("adapters"))
