"""Log-probabilities in OpenAI's two forms, and vLLM's of the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.server.answer import Piece
from pellucid.server.protocol.openai_output import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import Logprob

LEAST = -9999.0  # JSON has no minus infinity
INNER_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: no character begins with them


@dataclass(frozen=True, slots=True)
class Speller:
    """How tokens are shown: as text, in which U+FFFD stands for half a character, or by their ids."""

    tokenizer: Tokenizer
    shows_ids: bool = False

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self.shows_ids else self.tokenizer.token_text(token)

    def bytes(self, token: int) -> list[int]:
        return list(self.tokenizer.token_bytes(token))

    def num_characters(self, token: int) -> int:
        """That begin with it."""
        return len(self.tokenizer.token_bytes(token).translate(None, INNER_BYTES))


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[dict[int, Logprob] | None],
    speller: Speller,
    *,
    offset: int,
) -> CompletionLogprobs:
    """One entry a token; a prompt's first token has none.  offset: of the first one, in characters."""
    result = CompletionLogprobs([], [], [], [])
    for token, entry in zip(token_ids, entries, strict=False):
        result.tokens.append(speller.text(token))
        result.text_offset.append(offset)
        result.token_logprobs.append(None if entry is None else finite(entry[token].logprob))
        result.top_logprobs.append(None if entry is None else _by_text(entry, speller))
        offset += speller.num_characters(token)
    return result


def _by_text(entry: dict[int, Logprob], speller: Speller) -> dict[str, float]:
    """Different tokens may have the same text; the likeliest speaks for it."""
    texts: dict[str, float] = {}
    for token, logprob in entry.items():
        texts.setdefault(speller.text(token), finite(logprob.logprob))
    return texts


def chat_logprobs(piece: Piece, num_top: int, speller: Speller) -> ChatLogprobs | None:
    """num_top: how many of the most likely tokens each one is shown with."""
    if piece.logprobs is None:
        return None
    return ChatLogprobs(
        [
            _token_logprob(token, entry, num_top, speller)
            for token, entry in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
    )


def _token_logprob(token: int, entry: dict[int, Logprob], num_top: int, speller: Speller) -> TokenLogprob:
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    top = [
        TopLogprob(speller.text(i), finite(logprob.logprob), speller.bytes(i))
        for i, logprob in ranked[:num_top]
    ]
    return TokenLogprob(speller.text(token), finite(entry[token].logprob), speller.bytes(token), top)


def prompt_logprobs_of(piece: Piece) -> PromptLogprobs:
    """vLLM's: a list with an entry for each prompt token, by token id."""
    return [
        None
        if entry is None
        else {
            i: PromptLogprob(finite(each.logprob), each.rank, each.decoded_token) for i, each in entry.items()
        }
        for entry in piece.prompt_logprobs or ()
    ]
