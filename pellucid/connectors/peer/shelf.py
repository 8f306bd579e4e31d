"""Which page of which block lies at which place of the memory that other engines read.

The engine's thread puts pages there, threads of connections look them up, all under one lock.  No bytes here.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pellucid.connectors.peer.wire import Key


@dataclass(slots=True)
class Lent:
    """Pages that are kept for whoever asks for a request's."""

    places: list[int]
    until: float  # seconds of `clock`
    ranks: set[int] = field(default_factory=set[int])  # that have read them


class Shelf:
    """Places for pages, the longest unused given away first; none while it is read, written or kept."""

    def __init__(
        self, num_places: int, *, num_ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_places = num_places
        self._num_ranks, self._clock = num_ranks, clock
        self._free = list(range(num_places - 1, -1, -1))
        self._places: OrderedDict[Key, int] = OrderedDict()  # the longest unused first
        self._written: set[Key] = set()  # what lies there is whole
        self._holds: dict[int, int] = {}  # by how many a place is held
        self._nameless: set[int] = set()  # places that are held, and hold what nobody is to find any more
        self._lent: dict[str, Lent] = {}  # by request
        self._changed = threading.Condition()

    # The engine's thread

    def put(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Places for pages that are not there yet, to be written; fewer, if there are too few."""
        with self._changed:
            new: dict[Key, int] = {}
            for key in keys:
                if key in self._places:
                    self._places.move_to_end(key)
                elif (place := self._take()) is not None:
                    new[key] = self._places[key] = place
                    self._hold(place)
            return new

    def written(self, new: Mapping[Key, int], *, ok: bool) -> None:
        """What `put` gave places to is there on all ranks, or will not be."""
        with self._changed:
            for key, place in new.items():
                if self._places.get(key) == place:  # else it was forgotten meanwhile
                    if ok:
                        self._written.add(key)
                    else:
                        del self._places[key]
                        self._nameless.add(place)
                self._let_go(place)
            self._changed.notify_all()

    def lend(self, request_id: str, keys: Sequence[Key], seconds: float) -> None:
        """Keep these pages, as far as they are there, until every rank has read them, or for so long."""
        with self._changed:
            self._end(request_id)
            there = [self._places[key] for key in keys if key in self._places]
            for place in there:
                self._hold(place)
            self._lent[request_id] = Lent(there, self._clock() + seconds)

    def expire(self) -> int:
        """Keep no longer what nobody has asked for in time.  Returns for how many requests."""
        now = self._clock()
        with self._changed:
            late = [name for name, lent in self._lent.items() if lent.until <= now]
            for name in late:
                self._end(name)
            return len(late)

    def forget(self) -> None:
        """What lies here is of no use any more; who reads now reads what it was promised."""
        with self._changed:
            for name in list(self._lent):
                self._end(name)
            held = [place for place in self._places.values() if place in self._holds]
            self._nameless.update(held)
            self._free += [place for place in self._places.values() if place not in self._holds]
            self._places.clear()
            self._written.clear()
            self._changed.notify_all()

    # Threads of connections

    def find(self, keys: Sequence[Key], seconds: float) -> list[int] | None:
        """Places of these pages, held until `release`; None if one is not there, or not within so long."""
        until = self._clock() + seconds
        with self._changed:
            while not all(key in self._written for key in keys):
                left = until - self._clock()
                if left <= 0 or not all(key in self._places for key in keys):
                    return None
                self._changed.wait(left)
            places = [self._places[key] for key in keys]
            for place in places:
                self._hold(place)
            return places

    def release(self, places: Iterable[int]) -> None:
        """They are read."""
        with self._changed:
            for place in places:
                self._let_go(place)

    def has_read(self, request_id: str, rank: int) -> None:
        """A rank wants no more of a request."""
        with self._changed:
            if (lent := self._lent.get(request_id)) is not None:
                lent.ranks.add(rank)
                if len(lent.ranks) == self._num_ranks:
                    self._end(request_id)

    @property
    def num_lent(self) -> int:
        """Requests whose pages are kept."""
        return len(self._lent)

    # Under the lock

    def _take(self) -> int | None:
        if not self._free:
            victim = next((key for key, place in self._places.items() if place not in self._holds), None)
            if victim is None:
                return None
            self._written.discard(victim)
            self._free.append(self._places.pop(victim))
        return self._free.pop()

    def _hold(self, place: int) -> None:
        self._holds[place] = self._holds.get(place, 0) + 1

    def _let_go(self, place: int) -> None:
        self._holds[place] -= 1
        if not self._holds[place]:
            del self._holds[place]
            if place in self._nameless:
                self._nameless.remove(place)
                self._free.append(place)

    def _end(self, request_id: str) -> None:
        lent = self._lent.pop(request_id, None)
        for place in lent.places if lent else ():
            self._let_go(place)
