"""The tiers beside the scheduler: which blocks lie in host memory and on disk; least recently used go first.

Host memory is a pool of pages like the engine's own, with the same numbers on all ranks.  What can be found
in the engine's pool is saved there, and behind that on disk; a load pins what it reads, and brings what is
only on disk up on its way.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pellucid.connectors.base import Door
from pellucid.connectors.lending import Transfer
from pellucid.connectors.tiers.files import Name, listing, name_of
from pellucid.connectors.tiers.options import TierOptions
from pellucid.kv.pool import PagePool, Pages
from pellucid.types import Request

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity
    from pellucid.resolve import Resolved

logger = logging.getLogger(__name__)
MOST_WRITES = 8  # blocks that wait to be written to disk hold a share of host memory: one in so many


@dataclass(slots=True)
class TierStats:
    """What came of it, since the start."""

    lookups: int = 0
    hits: int = 0  # that could bring something
    host_blocks_loaded: int = 0  # from host memory
    disk_blocks_loaded: int = 0
    host_blocks_saved: int = 0
    disk_blocks_saved: int = 0
    failed_loads: int = 0
    host_bytes_loaded: int = 0  # of all ranks
    disk_bytes_loaded: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Of one kind, in host memory."""

    kind: int
    digest: bytes
    pages: Pages  # [1, stripes]
    is_new: bool  # nobody finds it before it is there


@dataclass(slots=True)
class Plan:
    """What a transfer does here."""

    generation: int
    blocks: list[Block] = field(default_factory=list[Block])
    names: list[Name] = field(default_factory=list[Name])  # read from disk, or written to it
    is_write: bool = False  # to disk


class Both:
    """Of a kind, all that can be loaded."""

    def __init__(self, kind: int, *indices: Container[bytes], disk: Mapping[Name, None]) -> None:
        self._kind, self._indices, self._disk = kind, indices, disk

    def __contains__(self, digest: object) -> bool:
        if not isinstance(digest, bytes):
            return False
        if any(digest in index for index in self._indices):
            return True
        return bool(self._disk) and name_of(self._kind, digest) in self._disk


class Tiers:
    """The half beside the scheduler."""

    def __init__(
        self, door: Door, resolved: Resolved, capacity: Capacity, options: Mapping[str, object]
    ) -> None:
        tiers, num_ranks = TierOptions.of(options), door.num_ranks
        folder = None if tiers.folder is None else tiers.own_folder(resolved, capacity)
        self._begin(
            door, tiers.num_host_pages(capacity, num_ranks), folder, tiers.num_disk_pages(capacity, num_ranks)
        )
        self._bytes = capacity.page_bytes * num_ranks
        size = self._bytes / 2**30
        logger.info(
            "KV tiers: %.2f GiB of host memory%s",
            self.pool.num_pages * size,
            f", {self._max_disk * size:.1f} GiB in {folder}, of which {len(self.disk)} blocks are there"
            if folder
            else "",
        )

    def _begin(self, door: Door, num_pages: int, folder: Path | None = None, max_disk: int = 0) -> None:
        self._door, self.kinds = door, door.kinds
        ends = np.cumsum([0, *(kind.stripes for kind in self.kinds)]).tolist()
        self._columns = [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]
        self.pool = PagePool(num_pages, len(self.kinds))
        self.stats, self._bytes = TierStats(), 0  # of a page, of all ranks
        self._coming: set[tuple[int, bytes]] = set()  # to host memory
        self._generation = 0
        self._has_disk, self._max_disk = folder is not None, max_disk  # pages
        self.disk: OrderedDict[Name, None] = OrderedDict()
        if folder is not None:
            self.disk = listing(folder, door.num_ranks)
        self._writing: set[Name] = set()
        self._dropped: list[Name] = []  # from disk, and nobody has removed them yet
        self._num_disk = sum(map(self._disk_pages, self.disk))  # pages
        self._make_room_on_disk()

    # What the scheduler asks

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        size = self._door.block_size
        self.stats.lookups += 1
        here = set(digests[: num_cached // size])
        for disk in (self.disk, OrderedDict[Name, None]()):
            found = self._reach(digests, here, disk)
            if found * size <= num_cached:
                return 0
            if self._has_room_for(digests[num_cached // size : found]):
                self.stats.hits += 1
                return found * size
        return 0

    def _reach(self, digests: Sequence[bytes], here: set[bytes], disk: Mapping[Name, None]) -> int:
        """Blocks from which every kind can go on."""
        indices = [Both(i, here, self.pool.index(i), disk=disk) for i in range(len(self.kinds))]
        found, num = list(digests), -1
        while num != len(found):
            num = len(found)
            for kind, index in zip(self.kinds, indices, strict=True):
                del found[kind.reach(found, index) :]  # type: ignore[arg-type]
        return num

    def _has_room_for(self, digests: Sequence[bytes]) -> bool:
        """Can all that is loaded lie in host memory at once?"""
        most = len(digests) * sum(kind.stripes for kind in self.kinds)
        return most <= self.pool.num_free or all(
            digest in self.pool.index(i) for digest in digests for i in range(len(self.kinds))
        )

    def load(self, transfer: Transfer) -> object:
        plan = Plan(self._generation)
        missing: list[tuple[int, bytes]] = []
        for kind, digest, _ in self._parts(transfer):
            pages = self.pool.index(kind).get(digest)
            if pages is not None:
                block = np.array([pages], dtype=np.int32)
                self.pool.hold(block)  # before room is made for others
                plan.blocks.append(Block(kind, digest, block, is_new=False))
            else:
                missing.append((kind, digest))
        for kind, digest in missing:
            pages = self.pool.take(self.kinds[kind].stripes).reshape(1, -1)
            plan.blocks.append(Block(kind, digest, pages, is_new=True))
        self.stats.host_blocks_loaded += len(plan.blocks) - len(missing)
        self.stats.disk_blocks_loaded += len(missing)
        for block in plan.blocks:
            if block.is_new:
                self.stats.disk_bytes_loaded += block.pages.size * self._bytes
            else:
                self.stats.host_bytes_loaded += block.pages.size * self._bytes
        by_key = {(block.kind, block.digest): block for block in plan.blocks}
        order = [by_key[kind, digest].pages[0].tolist() for kind, digest, _ in self._parts(transfer)]
        plan.names = [name_of(*key) for key in missing]
        for name in plan.names:
            self.disk.move_to_end(name)
        transfer.meta = plan
        reads = [[name_of(*key), by_key[key].pages[0].tolist()] for key in missing]
        return {"places": [page for pages in order for page in pages], "read": reads}

    def published(self, transfer: Transfer) -> object:
        plan = Plan(self._generation)
        for kind, digest, cells in self._parts(transfer):
            stripes = self.kinds[kind].stripes
            is_known = digest in self.pool.index(kind) or (kind, digest) in self._coming
            if is_known or self.pool.num_free < stripes:
                cells[:] = 0
                continue
            self._coming.add((kind, digest))
            plan.blocks.append(Block(kind, digest, self.pool.take(stripes).reshape(1, -1), is_new=True))
        if not plan.blocks:
            return None
        transfer.meta = plan
        return {"places": [page for block in plan.blocks for page in block.pages[0].tolist()]}

    def left(self, request: Request, transfer: Transfer) -> object:
        return None

    def ended(self, transfer: Transfer, *, ok: bool) -> None:
        plan = transfer.meta
        assert isinstance(plan, Plan)
        is_of_use = ok and plan.generation == self._generation
        if plan.is_write:
            return self._written(plan, is_of_use=is_of_use)
        for block in plan.blocks:
            if block.is_new and is_of_use:
                self.pool.publish(block.kind, block.pages, [block.digest])
            if not transfer.is_load:
                self._coming.discard((block.kind, block.digest))
        if transfer.is_load:
            self.stats.failed_loads += not ok
            if not ok:
                for name in plan.names:
                    self._drop(name)
        else:
            self.stats.host_blocks_saved += len(plan.blocks) * is_of_use
        if is_of_use and self._has_disk:
            self._write(plan.blocks)
        for block in reversed(plan.blocks):  # a prefix is of use without what is behind it
            self.pool.drop(block.pages)

    def forget(self) -> None:
        """Files go with the next write."""
        self._generation += 1
        self.pool.reset()
        self._coming.clear()
        for name in list(self.disk):
            self._drop(name)

    def poll(self) -> None:
        """Nothing depends on the time."""

    def counters(self) -> dict[str, int]:
        levels = {
            "host_pages_now": self.pool.num_used + self.pool.num_cached,
            "host_room_now": self.pool.num_pages,
        }
        if self._has_disk:
            levels |= {"disk_pages_now": self._num_disk, "disk_room_now": self._max_disk}
        return {f"kv_tiers_{name}": num for name, num in (asdict(self.stats) | levels).items()}

    def close(self) -> None:
        """Files stay."""

    # Disk

    def _write(self, blocks: Iterable[Block]) -> None:
        """Have those written that are not there, as far as host memory can be spared meanwhile."""
        plan = Plan(self._generation, is_write=True)
        most = self.pool.num_pages // MOST_WRITES
        for block in blocks:
            name, stripes = name_of(block.kind, block.digest), block.pages.size
            if name in self.disk:
                self.disk.move_to_end(name)
            elif name not in self._writing and stripes <= self._max_disk:
                if sum(map(self._disk_pages, self._writing)) + stripes > max(most, stripes):
                    break
                self._writing.add(name)
                self.pool.hold(block.pages)
                plan.blocks.append(Block(block.kind, block.digest, block.pages, is_new=False))
                plan.names.append(name)
        self._make_room_on_disk()
        if not plan.blocks:
            return
        writes = [
            [name, block.pages[0].tolist()] for name, block in zip(plan.names, plan.blocks, strict=True)
        ]
        dropped, self._dropped = self._dropped, []
        self._door.start({"write": writes, "drop": dropped}).meta = plan

    def _written(self, plan: Plan, *, is_of_use: bool) -> None:
        for name, block in zip(plan.names, plan.blocks, strict=True):
            self._writing.discard(name)
            self.pool.drop(block.pages)
            if is_of_use:
                self.disk[name] = None
                self._num_disk += self._disk_pages(name)
                self.stats.disk_blocks_saved += 1
            else:  # some rank may have its part
                self._dropped.append(name)

    def _make_room_on_disk(self) -> None:
        """For what is being written, too."""
        while self.disk and self._num_disk + sum(map(self._disk_pages, self._writing)) > self._max_disk:
            self._drop(next(iter(self.disk)))

    def _drop(self, name: Name) -> None:
        if name in self.disk:
            del self.disk[name]
            self._num_disk -= self._disk_pages(name)
            self._dropped.append(name)

    def _disk_pages(self, name: Name) -> int:
        kind = int(name.partition("-")[0])
        return self.kinds[kind].stripes if kind < len(self.kinds) else 0

    def _parts(self, transfer: Transfer) -> Iterator[tuple[int, bytes, Pages]]:
        """Of a transfer the blocks of each kind that are there, in the order of a job's pages."""
        for row, digest in enumerate(transfer.digests):
            for kind, columns in enumerate(self._columns):
                cells = transfer.pages[row, columns]
                if cells[0]:
                    yield kind, digest, cells

    def check(self) -> None:
        """Assert that nothing is held when nothing is under way."""
        self.pool.check([])
