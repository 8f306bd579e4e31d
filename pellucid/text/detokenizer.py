"""Token ids to text, a few at a time, so that the pieces join to the text of the whole.

A character may be spread over several tokens: its bytes are held back until it is complete, or the text ends.
Knows nothing about stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from pellucid.text.token_bytes import LeadingSpace
from pellucid.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
PROMPT_TAIL = 8  # tokens of the prompt that can still matter: half a character, or two cut by the tail's ends
MAX_HELD_TOKENS = 8  # a character never takes more; beyond it the text is broken and is shown as it is


class Detokenizer(Protocol):
    """Turns the tokens of one completion into text as they come."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the text; U+FFFD for half a character."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for text that goes on after the prompt.

    The text keeps the space between prompt and answer, and finishes a character that the prompt began.
    """
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    tail = [i for i in prompt_token_ids[-8 * PROMPT_TAIL :] if i not in skipped][-PROMPT_TAIL:]
    if tokenizer.leading_space is None:
        return _WindowDetokenizer(tokenizer, tail, skipped)
    return _ByteDetokenizer(tokenizer, tail, skipped, tokenizer.leading_space)


class _ByteDetokenizer:
    """Tokens spell bytes: look them up, and let the UTF-8 decoder hold back what is incomplete.

    Where byte-fallback tokens spell invalid UTF-8, `tokenizers` replaces every byte around the fault; here
    only the faulty bytes become U+FFFD, because text that was shown cannot be taken back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int],
        skipped: frozenset[int],
        leading_space: LeadingSpace,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._leading_space = leading_space
        self._at_start = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.feed(prompt_tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = [self._token_bytes(i) for i in token_ids if i not in self._skipped]
        if self._at_start:
            pieces = self._trim(pieces)
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _trim(self, pieces: list[bytes]) -> list[bytes]:
        pieces = [piece for piece in pieces if piece]
        if not pieces:
            return pieces
        self._at_start = False
        return [self._leading_space.trim(pieces[0]), *pieces[1:]]


class _WindowDetokenizer:
    """For any other tokenizer: the text is the difference between a short window with and without new tokens.

    The window begins one emission back, because some decoders look at the token before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._num_shown = 0  # tokens of the window whose text is out
        self._shown = ""
        self.feed(prompt_tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        text = self._decode(self._window)[len(self._shown) :]
        self._show()
        return text

    def _feed_one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        incomplete = len(text) <= len(self._shown) or text.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._num_shown < MAX_HELD_TOKENS:
            return ""
        new = text[len(self._shown) :]
        self._show()
        return new

    def _show(self) -> None:
        """Keep the tokens shown last as context, drop those before."""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
