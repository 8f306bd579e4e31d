"""The engine's half: when nothing is under way, workers are told to give memory away, or to take it back.

It knows no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from pellucid.sleep.state import AWAKE, KV_CACHE, TAGS, WEIGHTS, SleepState


class Workers(Protocol):
    """All of an engine's."""

    def call(self, name: str, *args: object) -> object: ...


class Running(Protocol):
    """Whose memory it is."""

    @property
    def num_running(self) -> int: ...

    def clear_prefix_cache(self) -> None: ...


class Rest:
    """Whether an engine plans steps, or is paused or asleep.

    `is_on` from an order on: no further step is planned, so what is under way comes home, and then `turn`
    follows the order.  What waits in the queue goes on waiting until all is back.
    """

    def __init__(self, workers: Workers, scheduler: Running) -> None:
        self.state: SleepState = AWAKE
        self._workers, self._scheduler = workers, scheduler
        self._is_paused = False
        self._why_not: str | None = None
        self._orders: deque[Callable[[], SleepState]] = deque()

    @property
    def is_due(self) -> bool:
        """Is there an order that has not been followed?"""
        return bool(self._orders)

    @property
    def is_on(self) -> bool:
        """May no step be planned?"""
        return self._is_paused or self.is_due or bool(self.state.away)

    def pause(self, *, is_on: bool) -> None:
        """Have no more steps planned, while all that there is stays as it is; or go on."""
        self._is_paused = is_on

    def forbid(self, why: str) -> None:
        """This engine never sleeps."""
        self._why_not = why

    def sleep(self, level: int) -> None:
        self._orders.append(lambda: self._fall_asleep(level))

    def wake_up(self, tags: tuple[str, ...]) -> None:
        self._orders.append(lambda: self._wake(tags))

    def turn(self, *, is_still: bool) -> None:
        """Follow what is due.  is_still: no step is under way."""
        while is_still and self._orders:
            state = self._orders[0]()
            self.state = replace(state, num_orders=self.state.num_orders + 1)
            self._orders.popleft()

    def _fall_asleep(self, level: int) -> SleepState:
        num_running, state = self._scheduler.num_running, self.state
        if self._why_not is not None:
            return self._refuse(f"this engine cannot sleep: {self._why_not}")
        if num_running:
            return self._refuse(
                f"{num_running} requests are running, and their KV would be lost; end them before"
            )
        if state.away and (level, TAGS) != (state.level, state.away):
            return self._refuse(f"it sleeps already, at level {state.level}; wake it up before")
        if not state.away:
            self._scheduler.clear_prefix_cache()
            self._workers.call("sleep", level)
        return SleepState(level=level, away=TAGS)

    def _wake(self, tags: tuple[str, ...]) -> SleepState:
        """Weights come first: a cache without them is of no use, and may stand in their way."""
        state = self.state
        wanted = [tag for tag in tags if tag in state.away]
        if wanted == [KV_CACHE] and WEIGHTS in state.away:
            return self._refuse(f"{KV_CACHE} comes back behind {WEIGHTS}; wake these up before")
        error = cast("str | None", self._workers.call("wake_up", wanted)) if wanted else None
        if error is not None:
            return self._refuse(error)
        away = tuple(tag for tag in state.away if tag not in wanted)
        return SleepState(level=state.level if away else 0, away=away)

    def _refuse(self, error: str) -> SleepState:
        return replace(self.state, error=error)
