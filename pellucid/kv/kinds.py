"""Kinds of KV: what is kept of a sequence, and what of it must be there for a prefix hit.

A *block* is what the layers of a kind keep of `block_size` tokens: `stripes` pages, each with equally many of
these layers (layout.py).  A block's number is its column in the tables, whatever lies before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
ENDLESS = 1 << 40  # tokens


class Full(msgspec.Struct, frozen=True, tag=True):
    """Everything, to the end."""

    block_size: int  # tokens
    stripes: int = 1  # pages of a block

    name = "full"
    gives_back = False  # before the sequence ends

    def first_kept(self, positions: Column) -> Column:
        """The first block that queries at these positions, or behind them, can see."""
        return np.zeros_like(positions)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks held at once by a sequence that grows to `num_tokens`, at most `chunk` at a time."""
        return -(-num_tokens // self.block_size)

    def reach(self, digests: Sequence[bytes], index: Container[bytes]) -> int:
        """Blocks of the longest hit: the leading run of those that `index` has."""
        return next((i for i, digest in enumerate(digests) if digest not in index), len(digests))


class Window(msgspec.Struct, frozen=True, tag=True):
    """What the next query sees: the last `window` tokens, itself included."""

    block_size: int  # tokens
    stripes: int
    window: int  # tokens

    name = "window"
    gives_back = True

    def first_kept(self, positions: Column) -> Column:
        """The first block that queries at these positions, or behind them, can see."""
        return np.maximum(positions - (self.window - 1), 0) // self.block_size

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks held at once by a sequence that grows to `num_tokens`, at most `chunk` at a time."""
        size, seen = self.block_size, self.window - 1 + chunk
        return min(-(-num_tokens // size), 1 + -(-(seen - 1) // size))

    def reach(self, digests: Sequence[bytes], index: Container[bytes]) -> int:
        """Blocks of the longest hit: the last run of those that `index` has and that fills the window."""
        num = place = len(digests)
        while place * self.block_size > num * self.block_size - (self.window - 1) and place:
            place -= 1
            if digests[place] not in index:
                num = place
        return num


Kind = Full | Window


def most_pages(kinds: Sequence[Kind], num_tokens: int, chunk: int) -> int:
    """Most pages held at once by a sequence that grows to `num_tokens`, at most `chunk` at a time."""
    return sum(kind.stripes * kind.most_blocks(num_tokens, chunk) for kind in kinds)


def most_tokens(kinds: Sequence[Kind], num_pages: int, chunk: int) -> int:
    """The longest sequence that never holds more than so many pages; ENDLESS: they are enough for any."""
    size = kinds[0].block_size
    numbers = range(ENDLESS // size + 1)  # of blocks
    return size * (bisect_right(numbers, num_pages, key=lambda n: most_pages(kinds, n * size, chunk)) - 1)
