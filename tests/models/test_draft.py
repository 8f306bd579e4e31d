"""What a checkpoint that drafts is, by its config.json, and what of it is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pellucid.config import EngineConfig, SpeculativeConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.draft import Draft, open_draft
from tests.spec import heads


def opened(target: Path | str, **speculative: object) -> Draft:
    config = EngineConfig.from_options({"model": str(target), "speculative_config": speculative})
    return open_draft(config, Checkpoint.open(config.model))


def kind(model: Path, folder: Path) -> tuple[str, int]:
    config = opened(model, model=str(folder)).config
    return config.method, config.num_speculative_tokens


def test_the_method_and_the_number_are_the_checkpoints(tiny: Path, tmp_path: Path) -> None:
    assert kind(tiny, heads.write_eagle(tmp_path / "1")) == ("eagle", 3)
    assert kind(tiny, heads.write_eagle3(tmp_path / "2")) == ("eagle3", 3)
    assert kind(tiny, heads.write_speculators(tmp_path / "3")) == ("eagle3", 4)
    assert kind(tiny, heads.write_medusa(tmp_path / "4", is_exported=True)) == ("medusa", 4)
    assert kind(tiny, heads.write_dflash(tmp_path / "6")) == ("dflash", 5)
    assert kind(tiny, heads.write_dflash_speculators(tmp_path / "7")) == ("dflash", 5)
    model = heads.write_with_mtp(tmp_path / "5", "deepseek")
    assert opened(model, method="deepseek_mtp").config == SpeculativeConfig(
        method="mtp", num_speculative_tokens=1
    )


def test_a_model_of_few_layers_is_a_draft_model(tiny: Path, tiny_draft: Path) -> None:
    config = opened(tiny, model=str(tiny_draft), num_speculative_tokens=2).config
    assert (config.method, config.num_speculative_tokens) == ("draft_model", 2)
    with pytest.raises(ValueError, match="drafts as draft_model; give num_speculative_tokens"):
        opened(tiny, model=str(tiny_draft))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 drafts"),
        ({"speculators_model_type": "dspark", "transformer_layer_config": {}}, "DSpark drafts"),
        ({"model_type": "mlp_speculator"}, "MLP speculators"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"], "num_speculative_tokens": 65},
            r"must be in \[1, 64\]",
        ),
    ],
    ids=str,
)
def test_kinds_that_are_not_served_are_named(tiny: Path, tmp_path: Path, config: dict, message: str) -> None:
    folder = heads.write_eagle3(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    number = {"num_speculative_tokens": 65} if "num_speculative_tokens" in config else {}
    with pytest.raises(ValueError, match=message):
        opened(tiny, model=str(folder), **number)
