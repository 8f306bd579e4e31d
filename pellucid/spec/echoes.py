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
    tokens = token_ids[-LONGEST:]
    if len(tokens) < NUM_TOKENS + PAIR + 1:
        return 0
    text, size, found = tokens.tobytes(), tokens.itemsize, 0
    for place in range(len(tokens) - NUM_TOKENS, len(tokens)):
        start, end = size * (place - PAIR), size * place
        at = text.rfind(text[start:end], 0, end - size)
        while at > 0 and at % size:  # in the middle of a token
            at = text.rfind(text[start:end], 0, at + size * PAIR - 1)
        follows = at + size * PAIR
        found += at >= 0 and text[follows : follows + size] == text[end : end + size]
    return found
