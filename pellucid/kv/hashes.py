"""Names for blocks by what they hold: hashes over all tokens from the first one to the block's last.

Two blocks with the same digest hold the same KV, so a sequence may read another's.  Knows nothing of pools.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]


@lru_cache(maxsize=1024)
def root_digest(lora: str | None = None, cache_salt: str | None = None) -> bytes:
    """What is hashed before the tokens: whatever else the KV depends on, so that it is not shared across."""
    return hashlib.sha256(repr((lora, cache_salt)).encode()).digest()


class Prefix:
    """The names of a sequence's full blocks, as far as they are known; outlives the blocks."""

    def __init__(self, root: bytes, block_size: int) -> None:
        """root: root_digest.  block_size: tokens."""
        self.digests: list[bytes] = []
        self._block_size, self._hash = block_size, hashlib.sha256(root)

    def extend(self, tokens: Tokens) -> None:
        """Name the full blocks of `tokens` that have no name yet.

        Only these are read; `tokens` must begin with what was named before.
        """
        size, digests = self._block_size, self.digests
        start, end = len(digests) * size, len(tokens) // size * size
        if start >= end:
            return
        update, digest = self._hash.update, self._hash.digest
        fresh = np.asarray(tokens[start:end], dtype=np.int32).tobytes()
        for offset in range(0, len(fresh), 4 * size):
            update(fresh[offset : offset + 4 * size])
            digests.append(digest())
