"""Ranks share out a vocabulary by whole blocks."""

from __future__ import annotations

import pytest

from pellucid.dist.vocab_share import vocab_share
from pellucid.kernels.sampling.sample import BLOCK_TOKENS


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 65, 331, 4096, 50_257, 151_936])
def test_shares_are_whole_blocks_and_hold_all_tokens(vocab_size: int, size: int) -> None:
    share = vocab_share(vocab_size, size)
    starts = [min(rank * share, vocab_size) for rank in range(size)]
    assert share * size >= vocab_size
    assert all(start % BLOCK_TOKENS == 0 for start in starts if start < vocab_size)
    assert share - vocab_size / size < BLOCK_TOKENS, "more padding than cutting takes"


def test_one_rank_holds_all_without_padding() -> None:
    assert vocab_share(50_257, 1) == 50_257


def test_padding_is_what_lacks_to_whole_blocks() -> None:
    assert vocab_share(151_936, 2) == 75_968
    assert vocab_share(151_936, 8) == 19_008
    assert vocab_share(331, 4) == 128
