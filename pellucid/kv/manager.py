"""The KV cache of all groups as one: which blocks a sequence has, may share, and still needs.

One pool per KV group; a prefix hit is what *all* groups hold.  Groups may differ in block size and number.
Knows token counts and digests, not sequences: each sequence carries a `BlockTable`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pellucid.kv.hashes import BlockHasher, Tokens, root_digest
from pellucid.kv.pool import BlockPool
from pellucid.kv.specs import KVGroupSpec

NEVER = sys.maxsize
T = TypeVar("T")
Column = NDArray[np.int64]


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks.  Digests outlive a preemption, blocks do not."""

    root: bytes
    digests: dict[int, list[bytes]]  # by block size
    blocks: list[list[int]]  # per KV group, in the order of positions
    num_published: list[int]  # per KV group: leading blocks already offered to the pool


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks of the cache that hold a sequence's first `num_tokens` tokens, not yet held by it."""

    num_tokens: int
    blocks: tuple[list[int], ...]  # per KV group


class NewBlocks(NamedTuple):
    """What several tables got, each at its end, and the capacity that they have now."""

    capacity: Column  # [B] tokens
    counts: list[Column]  # per KV group [B]
    blocks: list[list[int]]  # per KV group, table by table


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """Blocks lent to a connector, until it says that it has ended on every rank."""

    seq_id: int
    is_load: bool  # the connector writes them; otherwise it reads
    num_cached: int  # tokens before these blocks
    num_tokens: int  # tokens up to the end of these blocks
    blocks: tuple[list[int], ...]  # per KV group
    digests: tuple[list[bytes], ...]  # per KV group, one a block
    meta: object = field(default=None)  # the connector's own


class KVManager:
    """Hands out blocks.  A block is written by its only owner, and no more once it is published."""

    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        num_blocks: tuple[int, ...],
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        assert len(groups) == len(num_blocks) > 0, f"{len(groups)} groups, {len(num_blocks)} pools"
        self.enable_prefix_caching = enable_prefix_caching
        self.block_sizes = tuple(group.block_size for group in groups)
        self.pools = tuple(BlockPool(n) for n in num_blocks)
        self.unit = math.lcm(*self.block_sizes)  # tokens: prefix hits are multiples
        self.max_tokens = min(n * size for n, size in zip(num_blocks, self.block_sizes, strict=True))
        self._hashers = {size: BlockHasher(size) for size in self.block_sizes}

    def new_table(self, lora: str | None = None, cache_salt: str | None = None) -> BlockTable:
        """An empty table; sequences share blocks only if `lora` and `cache_salt` are the same."""
        num_groups = len(self.pools)
        return BlockTable(
            root=root_digest(lora, cache_salt),
            digests={size: [] for size in self._hashers},
            blocks=[[] for _ in range(num_groups)],
            num_published=[0] * num_groups,
        )

    def match(self, table: BlockTable, tokens: Tokens, max_tokens: int) -> PrefixHit:
        """The longest prefix of `tokens`, at most `max_tokens` long, that every group holds."""
        if not self.enable_prefix_caching:
            return PrefixHit(0, tuple([] for _ in self.pools))
        self._hash(table, tokens)
        hits: list[list[int]] = []
        for pool, size in zip(self.pools, self.block_sizes, strict=True):
            hits.append(pool.match(table.digests[size][: max_tokens // size]))
            max_tokens = min(max_tokens, len(hits[-1]) * size)
        num_tokens = max_tokens // self.unit * self.unit
        return PrefixHit(num_tokens, self.span(hits, 0, num_tokens))

    def lacking(self, hit: PrefixHit, num_tokens: int, num_spare: Sequence[int]) -> list[int]:
        """Per KV group, the blocks that are missing for `num_tokens` tokens that begin with `hit`.

        num_spare: blocks that are to stay free.  0 and less: there are enough.
        """
        lacking: list[int] = []
        for pool, size, blocks, spare in zip(
            self.pools, self.block_sizes, hit.blocks, num_spare, strict=True
        ):
            usable = pool.num_free - sum(pool.is_resting(block) for block in blocks)
            lacking.append(-(-num_tokens // size) - len(blocks) + spare - usable)
        return lacking

    def lacking_behind(self, table: BlockTable, num_tokens: int) -> list[int]:
        """The same for a table that is to grow to `num_tokens` tokens."""
        return [
            -(-num_tokens // size) - len(blocks) - pool.num_free
            for pool, size, blocks in zip(self.pools, self.block_sizes, table.blocks, strict=True)
        ]

    def num_to_release(
        self, tables: Iterable[BlockTable], lacking: Sequence[int], hit: PrefixHit | None = None
    ) -> int | None:
        """How many of these tables, from the first on, hold what is lacking; None if all of them do not.

        A block is free when the last of its owners has dropped it, and of no use if it belongs to `hit`.
        """
        if max(lacking) <= 0:
            return 0
        missing = list(lacking)
        num_dropped: list[Counter[int]] = [Counter() for _ in self.pools]
        kept = [set[int]() for _ in self.pools] if hit is None else [set(blocks) for blocks in hit.blocks]
        for num, table in enumerate(tables, 1):
            for group, (pool, dropped) in enumerate(zip(self.pools, num_dropped, strict=True)):
                dropped.update(table.blocks[group])
                missing[group] -= sum(
                    pool.num_refs(block) == dropped[block] and block not in kept[group]
                    for block in table.blocks[group]
                )
            if max(missing) <= 0:
                return num
        return None

    def adopt(self, table: BlockTable, hit: PrefixHit) -> None:
        """Make the hit the beginning of an empty table."""
        for group, (pool, blocks) in enumerate(zip(self.pools, hit.blocks, strict=True)):
            for block in blocks:
                pool.hold(block)
            table.blocks[group] = list(blocks)
            table.num_published[group] = len(blocks)

    def grow(self, table: BlockTable, num_tokens: int) -> list[list[int]] | None:
        """Add the blocks that so many tokens lack, per KV group; None, and no block, if a pool is short."""
        counts = [
            max(0, -(-num_tokens // size) - len(blocks))
            for size, blocks in zip(self.block_sizes, table.blocks, strict=True)
        ]
        if any(pool.num_free < count for pool, count in zip(self.pools, counts, strict=True)):
            return None
        grown = [pool.take(count) for pool, count in zip(self.pools, counts, strict=True)]
        for blocks, new in zip(table.blocks, grown, strict=True):
            blocks += new
        return grown

    def grow_all(
        self, tables: Sequence[BlockTable], capacity: Column, num_tokens: Column
    ) -> NewBlocks | None:
        """The same for several tables, all or none of them.

        capacity: what each has, less than `num_tokens`.  A table grows in all groups to the same number of
        tokens, so its capacity tells how many blocks of each it has.
        """
        num_blocks = [(num_tokens + size - 1) // size for size in self.block_sizes]
        counts = [
            num - (capacity + size - 1) // size
            for num, size in zip(num_blocks, self.block_sizes, strict=True)
        ]
        if any(pool.num_free < each.sum() for pool, each in zip(self.pools, counts, strict=True)):
            return None
        blocks = [self._grow_group(group, tables, each) for group, each in enumerate(counts)]
        return NewBlocks(reduce(np.minimum, map(mul, num_blocks, self.block_sizes)), counts, blocks)

    def _grow_group(self, group: int, tables: Sequence[BlockTable], counts: Column) -> list[int]:
        ends: list[int] = np.cumsum(counts).tolist()
        blocks, start = self.pools[group].take(ends[-1]), 0
        for table, end in zip(tables, ends, strict=True):
            own = table.blocks[group]
            own += blocks[start:end]
            start = end
        return blocks

    def capacity(self, table: BlockTable) -> int:
        """Tokens that fit into its blocks of every group."""
        return min(size * len(blocks) for size, blocks in zip(self.block_sizes, table.blocks, strict=True))

    def publish(self, table: BlockTable, tokens: Tokens) -> None:
        """Offer the full blocks of these tokens, the first ones, whose KV is there in stream order."""
        if not self.enable_prefix_caching:
            return
        self._hash(table, tokens)
        for group, size in enumerate(self.block_sizes):
            num_full, num_published = len(tokens) // size, table.num_published[group]
            if num_full > num_published:
                fresh = slice(num_published, num_full)
                self.pools[group].publish(table.blocks[group][fresh], table.digests[size][fresh])
                table.num_published[group] = num_full

    def publish_at(self, table: BlockTable) -> int:
        """Tokens with KV at which the next block is full that nobody finds yet."""
        if not self.enable_prefix_caching:
            return NEVER
        return min(size * (1 + num) for num, size in zip(table.num_published, self.block_sizes, strict=True))

    def release(self, table: BlockTable) -> None:
        """Drop all blocks, the last ones first, so that they are evicted before the prefix that they need."""
        for group, pool in enumerate(self.pools):
            for block in reversed(table.blocks[group]):
                pool.drop(block)
            table.blocks[group] = []
            table.num_published[group] = 0

    def digests(self, table: BlockTable, tokens: Tokens) -> tuple[list[bytes], ...]:
        """Per KV group, the digests of the full blocks of `tokens`."""
        self._hash(table, tokens)
        return tuple(table.digests[size] for size in self.block_sizes)

    def span(self, per_block: Sequence[list[T]], start: int, end: int) -> tuple[list[T], ...]:
        """What belongs to the blocks of tokens `start` to `end` (multiples of `unit`), per KV group."""
        return tuple(
            items[start // size : end // size]
            for items, size in zip(per_block, self.block_sizes, strict=True)
        )

    def lend_for_load(self, transfer: Transfer, num_spare: Sequence[int]) -> bool:
        """Take a block for each digest, for a connector to write.  False if fewer than `num_spare` stay."""
        counts = [len(digests) for digests in transfer.digests]
        if any(p.num_free < n + spare for p, n, spare in zip(self.pools, counts, num_spare, strict=True)):
            return False
        transfer.blocks = tuple(pool.take(n) for pool, n in zip(self.pools, counts, strict=True))
        return True

    def lend_for_save(self, transfer: Transfer) -> None:
        """Hold the blocks that a connector will read."""
        for pool, blocks in zip(self.pools, transfer.blocks, strict=True):
            for block in blocks:
                pool.hold(block)

    def take_back(self, transfer: Transfer, publish: bool) -> None:
        """A transfer has ended: publish what a load brought, if it did, and drop the blocks."""
        for pool, blocks, digests in zip(self.pools, transfer.blocks, transfer.digests, strict=True):
            if publish:
                pool.publish(blocks, digests)
            for block in reversed(blocks):
                pool.drop(block)

    def clear(self) -> None:
        """Forget every prefix; blocks in use stay with their sequences."""
        for pool in self.pools:
            pool.reset()

    @property
    def usage(self) -> float:
        """Share of blocks in use, of the fullest group."""
        return max(pool.num_used / pool.num_blocks for pool in self.pools)

    def is_private_from(self, table: BlockTable, num_tokens: int) -> bool:
        """May the table's owner write the position `num_tokens` and all behind it?"""
        return all(
            pool.is_private(block)
            for pool, size, blocks in zip(self.pools, self.block_sizes, table.blocks, strict=True)
            for block in blocks[num_tokens // size :]
        )

    def check(self, owners: Iterable[Sequence[list[int]]]) -> None:
        """Assert each pool's invariants.  `owners`: for each owner its blocks per KV group."""
        owners = list(owners)
        for group, pool in enumerate(self.pools):
            pool.check(owner[group] for owner in owners)

    def _hash(self, table: BlockTable, tokens: Tokens) -> None:
        for size, hasher in self._hashers.items():
            hasher.extend(table.digests[size], tokens, table.root)
