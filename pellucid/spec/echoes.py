"""How much of a text its own beginning has foretold: what drafts from it would bring, while none are made.

On the host, where the tokens have landed anyway.  No torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_TOKENS = 16  # of a text's end that are looked at
LONGEST = 2048  # tokens of a text
PAIR = 2  # tokens that must have occurred before


def num_foretold(token_ids: NDArray[np.int32]) -> int:
    """Of the last NUM_TOKENS tokens those that followed the two before them when these last occurred."""
    tokens = token_ids[-LONGEST:].astype(np.int64)
    if len(tokens) < NUM_TOKENS + PAIR + 1:
        return 0
    pairs = tokens[:-1] << 32 | tokens[1:]
    places = np.arange(len(tokens) - NUM_TOKENS, len(tokens))
    earlier = np.arange(len(tokens) - PAIR - 1)[::-1]  # the latest first
    agrees = (pairs[earlier] == pairs[places - PAIR, None]) & (earlier < places[:, None] - PAIR)
    at = agrees.argmax(axis=1)
    is_right = agrees[np.arange(NUM_TOKENS), at] & (tokens[earlier[at] + PAIR] == tokens[places])
    return int(np.count_nonzero(is_right))
