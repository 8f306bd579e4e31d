"""Names for blocks by what they hold: a chain of hashes over the tokens, each one over the whole prefix.

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
    """The chain's beginning: whatever else the KV depends on, so that it is not shared across."""
    return hashlib.sha256(repr((lora, cache_salt)).encode()).digest()


class BlockHasher:
    """Hashes the full blocks of a token list, each over (the block before's digest, its own tokens)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size  # tokens

    def extend(self, digests: list[bytes], tokens: Tokens, root: bytes) -> None:
        """Append the digests of the full blocks of `tokens` that `digests` does not have yet.

        Only the new blocks are read; `tokens` must begin with what was hashed before.
        """
        size, start = self.block_size, len(digests) * self.block_size
        if len(tokens) < start + size:
            return
        fresh = np.asarray(tokens[start : len(tokens) // size * size], dtype=np.int32).tobytes()
        parent = digests[-1] if digests else root
        for offset in range(0, len(fresh), 4 * size):
            parent = hashlib.sha256(parent + fresh[offset : offset + 4 * size]).digest()
            digests.append(parent)
