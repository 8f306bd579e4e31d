"""The tiers beside the scheduler: whatever happens, a load brings what its digests stand for."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pellucid.connectors.lending import Transfer
from pellucid.connectors.tiers.files import name_of, path_of, write
from pellucid.connectors.tiers.host import Tiers
from pellucid.connectors.tiers.options import TierOptions
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
        self.disk: dict[str, list[object] | None] = {}  # files, of a block that was not written whole None
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

    def to_drop(self) -> list[str]:
        """Files that are removed with writes under way."""
        return [name for _, what, _ in self.under_way for name in what.get("drop", ())]

    def settle(self) -> None:
        while self.under_way:
            self.finish_one()

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
        """Any of those under way; but files are written one after the other."""
        index = self.rng.randrange(len(self.under_way))
        if "write" in self.under_way[index][1]:
            index = next(i for i, (_, what, _) in enumerate(self.under_way) if "write" in what)
        transfer, what, contents = self.under_way.pop(index)
        ok = self.rng.random() < 0.9
        for name in what.get("drop", ()):
            self.disk.pop(name, None)
        for name, places in what.get("write", ()):
            self.disk[name] = [self.host[place] for place in places] if ok else None
        if transfer.is_load:
            for name, places in what["read"]:
                found = self.disk.get(name)
                ok &= found is not None
                for i, place in enumerate(places):
                    self.host[place] = found[i] if ok and found else None
            if ok:
                assert [self.host[place] for place in what["places"]] == list(contents.values())
        elif "places" in what:
            for place, content in zip(what["places"], contents.values(), strict=True):
                self.host[place] = content if ok else None
        self.tiers.ended(transfer, ok=ok)
        if transfer.is_load and not ok:
            assert not any(name in self.tiers.disk for name, _ in what["read"]), "it would fail again"


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
        assert {*door.disk} <= {*door.tiers.disk, *door.tiers._writing, *door.tiers._dropped, *door.to_drop()}
    door.settle()
    door.tiers.check()
    assert {*door.tiers.disk} <= {*door.disk} <= {*door.tiers.disk, *door.tiers._dropped}, "files of nobody"


def test_the_least_recently_used_go_first_and_a_prefix_goes_last() -> None:
    door = FakeDoor(KINDS[0], 4, 0, random.Random(1))
    door.rng.random = lambda: 0.0  # type: ignore[method-assign]
    for text in (b"a", b"b"):
        door.save([text + bytes([i]) for i in range(3)], 0)
        door.settle()
    a, b = ([text + bytes([i]) for i in range(3)] for text in (b"a", b"b"))
    request: Request = make_request("a")
    assert door.tiers.lookup(request, b, 0) == 3 * SIZE and door.tiers.lookup(request, a, 0) == SIZE


@pytest.mark.parametrize("where", ["host", "disk"])
def test_what_is_loaded_again_outlives_what_is_not(where: str) -> None:
    """In host memory, and on disk, where a block is used also if host memory has it."""
    for is_there in (True, False):
        door = FakeDoor(KINDS[0], *((2, 0) if where == "host" else (16, 2)), random.Random(1))
        door.rng.random = lambda: 0.0  # type: ignore[method-assign]
        for text in (b"a", b"b"):
            door.save([text], 0)
            door.settle()
        if where == "disk" and not is_there:
            door.tiers.pool.reset()
        for text in (b"a", b"c"):
            (door.load if text == b"a" else door.save)([text], 0)
            door.settle()
        kept = door.tiers.pool.index(0) if where == "host" else door.tiers.disk
        names = [text if where == "host" else name_of(0, text) for text in (b"a", b"b", b"c")]
        assert [name in kept for name in names] == [True, False, True]
        assert where == "host" or {*door.disk} == {*kept}


def test_what_lies_in_a_folder_from_before_is_within_the_bound_too(tmp_path: Path) -> None:
    names = [name_of(0, bytes([i])) for i in range(5)]
    for age, name in enumerate(names):
        write(path_of(tmp_path, name, 0), [memoryview(b"x")])
        os.utime(path_of(tmp_path, name, 0), (1e9 - age, 1e9 - age))
    door = FakeDoor(KINDS[0], 16, 0, random.Random(1))
    door.tiers._begin(door, 16, tmp_path, 3)
    assert [*door.tiers.disk] == names[2::-1] and {*door.tiers._dropped} == {*names[3:]}


def test_all_ranks_together_hold_no_more_bytes_than_they_may() -> None:
    options = TierOptions(host_bytes=1000, disk_bytes=10_000)
    capacity: Any = SimpleNamespace(page_bytes=90, kinds=(Full(SIZE),))
    for num_ranks in (1, 2, 4):
        for num, most in (
            (options.num_host_pages(capacity, num_ranks), 1000),
            (options.num_disk_pages(capacity, num_ranks), 10_000),
        ):
            assert most - 90 * num_ranks < 90 * num_ranks * num <= most


def test_a_block_that_is_on_disk_alone_is_found_there_and_comes_up() -> None:
    door = FakeDoor(KINDS[0], 8, 100, random.Random(1))
    door.rng.random = lambda: 0.0  # type: ignore[method-assign]
    door.save([b"a"], 0)
    door.settle()
    assert list(door.disk) == [name_of(0, b"a")] == list(door.tiers.disk)
    door.tiers.pool.reset()
    door.load([b"a"], 0)
    assert door.num_loads == 1 and door.tiers.stats.disk_blocks_loaded == 1
    door.finish_one()
    assert b"a" in door.tiers.pool.index(0)
