"""The code that docs/quantization.md teaches methods with runs, and shows what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"


def test_each_method_of_the_page_loses_less_than_the_one_before() -> None:
    section = PAGE.read_text(encoding="utf-8").split("### Why groups have scales")[1].split("\n## ")[0]
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        exec(block, names)
    lost: Callable[[Tensor], float] = names["lost"]  # type: ignore[assignment]
    losses = [lost(names[f"by_{name}"]) for name in ("rows", "groups", "awq", "gptq")]  # type: ignore[arg-type]
    assert losses == sorted(losses, reverse=True) and losses[3] < 0.7 * losses[2], losses
