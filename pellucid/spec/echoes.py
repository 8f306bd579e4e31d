"""How much of a text has been foretold, by its beginning or by finished ones: what drafts would bring.

That is found while none are made, on the host, where the tokens have landed anyway.  No torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_TOKENS = 16  # of a text's end that are looked at
LONGEST = 2048  # tokens of a text
PAIR = 2  # tokens that must have occurred before
TRIPLE = 3  # of finished texts: two of them occur by chance in many
# So many are remembered, and up to twice as many, which is what suffix decoding has unless it is to have
# less; and so many tokens of each, the last ones.
TEXTS, KEPT = 16, 1024
TOKEN_BITS = 21  # of a token's id


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


class Echoes:
    """What finished texts foretell of others: a token for each three, the last one that followed them."""

    def __init__(self) -> None:
        # When there are enough of the newer ones they become the older ones, and what was older is forgotten.
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._num_newer = 0  # texts

    def remember(self, token_ids: NDArray[np.int32]) -> None:
        """A text has ended."""
        tokens = token_ids[-KEPT:]
        if self._num_newer == TEXTS:
            self._newer, self._older, self._num_newer = {}, self._newer, 0
        self._num_newer += 1
        self._newer.update(zip(triples(tokens), tokens[TRIPLE:].tolist(), strict=True))

    def num_foretold(self, token_ids: NDArray[np.int32]) -> int:
        """Of the last NUM_TOKENS tokens those that finished texts have foretold, or the text itself."""
        own, newer, older = num_foretold(token_ids), self._newer, self._older
        if not newer:
            return own
        tokens = token_ids[-NUM_TOKENS - TRIPLE :]
        said = [newer.get(triple, older.get(triple, -1)) for triple in triples(tokens)]
        return max(own, int(np.count_nonzero(tokens[TRIPLE:] == said)))


def triples(tokens: NDArray[np.int32]) -> list[int]:
    """Each three tokens that another one follows, as a number."""
    wide = tokens.astype(np.int64)
    return (wide[:-3] << 2 * TOKEN_BITS | wide[1:-2] << TOKEN_BITS | wide[2:-1]).tolist()
