"""Names that stand for classes, imported only when chosen.  Knows nothing of what it holds."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """name -> "module:Class".

    >>> backends: Registry[type] = Registry("backend", {"torch": "pellucid.attention.torch:TorchAttention"})
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def register(self, name: str, path: str) -> None:
        """Add an entry, or replace one: the door for code outside this package."""
        self._entries[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def load(self, name: str) -> T:
        """Import what `name` stands for.  Raises ValueError, listing the known names, if there is none."""
        self.check(name)
        return load_object(self._entries[name])

    def check(self, name: str) -> None:
        """Raise the ValueError of `load` if there is no entry `name`; import nothing."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self._entries))
            raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {known})")


def load_object(path: str) -> Any:
    """Import "module:Name"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
