"""The layout and the dialect that docs/quantization.md writes, as they stand there, are such."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pellucid.quant.codes import S8
from pellucid.quant.layouts.base import LayerFormat, MatrixShape
from pellucid.quant.schemes.base import Options, StoredConfig

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
IMPORTS = """
import torch
from pellucid.quant.codes import ROW, S8, Codes, Scales
from pellucid.quant.layouts.base import FLOATS, LayerFormat, Layout, TensorSpec, checked
from pellucid.quant.schemes.base import EVERYTHING, LINEAR, QuantScheme, Rule, Rules, plain, refusal
"""


def example(name: str) -> dict[str, object]:
    """What the block of the page defines that has this class."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (found,) = (block for block in blocks if f"class {name}(" in block)
    names: dict[str, object] = {}
    exec(IMPORTS + found, names)
    return names


def test_the_example_of_a_dialect_names_layers() -> None:
    scheme = example("HalvesScheme")["HalvesScheme"]()  # type: ignore[operator]
    stored = StoredConfig(config={})
    rules = scheme.rules(stored, Options({"skip": ["lm_head"]}, "config.json"))
    assert rules.format_of("model.layers.0.mlp.up_proj").layout == "halves"
    assert rules.format_of("lm_head", "head") is None
    with pytest.raises(ValueError, match="stored with halves of 4 bits, which is not served: there are 8"):
        scheme.rules(stored, Options({"bits": 4}, "config.json"))


def test_the_example_of_a_layout_decodes() -> None:
    names = example("Halves")
    raw = {
        "codes": torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int8),
        "twice": torch.tensor([[1.0], [4]]),
    }
    codes = names["HALVES"].decode(raw, LayerFormat(layout="halves", code=S8), MatrixShape(2, 3))  # type: ignore[attr-defined]
    assert codes.dequantized().tolist() == [[0.5, -1.0, 1.5], [8.0, 10.0, -12.0]]
