"""Who may ask, and how much: keys with names and limits."""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.server.errors import ApiError
from pellucid.server.options import check_keys

MINUTE = 60.0
LIMITS = ("max_requests", "requests_per_minute")


@dataclass(slots=True)
class Key:
    """One of them, and what is done with it."""

    name: str
    secret: bytes
    max_requests: int | None = None  # under way at the same time
    requests_per_minute: int | None = None
    num_under_way: int = 0
    begun: deque[float] = field(default_factory=deque[float])  # when, in the last minute; seconds

    def end(self) -> None:
        """One that was under way has ended."""
        self.num_under_way -= 1


class Keys:
    """All that are known; none at all means that everybody may ask."""

    def __init__(self, keys: Sequence[Key], clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = list(keys), clock

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, brought: Sequence[str]) -> Key | None:
        """Which key is among these; each is compared with all, so that the time tells nothing."""
        are_brought = [
            sum(hmac.compare_digest(each.encode(), key.secret) for each in brought) > 0 for key in self._keys
        ]
        return self._keys[are_brought.index(True)] if any(are_brought) else None

    @contextmanager
    def counted(self, key: Key | None) -> Iterator[None]:
        """A request of this key's is under way.  Raises a 429 for one too many."""
        if key is None:
            yield
            return
        self._check(key)
        key.num_under_way += 1
        try:
            yield
        finally:
            key.end()

    def _check(self, key: Key) -> None:
        if key.max_requests is not None and key.num_under_way >= key.max_requests:
            raise ApiError(
                429,
                f"{key.num_under_way} requests of the key {key.name!r} are under way, max_requests is "
                f"{key.max_requests}; wait for one to end",
            )
        if key.requests_per_minute is None:
            return
        now = self._clock()
        while key.begun and key.begun[0] <= now - MINUTE:
            key.begun.popleft()
        if len(key.begun) >= key.requests_per_minute:
            seconds = key.begun[0] + MINUTE - now
            raise ApiError(
                429,
                f"the key {key.name!r} may send {key.requests_per_minute} requests a minute; the next in "
                f"{seconds:.0f} s",
            )
        key.begun.append(now)


def read_keys(path: str) -> list[Key]:
    """Of a file, `NAME: {key: .., max_requests: N, requests_per_minute: N}` in YAML.  Raises ValueError."""
    import yaml

    try:
        said = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"api_key_file {path!r}: {error}") from error
    if not isinstance(said, Mapping) or not said:
        raise ValueError(f"api_key_file {path!r} has no keys, must have lines such as `alice: {{key: ..}}`")
    try:
        return [_key(str(name), value) for name, value in said.items()]
    except ValueError as error:
        raise ValueError(f"api_key_file {path!r}: {error}") from error


def _key(name: str, said: object) -> Key:
    said = {"key": said} if isinstance(said, str) else said
    secret = said.get("key") if isinstance(said, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(secret, str) or not secret:
        raise ValueError(f"{name} has no `key`, a text")
    check_keys(name, [secret])
    if unknown := [each for each in said if each not in ("key", *LIMITS)]:
        raise ValueError(f"{name} has {unknown[0]!r}; {' and '.join(LIMITS)} are known")
    most, a_minute = (_limit(name, each, said.get(each)) for each in LIMITS)
    return Key(name, secret.encode(), most, a_minute)


def _limit(name: str, limit: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{name} has {limit} {value!r}, must be at least 1")
