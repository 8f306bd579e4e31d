"""The blocks of one KV group: free ones, referenced ones, and published ones that nobody references.

A *published* block is found by its digest and may be shared; it is evicted, least recently used first, only
when no free block is left.  To take, hold, drop or publish a block is O(1).  Knows nothing of sequences
or tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable


class BlockPool:
    """Blocks `first` .. `first + num_blocks - 1`.  Those below `first` are the workers' own (padding)."""

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        self.num_blocks = num_blocks
        self._first = first
        self._free = list(range(first + num_blocks - 1, first - 1, -1))  # the end is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # published and unreferenced, oldest first
        self._refs = [0] * (first + num_blocks)
        self._digests: list[bytes | None] = [None] * (first + num_blocks)
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` can still give, evictions included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - self.num_free

    @property
    def cached(self) -> Collection[int]:
        """Published blocks that nobody references, the next to be evicted first."""
        return self._cached.keys()

    def take(self, num: int) -> list[int]:
        """Blocks for one owner each to write; the caller has seen that num_free is as many."""
        num_kept = max(0, len(self._free) - num)
        blocks = self._free[num_kept:][::-1]
        del self._free[num_kept:]
        while len(blocks) < num:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """One more owner for a block that is published, or that the caller knows to be referenced."""
        self._cached.pop(block, None)
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """One owner fewer; behind the last one the block rests, findable if it was published."""
        self._refs[block] -= 1
        assert self._refs[block] >= 0, f"block {block} dropped more often than held"
        if self._refs[block]:
            return
        if self._digests[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def publish(self, blocks: Iterable[int], digests: Iterable[bytes]) -> None:
        """Make each block findable, unless it already is or another one has the same content."""
        for block, digest in zip(blocks, digests, strict=True):
            if self._digests[block] is None and self._index.setdefault(digest, block) == block:
                self._digests[block] = digest

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of `digests` that is published."""
        blocks: list[int] = []
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_refs(self, block: int) -> int:
        """Its owners."""
        return self._refs[block]

    def is_resting(self, block: int) -> bool:
        """Is it counted in num_free?"""
        return self._refs[block] == 0

    def is_published(self, block: int) -> bool:
        """Can `match` find it?"""
        return self._digests[block] is not None

    def is_private(self, block: int) -> bool:
        """May its one owner write to it?"""
        return self._refs[block] == 1 and self._digests[block] is None

    def reset(self) -> None:
        """Forget what is published; blocks in use stay with their owners."""
        for block in list(self._index.values()):
            self._forget(block)
        self._free.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        assert digest is not None, f"block {block} is not published"
        del self._index[digest]
        self._digests[block] = None

    def check(self, owners: Iterable[list[int]]) -> None:
        """Assert that every block is where its references say.  `owners`: the blocks of each owner."""
        refs: Counter[int] = Counter()
        for blocks in owners:
            assert len(set(blocks)) == len(blocks), f"a block twice in one table: {blocks}"
            refs.update(blocks)
        ours = range(self._first, self._first + self.num_blocks)
        assert all(block in ours for block in refs), "a block that is not the pool's"
        assert all(refs[block] == self._refs[block] for block in ours), "reference counts"
        resting = sorted([*self._free, *self._cached])
        assert resting == [b for b in ours if not self._refs[b]], "free, cached and used overlap"
        assert self._index == {d: b for b in ours if (d := self._digests[b]) is not None}, "index"
        assert not any(self._digests[b] for b in self._free), "a free block is published"
        assert all(self._digests[b] for b in self._cached), "a cached block is not published"
