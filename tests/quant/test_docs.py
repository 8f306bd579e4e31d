"""The layout that docs/quantization.md writes, as it stands there, is one."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pellucid.quant.codes import S8
from pellucid.quant.layouts.base import LayerFormat, MatrixShape

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
IMPORTS = """
import torch
from pellucid.quant.codes import S8, Codes, Scales
from pellucid.quant.layouts.base import FLOATS, Axes, Layout, TensorSpec, checked
"""


def test_the_example_of_a_layout_decodes() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (example,) = (block for block in blocks if "class Halves" in block)
    names: dict[str, object] = {}
    exec(IMPORTS + example, names)
    raw = {
        "codes": torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int8),
        "twice": torch.tensor([[1.0], [4]]),
    }
    codes = names["HALVES"].decode(raw, LayerFormat(layout="halves", code=S8), MatrixShape(2, 3))  # type: ignore[attr-defined]
    assert codes.dequantized().tolist() == [[0.5, -1.0, 1.5], [8.0, 10.0, -12.0]]
