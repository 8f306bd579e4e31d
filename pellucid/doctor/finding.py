"""One thing that was looked at: how it is, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "error"]  # an error: something will not run


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    said: str
    verdict: Verdict = "ok"
    advice: str = ""


def ok(name: str, said: str) -> Finding:
    return Finding(name, said)


def warning(name: str, said: str, advice: str) -> Finding:
    return Finding(name, said, "warning", advice)


def error(name: str, said: str, advice: str) -> Finding:
    return Finding(name, said, "error", advice)


def look(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """All that a check finds; one that fails is a finding, too."""
    found = list[Finding]()
    try:
        found.extend(check())
    except Exception as failure:
        said = f"could not be looked at: {type(failure).__name__}: {failure}"
        found.append(warning(name, said, "nothing else may be wrong; please report it"))
    return found
