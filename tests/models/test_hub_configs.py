"""A config.json as the hub has it means what transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pellucid
from pellucid.models.decoder import Decoder
from pellucid.models.fields import Fields
from pellucid.models.registry import MODELS

transformers = pytest.importorskip("transformers")
FILES = [
    *(Path(__file__).parent / "configs").glob("*.json"),
    *(Path(pellucid.__file__).parent / "assets" / "shapes").glob("*.json"),
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_both_spellings_declare_the_same(file: Path, tmp_path: Path) -> None:
    config = json.loads(file.read_text())
    family = MODELS.load(config["architectures"][0])
    assert issubclass(family, Decoder)
    (tmp_path / "config.json").write_text(file.read_text())
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert rewritten.keys() != config.keys(), "the same spelling"
    assert family.declare(Fields(rewritten)) == family.declare(Fields(config))
