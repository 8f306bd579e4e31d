"""Cases of a product of values: some in every run, in which each value occurs, the others elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def diagonal(axes: Mapping[str, Sequence[Any]], every: int = 2) -> pytest.MarkDecorator:
    """Parametrize with all combinations: those whose places do not add up to a multiple of `every` are left
    to `make test-matrix`.

    axes: by an argument's name, or by several with commas between, its values, or tuples of theirs; where
    one has marks, pytest.param of it.
    """
    cases, seen = [], set[tuple[str, int]]()
    for places in product(*(range(len(values)) for values in axes.values())):
        values, marks = list[Any](), list[Any]()
        for (names, all_values), place in zip(axes.items(), places, strict=True):
            value = all_values[place]
            is_param = hasattr(value, "marks")  # pytest.param(value, marks=...)
            marks += value.marks if is_param else ()
            values += value.values if is_param else value if "," in names else [value]
        is_left = sum(places) % every != 0
        seen |= set() if is_left else {*zip(axes, places, strict=True)}
        marks += [pytest.mark.matrix] if is_left else []
        cases.append(pytest.param(*values, marks=marks, id="-".join(map(_told, values))))
    assert len(seen) == sum(map(len, axes.values())), "a value would never be tried"
    return pytest.mark.parametrize(",".join(axes), cases)


def _told(value: object) -> str:
    words = str(value)
    return words if len(words) < 40 else f"{len(value)}" if isinstance(value, Sequence) else words[:40]
