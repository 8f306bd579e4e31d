"""The pages of the KV cache: free ones, referenced ones, and published ones that nobody references.

All kinds take from one pool; a block is a row of pages, as many as its kind has stripes.  A *published* block
is found by its digest and may be shared; it is evicted, least recently used first, only when no free page is
left.  Knows nothing of sequences or tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]  # [n], or of blocks [n, stripes]


class PagePool:
    """Pages 1 .. num_pages.  Page 0 is the workers' own (padding)."""

    def __init__(self, num_pages: int, num_kinds: int = 1) -> None:
        self.num_pages = num_pages
        self.refs: NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)  # owners of each page
        self._free: Pages = np.arange(num_pages, 0, -1, dtype=np.int32)  # a stack of _num_free
        self._num_free = num_pages
        self.is_published: NDArray[np.bool_] = np.zeros(num_pages + 1, dtype=bool)  # each page's block
        # Of published blocks, by their first pages:
        self._names: dict[int, tuple[int, bytes]] = {}  # kind, digest
        self._cached: OrderedDict[int, None] = OrderedDict()  # those without owners, oldest first
        self._num_cached = 0  # pages of these
        self._index: list[dict[bytes, list[int]]] = [{} for _ in range(num_kinds)]  # their pages

    @property
    def num_free(self) -> int:
        """Pages that `take` can still give, evictions included."""
        return self._num_free + self._num_cached

    @property
    def num_used(self) -> int:
        """Pages that somebody references."""
        return self.num_pages - self.num_free

    @property
    def free(self) -> Pages:
        """Pages that hold nothing for anybody."""
        return self._free[: self._num_free]

    @property
    def cached(self) -> Iterator[int]:
        """Pages of published blocks that nobody references, the next to be evicted first."""
        return (page for first in self._cached for page in self._pages_of(first))

    @property
    def num_cached(self) -> int:
        return self._num_cached

    def take(self, num: int) -> Pages:
        """Pages for one owner to write; the caller has seen that num_free is as many."""
        while self._num_free < num:
            first, _ = self._cached.popitem(last=False)
            pages = self._forget(first)
            self._num_cached -= len(pages)
            self._put_back(np.array(pages, dtype=np.int32))
        self._num_free -= num
        pages = self._free[self._num_free : self._num_free + num][::-1].copy()
        self.refs[pages] = 1
        return pages

    def hold(self, blocks: Pages) -> None:
        """One more owner for blocks [n, stripes], no two alike, that are published or have owners."""
        resting = self.refs[blocks[:, 0]] == 0
        for first in blocks[resting, 0].tolist():
            del self._cached[first]
            self._num_cached -= blocks.shape[1]
        self.refs[blocks] += 1

    def drop(self, blocks: Pages) -> None:
        """One owner fewer for blocks [n, stripes]; behind the last one a block rests, findable if published.

        The first one will be evicted first.
        """
        np.subtract.at(self.refs, blocks, 1)
        refs = self.refs[blocks[:, 0]]
        assert not np.count_nonzero(refs < 0), f"dropped more often than held: {blocks[refs < 0]}"
        resting = blocks[refs == 0]
        is_published = self.is_published[resting[:, 0]]
        unnamed = resting[~is_published]
        if len(unnamed) > 1:  # several may have shared one before all names were forgotten
            unnamed = unnamed[np.unique(unnamed[:, 0], return_index=True)[1]]
        self._put_back(unnamed.ravel())
        for first in resting[is_published, 0].tolist():
            if first not in self._cached:
                self._cached[first] = None
                self._num_cached += blocks.shape[1]

    def publish(self, kind: int, blocks: Pages, digests: Iterable[bytes]) -> None:
        """Make each block [n, stripes] findable, unless it is, or another one has the same content."""
        index = self._index[kind]
        for pages, digest in zip(blocks.tolist(), digests, strict=True):
            if pages[0] not in self._names and index.setdefault(digest, pages) is pages:
                self._names[pages[0]] = kind, digest
                self.is_published[pages] = True

    def index(self, kind: int) -> Mapping[bytes, Sequence[int]]:
        """The published blocks of a kind by digest: each one's pages."""
        return self._index[kind]

    def reset(self) -> None:
        """Forget what is published; pages in use stay with their owners."""
        for first in list(self._names):
            pages = np.array(self._forget(first), dtype=np.int32)
            if first in self._cached:
                self._put_back(pages)
        self._cached.clear()
        self._num_cached = 0

    def _put_back(self, pages: Pages) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _pages_of(self, first: int) -> list[int]:
        kind, digest = self._names[first]
        return self._index[kind][digest]

    def _forget(self, first: int) -> list[int]:
        """Let go of a published block's name.  Returns its pages."""
        kind, digest = self._names.pop(first)
        pages = self._index[kind].pop(digest)
        self.is_published[pages] = False
        return pages

    def check(self, owners: Iterable[Pages]) -> None:
        """Assert that every page is where its references say.  `owners`: the pages of each owner."""
        refs = np.zeros_like(self.refs)
        for pages in owners:
            assert len(np.unique(pages)) == len(pages), f"a page twice in one table: {pages}"
            refs[pages] += 1
        assert not refs[0], "the padding page has an owner"
        assert (refs == self.refs).all(), "reference counts"
        resting = sorted([*self.free.tolist(), *self.cached])
        assert resting == (1 + np.flatnonzero(refs[1:] == 0)).tolist(), "free, cached and used overlap"
        assert self._num_cached == len(list(self.cached)), "cached pages are miscounted"
        named = ((k, name, pages[0]) for k, index in enumerate(self._index) for name, pages in index.items())
        names = {first: (kind, name) for kind, name, first in named}
        assert names == self._names, "index"
        published = sorted(page for first in names for page in self._pages_of(first))
        assert published == np.flatnonzero(self.is_published).tolist(), "who is published"
        assert not self.is_published[self.free].any(), "a free page is published"
