"""What an engine has given away, as it tells it.

Level 1 moves weights to host memory, level 2 lets go of them and loads them again; KV and recorded steps are
made anew after either.  Names and levels are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)  # in the order in which they come back
LEVELS = (1, 2)
STATES = ("awake", "weights_offloaded", "discard_all")  # by level, in the metric


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepState:
    """How far an engine has followed orders to sleep and to wake."""

    level: int = 0  # of its sleep; 0 is awake
    away: tuple[str, ...] = ()  # TAGS of what has not come back
    num_orders: int = 0  # that it has followed, or refused
    error: str | None = None  # why it has refused the last one

    @classmethod
    def total(cls, parts: Sequence[Self]) -> Self:
        """Several engines as one: it is awake when all are, and has followed what all have."""
        away = {tag for part in parts for tag in part.away}
        return cls(
            level=max(part.level for part in parts),
            away=tuple(tag for tag in TAGS if tag in away),
            num_orders=min(part.num_orders for part in parts),
            error=next((part.error for part in parts if part.error is not None), None),
        )


class Rests(Protocol):
    """Takes orders; any state tells how many it has followed."""

    def sleep(self, level: int) -> None:
        """Give memory away once all that is under way has come home."""
        ...

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Take it back; what waits goes on when all is there."""
        ...


AWAKE = SleepState()
GONE = SleepState(num_orders=2**62)  # of an engine that has died: nobody waits for it


def check_level(level: int) -> int:
    """The level of a sleep.  Raises ValueError if there is no such one."""
    if level not in LEVELS:
        raise ValueError(
            f"level is {level!r}, must be 1 (weights go to host memory) or 2 (they are let go of); to stop "
            "the work alone, pause"
        )
    return level


def check_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    """What is to come back; None: all.  Raises ValueError for a tag that there is not."""
    unknown = [tag for tag in tags or () if tag not in TAGS]
    if unknown:
        raise ValueError(f"tags has {unknown[0]!r}, may have {' and '.join(TAGS)}")
    return tuple(tag for tag in TAGS if not tags or tag in tags)
