"""The tiers beside the scheduler: whatever happens, a load brings what its digests stand for."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from pellucid.connectors.lending import Transfer
from pellucid.connectors.tiers.files import name_of
from pellucid.connectors.tiers.host import Tiers
from pellucid.kv.kinds import Full, Kind, Window
from pellucid.types import Request
from tests.schedule.device import make_request

SIZE = 4
KINDS: list[tuple[Kind, ...]] = [(Full(SIZE),), (Full(SIZE, 2), Window(SIZE, 1, 6))]


class FakeDoor:
    """Keeps what is to be done; does it, or fails, when asked.  Contents are (kind, digest, stripe)."""

    def __init__(self, kinds: tuple[Kind, ...], num_pages: int, max_disk: int, rng: random.Random) -> None:
        self.kinds, self.block_size, self.num_ranks, self.rng = kinds, SIZE, 1, rng
        self.host: dict[int, object] = {}
        self.disk: dict[str, list[object]] = {}
        self.under_way: list[tuple[Transfer, dict[str, Any], dict[int, object]]] = []
        self.tiers = Tiers.__new__(Tiers)
        self.tiers._begin(self, num_pages)
        self.tiers._has_disk, self.tiers._max_disk = max_disk > 0, max_disk
        self.tiers.disk = OrderedDict()
        self.num_loads = 0

    def start(self, what: object) -> Transfer:
        transfer = Transfer()
        self.under_way.append((transfer, what, {}))  # type: ignore[arg-type]
        return transfer

    def end(self, transfer: Transfer, *, ok: bool = True) -> None:
        raise AssertionError("nothing is kept")

    def transfer(self, digests: list[bytes], first: dict[int, int], *, is_load: bool) -> Transfer:
        """first: of each kind the block from which on it is there."""
        width = sum(kind.stripes for kind in self.kinds)
        pages = np.zeros((len(digests), width), dtype=np.int32)
        number, column = 1, 0
        for kind, each in enumerate(self.kinds):
            for row in range(max(0, first[kind]), len(digests)):
                for stripe in range(each.stripes):
                    pages[row, column + stripe] = number = number + 1
            column += each.stripes
        return Transfer(is_load=is_load, digests=digests, pages=pages)

    def contents(self, transfer: Transfer) -> dict[int, object]:
        """What the pages of a transfer hold."""
        return {
            int(page): (kind, digest, stripe)
            for kind, digest, cells in self.tiers._parts(transfer)
            for stripe, page in enumerate(cells)
        }

    def save(self, digests: list[bytes], kind: int) -> None:
        first = {i: 0 if i == kind else len(digests) for i in range(len(self.kinds))}
        transfer = self.transfer(digests, first, is_load=False)
        what = self.tiers.published(transfer)
        if what is not None:
            self.under_way.append((transfer, what, self.contents(transfer)))  # type: ignore[arg-type]

    def load(self, digests: list[bytes], num_cached: int) -> None:
        num = self.tiers.lookup(make_request("a"), digests, num_cached * SIZE) // SIZE
        if num <= num_cached:
            return
        first = {
            i: max(0, int(kind.first_kept(np.array(num * SIZE))) - num_cached) if kind.gives_back else 0
            for i, kind in enumerate(self.kinds)
        }
        transfer = self.transfer(digests[num_cached:num], first, is_load=True)
        self.under_way.append((transfer, self.tiers.load(transfer), self.contents(transfer)))  # type: ignore[arg-type]
        self.num_loads += 1

    def finish_one(self) -> None:
        transfer, what, contents = self.under_way.pop(self.rng.randrange(len(self.under_way)))
        ok = self.rng.random() < 0.9
        for name in what.get("drop", ()):
            self.disk.pop(name, None)
        for name, places in what.get("write", ()):
            if ok:
                self.disk[name] = [self.host[place] for place in places]
        if transfer.is_load:
            for name, places in what["read"]:
                ok &= name in self.disk
                for i, place in enumerate(places):
                    self.host[place] = self.disk[name][i] if ok else None
            if ok:
                assert [self.host[place] for place in what["places"]] == list(contents.values())
        elif "places" in what:
            for place, content in zip(what["places"], contents.values(), strict=True):
                self.host[place] = content if ok else None
        self.tiers.ended(transfer, ok=ok)


@pytest.mark.parametrize("seed", range(40))
def test_a_load_brings_what_was_saved_under_its_digests(seed: int) -> None:
    rng = random.Random(seed)
    door = FakeDoor(KINDS[seed % 2], rng.choice([6, 20, 60]), rng.choice([0, 8, 40, 400]), rng)
    texts = [[bytes([text, block]) for block in range(rng.randint(1, 9))] for text in range(6)]
    for _ in range(400):
        digests = rng.choice(texts)
        what = rng.random()
        if what < 0.4:
            start = rng.randrange(len(digests))
            door.save(digests[start:], rng.randrange(len(door.kinds)))
        elif what < 0.6:
            door.load(digests, rng.randrange(len(digests)))
        elif what < 0.605:
            door.tiers.forget()
        elif door.under_way:
            door.finish_one()
        assert door.tiers._num_disk <= max(door.tiers._max_disk, 0)
    while door.under_way:
        door.finish_one()
    door.tiers.check()


def test_the_least_recently_used_go_first_and_a_prefix_goes_last() -> None:
    door = FakeDoor(KINDS[0], 4, 0, random.Random(1))
    door.rng.random = lambda: 0.0  # type: ignore[method-assign]
    for text in (b"a", b"b"):
        door.save([text + bytes([i]) for i in range(3)], 0)
        while door.under_way:
            door.finish_one()
    a, b = ([text + bytes([i]) for i in range(3)] for text in (b"a", b"b"))
    request: Request = make_request("a")
    assert door.tiers.lookup(request, b, 0) == 3 * SIZE and door.tiers.lookup(request, a, 0) == SIZE


def test_a_block_that_is_on_disk_alone_is_found_there_and_comes_up() -> None:
    door = FakeDoor(KINDS[0], 8, 100, random.Random(1))
    door.rng.random = lambda: 0.0  # type: ignore[method-assign]
    door.save([b"a"], 0)
    while door.under_way:
        door.finish_one()
    assert list(door.disk) == [name_of(0, b"a")] == list(door.tiers.disk)
    door.tiers.pool.reset()
    door.load([b"a"], 0)
    assert door.num_loads == 1 and door.tiers.stats.disk_blocks_loaded == 1
    door.finish_one()
    assert b"a" in door.tiers.pool.index(0)
