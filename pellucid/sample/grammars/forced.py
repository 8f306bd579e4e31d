"""Tokens of a text that a grammar leaves no choice of: drafts that no drafter has to make.

Where one text alone may come, tokens may still cut it in several ways: of `name"` may come `n`, `na`, `nam`
and `name`.  The longest is what a tokenizer mostly makes of it, so it is what is drafted, and whether the
model says so too is for the verification to find, as with any draft.  Where one token alone may come its
draft always stands.  On the host alone, and without torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pellucid.sample.grammars.base import Matcher, Spelling

MOST_WORDS = 64  # of a mask with tokens in them: of one text there are few


def forced_tokens(matcher: Matcher, spelling: Spelling, most: int) -> list[int]:
    """At most so many tokens of the only text that may come; none where there are several texts.

    The matcher stays where it is.
    """
    masks = np.zeros((1, spelling.num_words), dtype=np.int32)
    tokens: list[int] = []
    while len(tokens) < most and not matcher.is_done and (text := matcher.forced):
        matcher.fill(masks, 0)
        token = longest_within(text, allowed_tokens(masks[0]), spelling.token_bytes)
        if token is None or not matcher.accept(token):
            break
        tokens.append(token)
    if tokens:
        matcher.rollback(len(tokens))
    return tokens


def allowed_tokens(mask: np.ndarray) -> list[int]:
    """Those that may come, by a mask [W] int32; none if there are many."""
    words = np.flatnonzero(mask)
    if len(words) > MOST_WORDS:
        return []
    bits = np.unpackbits(np.ascontiguousarray(mask[words]).view(np.uint8), bitorder="little")
    places = np.flatnonzero(bits)
    return (words[places // 32] * 32 + places % 32).tolist()


def longest_within(text: bytes, token_ids: Sequence[int], token_bytes: Sequence[bytes]) -> int | None:
    """The longest of these tokens, if `text` begins with each of them.

    None if it does not, as with a token that goes on behind the text, or one that is no text.
    """
    spelt = {token: token_bytes[token] if token < len(token_bytes) else b"" for token in token_ids}
    if not spelt or not all(piece and text.startswith(piece) for piece in spelt.values()):
        return None
    return max(spelt, key=lambda token: len(spelt[token]))
