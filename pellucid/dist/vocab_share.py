"""How ranks share out a vocabulary: logits, embedding and head alike."""

from __future__ import annotations

from pellucid.kernels.sampling.sample import BLOCK_TOKENS


def vocab_share(vocab_size: int, size: int) -> int:
    """Tokens of each of `size` ranks, the last ones' padded, and perhaps all padding.

    Whole blocks, of which tokens are drawn, unless one rank holds all.
    """
    num_blocks = -(-vocab_size // BLOCK_TOKENS)
    return min(vocab_size, -(-num_blocks // size) * BLOCK_TOKENS)
