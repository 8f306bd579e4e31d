"""Typed reading of a config.json, or a file like it: an error names the field that is missing or wrong.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Fields:
    """A config.json, or a part of it.  Null counts as absent; without a default a field must be there."""

    def __init__(self, config: Mapping[str, object], file: str = "config.json") -> None:
        self.config, self._file = config, file

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.config.get(name) is not None

    def int(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not float(value).is_integer():
            raise self._wrong(name, value, "an integer")
        return int(value)

    def size(self, name: str, default: int | None = None) -> int:
        """A number of things, of which there must be one."""
        value = self.int(name, default)
        if value < 1:
            raise self._wrong(name, value, "at least 1")
        return value

    def count(self, name: str, default: int) -> int:
        """A number of things; null is none, and only a field that is absent means `default`."""
        return 0 if name in self.config and not self.has(name) else self.int(name, default)

    def float(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "a number")
        return float(value)

    def bool(self, name: str, default: bool | None = None) -> bool:
        """Null is false where there is a default, as in Python."""
        value = self._value(name, False if default is not None and name in self.config else default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def str(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def strs(self, name: str) -> list[str]:
        value = self._value(name, None)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return [str(item) for item in value]

    def ints(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        value = self._value(name, default)
        if not isinstance(value, Sequence) or not all(isinstance(item, int) for item in value):
            raise self._wrong(name, value, "a list of integers")
        return list(value)

    def without(self, name: str) -> Fields:
        """The same, silent about one field."""
        return Fields({key: value for key, value in self.config.items() if key != name}, self._file)

    def floats(self, name: str) -> list[float]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
            raise self._wrong(name, value, "a list of numbers")
        return [float(item) for item in value]

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.float(name, default)
        if not value > 0:
            raise self._wrong(name, value, "above 0")
        return value

    def number(self, name: str, default: float | None) -> float | None:
        """A number above 0; null is none, and only a field that is absent means `default`."""
        return default if name not in self.config else self.positive(name) if self.has(name) else None

    def part(self, name: str) -> Fields:
        """A nested object."""
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, self._file)

    def _value(self, name: str, default: object) -> object:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self._file} has no {name!r}, which this model needs")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"{name} in {self._file} is {value!r}, must be {wanted}")
