"""The pages of models: the one that shows how a family is added shows one as it is, the other knows all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pellucid
from pellucid.models import decoder_config
from pellucid.models.registry import MODELS
from pellucid.registry import additions

ROOT = Path(pellucid.__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="installed without its pages")
def test_the_examples_are_the_families_themselves() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    examples = [block for block in blocks if "(Decoder)" in block]
    assert [re.match(r"class (\w+)", example)[1] for example in examples] == ["Gemma2", "Gemma"]  # type: ignore[index]
    for example in examples:
        assert example in (ROOT / "pellucid" / "models" / "gemma.py").read_text()


@pytest.mark.skipif(not PAGE.is_file(), reason="installed without its pages")
def test_the_page_names_all_that_can_be_declared() -> None:
    page = PAGE.read_text()
    for declared in (
        decoder_config.DecoderConfig,
        decoder_config.GQA,
        decoder_config.Norms,
        decoder_config.Scores,
    ):
        for name in declared.__dataclass_fields__.keys() - {"vocab_size", "hidden_size", "tied"}:
            assert name in page, f"{declared.__name__}.{name} is not on the page"


@pytest.mark.skipif(not PAGE.is_file(), reason="installed without its pages")
def test_the_page_of_models_names_every_architecture() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    ours = set(MODELS) - additions().get("model architecture", {}).keys()
    assert {name for name in ours if f"`{name}`" not in page} == set()
