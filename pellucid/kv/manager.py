"""The KV cache of all kinds as one: which pages a slot's sequence has, may share, and still needs.

A block table has an entry for each block of tokens, and there the pages of all kinds side by side: so
sequences grow in all kinds at once.  What windows have passed they give back.  A prefix hit is what *every*
kind can go on from.  Knows token counts and digests, not sequences.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from pellucid.kv.hashes import Prefix, Tokens
from pellucid.kv.kinds import Column, Kind, most_pages, most_tokens
from pellucid.kv.pool import PagePool, Pages
from pellucid.kv.sparse import sparse_memory

NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Pages of the cache that hold a sequence's first `num_tokens` tokens, not yet held by it."""

    num_tokens: int
    pages: Pages  # [blocks, pages of a block]; 0 where a window no longer reaches


class NewPages(NamedTuple):
    """What several slots got, a slot's blocks side by side."""

    slots: Column  # [n], of each block
    pages: Pages  # [n, pages of a block]


class Lent(Protocol):
    """Has pages that belong to nobody in a slot."""

    pages: Pages


class Stripes(NamedTuple):
    """Which of a block's pages are of a kind."""

    kind: Kind
    number: int  # of the kind
    which: slice


class KVManager:
    """Hands out pages.  A block is written by its only owner, and no more once it is published."""

    def __init__(
        self, kinds: tuple[Kind, ...], num_pages: int, *,
        num_slots: int, max_len: int, max_chunk: int, enable_prefix_caching: bool = True,
    ) -> None:  # fmt: skip
        """max_len: tokens of a table, max_chunk: of a row and of the drafts behind it."""
        assert kinds and num_pages, f"{len(kinds)} kinds, {num_pages} pages"
        self.kinds, self.block_size, self.max_chunk = kinds, kinds[0].block_size, max_chunk
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = PagePool(num_pages, len(kinds))
        ends = list(accumulate(kind.stripes for kind in kinds))
        self.stripes = [
            Stripes(kind, i, slice(end - kind.stripes, end))
            for i, (kind, end) in enumerate(zip(kinds, ends, strict=True))
        ]
        self._passing = [stripes for stripes in self.stripes if stripes.kind.gives_back]
        self.pages_a_block = ends[-1]  # of all kinds
        self.max_tokens = most_tokens(kinds, num_pages, max_chunk)  # of one sequence
        self.lent: dict[Lent, None] = {}  # what is out of stream order, the oldest first
        self._no_hit = PrefixHit(0, np.zeros((0, self.pages_a_block), dtype=np.int32))
        width = -(-max_len // self.block_size)
        shape = num_slots + 1, width, self.pages_a_block
        self.pages: Pages = np.frombuffer(sparse_memory(4 * math.prod(shape)), dtype=np.int32).reshape(shape)
        # Tokens that fit into a slot's blocks.
        self.capacity: Column = np.zeros(num_slots + 1, dtype=np.int64)
        # Tokens with KV at which the next block is full that nobody finds yet.
        self.publish_at: Column = np.full(num_slots + 1, NEVER, dtype=np.int64)
        self._first: Column = np.zeros((len(kinds), num_slots + 1), dtype=np.int64)  # block still held

    @property
    def gives_back(self) -> bool:
        """Are there windows?"""
        return bool(self._passing)

    def match(self, prefix: Prefix, tokens: Tokens, max_tokens: int) -> PrefixHit:
        """The longest prefix of `tokens`, at most `max_tokens` long, from which every kind can go on."""
        if not self.enable_prefix_caching:
            return self._no_hit
        prefix.extend(tokens)
        digests = prefix.digests[: max_tokens // self.block_size]
        while digests:  # until nobody lowers it
            num = len(digests)
            for kind, i, _ in self.stripes:
                del digests[kind.reach(digests, self.pool.index(i)) :]
            if len(digests) == num or not self._passing:
                break
        return PrefixHit(len(digests) * self.block_size, self._find(digests)) if digests else self._no_hit

    def _find(self, digests: Sequence[bytes]) -> Pages:
        """The published pages of these blocks; 0 where a window does not reach."""
        num = len(digests)
        pages = np.zeros((num, self.pages_a_block), dtype=np.int32)
        for kind, i, which in self.stripes:
            first, index = self.first_kept(kind, num * self.block_size), self.pool.index(i)
            if first < num:
                pages[first:, which] = [index[digest] for digest in digests[first:]]
        return pages

    def lacking(self, hit: PrefixHit, num_tokens: int, num_spare: int) -> int:
        """The pages that are missing for `num_tokens` tokens that begin with `hit`.

        num_spare: pages that are to stay free.  0 and less: there are enough.
        """
        lacking = most_pages(self.kinds, num_tokens, self.max_chunk) + num_spare - self.pool.num_free
        if not hit.num_tokens:
            return lacking
        held = hit.pages[hit.pages > 0]
        return lacking - int(np.count_nonzero(self.pool.refs[held]))

    def lacking_behind(self, slot: int, num_tokens: int) -> int:
        """The same for a table that is to grow to `num_tokens` tokens."""
        num = -(-num_tokens // self.block_size) - int(self.capacity[slot]) // self.block_size
        return num * self.pages_a_block - self.pool.num_free

    def num_to_release(self, slots: Iterable[int], lacking: int, hit: PrefixHit | None = None) -> int | None:
        """How many of these tables, from the first on, hold what is lacking; None if all of them do not.

        A page is free when the last of its owners has dropped it, and of no use if it belongs to `hit`.
        """
        if lacking <= 0:
            return 0
        refs = self.pool.refs.copy()
        if hit is not None:
            refs[hit.pages] += 1
        for num, slot in enumerate(slots, 1):
            pages = self.held(slot)
            refs[pages] -= 1
            lacking -= int(np.count_nonzero(refs[pages] == 0))
            if lacking <= 0:
                return num
        return None

    def adopt(self, slot: int, hit: PrefixHit) -> None:
        """Make the hit the beginning of a slot's table, which is empty."""
        self.capacity[slot] = hit.num_tokens
        if hit.num_tokens:
            self.pages[slot, : len(hit.pages)] = hit.pages
            for kind, i, _ in self._passing:
                self._first[i, slot] = self.first_kept(kind, hit.num_tokens)
            self.hold(hit.pages)
        if self.enable_prefix_caching:
            self.publish_at[slot] = hit.num_tokens + self.block_size

    def num_growing(self, slots: Column, num_tokens: Column) -> int:
        """How many of these slots, the first ones, there are pages for to grow."""
        size, room = self.block_size, self.pool.num_free // self.pages_a_block
        if not room:
            return 0
        counts = (num_tokens + (size - 1)) // size - self.capacity[slots] // size
        return int(np.searchsorted(np.cumsum(counts), room, side="right"))

    def grow(self, slots: Column, num_tokens: Column) -> NewPages | None:
        """Add the blocks that slots lack for so many tokens, at least one each.

        None, and no page, if the pool is short.
        """
        size = self.block_size
        first = self.capacity[slots] // size
        counts = (num_tokens + (size - 1)) // size - first
        num = int(counts.sum())
        if self.pool.num_free < num * self.pages_a_block:
            return None
        pages, owners, blocks = self.pool.take(num * self.pages_a_block).reshape(num, -1), slots, first
        if num > len(slots):
            owners = np.repeat(slots, counts)
            blocks = np.arange(num) + np.repeat(first - np.cumsum(counts) + counts, counts)
        self.pages[owners, blocks] = pages
        self.capacity[slots] += counts * size
        return NewPages(owners, pages)

    def grow_one(self, slot: int, num_tokens: int) -> NewPages | None:
        """The same for one slot."""
        first, num = int(self.capacity[slot]) // self.block_size, -(-num_tokens // self.block_size)
        if self.pool.num_free < (num - first) * self.pages_a_block:
            return None
        pages = self.pool.take((num - first) * self.pages_a_block).reshape(num - first, -1)
        self.pages[slot, first:num] = pages
        self.capacity[slot] = num * self.block_size
        return NewPages(np.array([slot] * (num - first)), pages)

    def pass_windows(self, slots: Column, positions: Column) -> bool:
        """Give back what no query of a slot sees any more that is planned from now on.

        positions: the least of these queries.  Says whether there was anything.
        """
        has_given = False
        for kind, i, which in self._passing:
            first = kind.first_kept(positions)
            counts = first - self._first[i, slots]
            if not np.count_nonzero(counts > 0):
                continue
            has_given = True
            counts, ends = np.maximum(counts, 0), np.cumsum(np.maximum(counts, 0))
            owners = np.repeat(slots, counts)
            blocks = np.arange(int(ends[-1])) + np.repeat(self._first[i, slots] - ends + counts, counts)
            cells: Pages = self.pages[owners, blocks, which]
            self.pages[owners, blocks, which] = 0
            self.pool.drop(cells)
            self._first[i, slots] += counts
        return has_given

    def publish(self, slot: int, prefix: Prefix, tokens: Tokens) -> None:
        """Offer the full blocks of these tokens, the first ones, whose KV is there in stream order."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        num_full, num_published = len(tokens) // size, int(self.publish_at[slot]) // size - 1
        if num_full <= num_published:
            return
        prefix.extend(tokens)
        for _, i, which in self.stripes:
            first = max(num_published, int(self._first[i, slot]))
            if first < num_full:
                names = prefix.digests[first:num_full]
                self.pool.publish(i, self.pages[slot, first:num_full, which], names, (prefix, tokens, first))
        self.publish_at[slot] = num_full * size + size

    def release(self, slot: int) -> None:
        """Drop all blocks, the last ones first, so that they are evicted before the prefix that they need."""
        num = int(self.capacity[slot]) // self.block_size
        for kind, i, which in self.stripes:
            first = int(self._first[i, slot]) if kind.gives_back else 0
            self.pool.drop(self.pages[slot, first:num, which][::-1])
        self.capacity[slot], self.publish_at[slot] = 0, NEVER
        for _, i, _ in self._passing:
            self._first[i, slot] = 0

    def held(self, slot: int) -> Pages:
        """The pages of a slot."""
        pages = self.pages[slot, : int(self.capacity[slot]) // self.block_size].ravel()
        return pages[pages > 0] if self._passing else pages

    def digests(self, prefix: Prefix, tokens: Tokens) -> list[bytes]:
        """Of the full blocks of `tokens`."""
        prefix.extend(tokens)
        return prefix.digests[: len(tokens) // self.block_size]

    def clear(self) -> None:
        """Forget every prefix; pages in use stay with their sequences."""
        self.pool.reset()

    @property
    def usage(self) -> float:
        """Share of pages in use."""
        return self.pool.num_used / self.pool.num_pages

    def is_private_from(self, slot: int, num_tokens: int) -> bool:
        """May the slot's sequence write the position `num_tokens` and all behind it?"""
        first, num = num_tokens // self.block_size, int(self.capacity[slot]) // self.block_size
        blocks = self.pages[slot, first:num]
        return bool((self.pool.refs[blocks] == 1).all() and not self.pool.is_published[blocks].any())

    def sees_from(self, slot: int, position: int) -> bool:
        """Is all there that a query of the slot at this position sees?"""
        return all(self._first[i, slot] <= self.first_kept(kind, position) for kind, i, _ in self._passing)

    def check(self, slots: Sequence[int]) -> None:
        """Assert the invariants.  slots: those in use."""
        lent = (each.pages[each.pages > 0] for each in self.lent)
        self.pool.check([*map(self.held, slots), *lent])
        unused = np.setdiff1d(np.arange(len(self.pages)), slots)
        assert not self.capacity[unused].any() and not self._first[:, unused].any(), "an unused slot"
        for slot in slots:
            num = int(self.capacity[slot]) // self.block_size
            for _, i, which in self.stripes:
                is_held = self.pages[slot, :num, which] > 0
                assert not is_held[: self._first[i, slot]].any(), "a page behind the window"
                assert is_held[self._first[i, slot] :].all(), "a page is missing"

    def first_kept(self, kind: Kind, position: int) -> int:
        """The first block that a query at this position sees."""
        return int(kind.first_kept(np.array(position))) if kind.gives_back else 0

    def hold(self, pages: Pages) -> None:
        """One more owner for blocks that somebody has or can find."""
        for _, _, blocks in self.by_kind(pages):
            self.pool.hold(blocks)

    def by_kind(self, pages: Pages) -> Iterator[tuple[int, Column, Pages]]:
        """Of each kind the blocks that are there: their places and their pages."""
        for _, i, which in self.stripes:
            of_kind = pages[:, which]
            where = np.flatnonzero(of_kind[:, 0])
            yield i, where, of_kind[where]
