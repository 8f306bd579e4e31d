"""Typed reading of a config.json: a missing or mistyped field is an error that names it.  No torch."""

from __future__ import annotations

from collections.abc import Mapping


class Fields:
    """A config.json, or a part of it.  Null counts as absent; without a default a field must be there."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = config

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.config.get(name) is not None

    def int(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise self._mistyped(name, value, "an integer")
        return int(value)

    def float(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._mistyped(name, value, "a number")
        return float(value)

    def bool(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._mistyped(name, value, "true or false")
        return value

    def str(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._mistyped(name, value, "a string")
        return value

    def strs(self, name: str) -> list[str]:
        value = self._value(name, None)
        if not isinstance(value, list):
            raise self._mistyped(name, value, "a list")
        return [str(item) for item in value]

    def part(self, name: str) -> Fields:
        """A nested object."""
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self._mistyped(name, value, "an object")
        return Fields(value)

    def _value(self, name: str, default: object) -> object:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"config.json has no {name!r}, which this model needs")
        return value

    def _mistyped(self, name: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"{name} in config.json is {value!r}, must be {wanted}")
