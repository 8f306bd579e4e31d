"""The Python standard library's own sources as plain text, split into training and held-out modules.

Read from the interpreter that runs this (PSF licence); a module is held out by a hash of its path alone.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path
from random import Random

from chat import Document, held_out

_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}


@lru_cache(maxsize=2)
def modules(*, held: bool) -> tuple[tuple[str, str], ...]:
    """List (relative path, text) of the standard library's modules on the asked side of the split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIPPED.isdisjoint(name.split("/")) and held_out(f"python:{name}") == held:
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > 400:
                found.append((name, text))
    return tuple(found)


@lru_cache(maxsize=1)
def _training_text() -> tuple[str, ...]:
    return tuple(text for _, text in modules(held=False))


@lru_cache(maxsize=1)
def _weights() -> list[int]:
    return [len(text) for text in _training_text()]


def python_text(rng: Random, *, max_chars: int) -> Document:
    """Draw a stretch of a module, from its start or from any line, up to max_chars."""
    text = rng.choices(_training_text(), _weights())[0]
    start = 0
    if len(text) > max_chars and rng.random() < 0.9:
        start = text.rfind("\n", 0, _window_start(rng, len(text), max_chars)) + 1
    stretch = text[start : start + max_chars]
    whole = start + max_chars >= len(text)
    return Document("", stretch + ("<|endoftext|>" if whole else ""))


def _window_start(rng: Random, length: int, window: int) -> int:
    """Draw where a window may start so that most of it is filled."""
    return int(rng.random() * max(1, length - window // 2))
