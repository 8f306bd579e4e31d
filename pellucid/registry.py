"""Names that stand for classes, imported only when chosen.  Knows nothing of what it holds."""

from __future__ import annotations

import difflib
import importlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_additions: dict[str, dict[str, str]] = {}  # kind -> name -> path: what code outside this package registers


class Registry(Generic[T]):
    """name -> "module:Class".

    >>> backends: Registry[type] = Registry("backend", {"torch": "pellucid.attention.torch:TorchAttention"})
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = ChainMap(_additions.setdefault(kind, {}), entries)

    def register(self, name: str, path: str) -> None:
        """Add an entry, or replace one: the door for code outside this package.

        Processes that this one starts from now on know it, too; they import the module, and never a script.
        """
        self._entries[name] = path

    def unregister(self, name: str) -> None:
        """Take back what was registered; an entry that it replaced is there again."""
        del self._entries[name]

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


def additions() -> dict[str, dict[str, str]]:
    """What has been registered here, by kind and name."""
    return {kind: dict(entries) for kind, entries in _additions.items() if entries}


def adopt(theirs: Mapping[str, Mapping[str, str]]) -> None:
    """Register what another process has."""
    for kind, entries in theirs.items():
        _additions.setdefault(kind, {}).update(entries)


def load_object(path: str) -> Any:
    """Import "module:Name".  Raises ValueError for a name in a script that another process runs."""
    module_name, _, attribute = path.partition(":")
    module = importlib.import_module(module_name)
    if module_name == "__main__" and not hasattr(module, attribute):
        raise ValueError(
            f"{path} is in a script, which other processes do not run; put {attribute} into a module "
            f'beside it, say mine.py, and name it "mine:{attribute}"'
        )
    return getattr(module, attribute)
