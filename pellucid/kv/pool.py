"""The pages of the KV cache: free ones, referenced ones, and published ones that nobody references.

All kinds take from one pool; a block is a row of pages, as many as its kind has stripes.  A *published* block
is found by its digest and may be shared; it is evicted, least recently used first, only when no free page is
left.  Knows nothing of sequences or tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]  # [n], or of blocks [n, stripes]
# Told what can be found that could not before: kind, digests, blocks, and what `publish` was told of them.
Observer = Callable[[int, list[bytes], Pages, object], None]


class PagePool:
    """Pages 1 .. num_pages.  Page 0 is the workers' own (padding)."""

    def __init__(self, num_pages: int, num_kinds: int = 1) -> None:
        self.num_pages = num_pages
        self.observers: list[Observer] = []
        # Told kind and digest of who cannot be found any more; of a `reset`, nothing.
        self.evicted: Callable[[int, bytes], None] | None = None
        # Of each page its owners, and whether its block is published; for single pages and for many at once.
        self._refs, self._flags = array("i", bytes(4 * (num_pages + 1))), bytearray(num_pages + 1)
        self.refs: NDArray[np.int32] = np.frombuffer(self._refs, dtype=np.int32)
        self.is_published: NDArray[np.bool_] = np.frombuffer(self._flags, dtype=bool)
        self.free = list(range(num_pages, 0, -1))  # pages that hold nothing for anybody; the last goes first
        # Of published blocks, by their first pages:
        self._names: dict[int, tuple[int, bytes]] = {}  # kind, digest
        self._cached: OrderedDict[int, None] = OrderedDict()  # those without owners, oldest first
        self._num_cached = 0  # pages of these
        self._index: list[dict[bytes, list[int]]] = [{} for _ in range(num_kinds)]  # their pages

    @property
    def num_free(self) -> int:
        """Pages that `take` can still give, evictions included."""
        return len(self.free) + self._num_cached

    @property
    def num_used(self) -> int:
        """Pages that somebody references."""
        return self.num_pages - self.num_free

    @property
    def cached(self) -> Iterator[int]:
        """Pages of published blocks that nobody references, the next to be evicted first."""
        return (page for first in self._cached for page in self._pages_of(first))

    @property
    def num_cached(self) -> int:
        return self._num_cached

    def take(self, num: int) -> Pages:
        """Pages for one owner to write; the caller has seen that num_free is as many."""
        if len(self.free) < num:
            self._evict(num - len(self.free))
        num_left, refs = len(self.free) - num, self._refs
        pages = self.free[num_left:][::-1]
        del self.free[num_left:]
        for page in pages:
            refs[page] = 1
        return np.array(pages, dtype=np.int32)

    def hold(self, blocks: Pages) -> None:
        """One more owner for blocks [n, stripes] that are published or have owners."""
        rows: list[list[int]] = blocks.tolist()
        for pages in rows:
            if not self._refs[pages[0]]:
                del self._cached[pages[0]]
                self._num_cached -= len(pages)
            for page in pages:
                self._refs[page] += 1

    def drop(self, blocks: Pages) -> None:
        """One owner fewer for blocks [n, stripes]; behind the last one a block rests.

        It is findable if it was published, and the first one will be evicted first.
        """
        refs, flags, cached = self._refs, self._flags, self._cached
        rows: list[list[int]] = blocks.tolist()
        for pages in rows:
            for page in pages:
                refs[page] -= 1
            first = pages[0]
            assert refs[first] >= 0, f"page {first} dropped more often than held"
            if refs[first]:
                continue
            if flags[first]:
                cached[first] = None
                self._num_cached += len(pages)
            else:
                self.free += pages

    def publish(self, kind: int, blocks: Pages, digests: Iterable[bytes], origin: object = None) -> None:
        """Make each block [n, stripes] findable, unless it is, or another one has the same content.

        origin: for observers.
        """
        index, names, flags = self._index[kind], self._names, self._flags
        rows: list[list[int]] = blocks.tolist()
        new: list[list[int]] = []
        for pages, digest in zip(rows, digests, strict=True):
            first = pages[0]
            if not flags[first] and index.setdefault(digest, pages) is pages:
                names[first] = kind, digest
                new.append(pages)
                for page in pages:
                    flags[page] = True
        for observe in self.observers if new else ():
            observe(kind, [names[pages[0]][1] for pages in new], np.array(new, dtype=np.int32), origin)

    def index(self, kind: int) -> Mapping[bytes, Sequence[int]]:
        """The published blocks of a kind by digest: each one's pages."""
        return self._index[kind]

    def reset(self) -> None:
        """Forget what is published; pages in use stay with their owners."""
        self.free += self.cached
        self._num_cached = 0
        for each in (self._cached, self._names, *self._index):
            each.clear()
        self.is_published[:] = False

    def _evict(self, num: int) -> None:
        """Free so many pages at least, of blocks that nobody references."""
        pages: list[int] = []
        while len(pages) < num:
            kind, digest = self._names.pop(self._cached.popitem(last=False)[0])
            pages += self._index[kind].pop(digest)
            if self.evicted is not None:
                self.evicted(kind, digest)
        self._num_cached -= len(pages)
        self.free += pages
        for page in pages:
            self._flags[page] = False

    def _pages_of(self, first: int) -> list[int]:
        kind, digest = self._names[first]
        return self._index[kind][digest]

    def check(self, owners: Iterable[Pages]) -> None:
        """Assert that every page is where its references say.  `owners`: the pages of each owner."""
        refs = np.zeros_like(self.refs)
        for pages in owners:
            assert len(np.unique(pages)) == len(pages), f"a page twice in one table: {pages}"
            refs[pages] += 1
        assert not refs[0], "the padding page has an owner"
        assert (refs == self.refs).all(), "reference counts"
        resting = sorted([*self.free, *self.cached])
        assert resting == (1 + np.flatnonzero(refs[1:] == 0)).tolist(), "free, cached and used overlap"
        assert self._num_cached == len(list(self.cached)), "cached pages are miscounted"
        named = ((k, name, pages[0]) for k, index in enumerate(self._index) for name, pages in index.items())
        names = {first: (kind, name) for kind, name, first in named}
        assert names == self._names, "index"
        published = sorted(page for first in names for page in self._pages_of(first))
        assert published == np.flatnonzero(self.is_published).tolist(), "who is published"
        assert not self.is_published[self.free].any(), "a free page is published"
