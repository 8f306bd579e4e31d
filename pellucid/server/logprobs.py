"""Log-probabilities in OpenAI's two forms, and vLLM's of the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[dict[int, Logprob] | None],
    tokenizer: Tokenizer,
    *,
    offset: int,
) -> CompletionLogprobs:
    """One entry a token; a prompt's first token has none.  offset: of the first one, in characters."""
    result = CompletionLogprobs([], [], [], [])
    for token, entry in zip(token_ids, entries, strict=False):
        text = tokenizer.token_text(token)
        result.tokens.append(text)
        result.text_offset.append(offset)
        result.token_logprobs.append(None if entry is None else finite(entry[token].logprob))
        result.top_logprobs.append(None if entry is None else _by_text(entry, tokenizer))
        offset += len(text)
    return result


def _by_text(entry: dict[int, Logprob], tokenizer: Tokenizer) -> dict[str, float]:
    """Different tokens may have the same text; the likeliest speaks for it."""
    texts: dict[str, float] = {}
    for token, logprob in entry.items():
        texts.setdefault(tokenizer.token_text(token), finite(logprob.logprob))
    return texts


def chat_logprobs(piece: Piece, num_top: int, tokenizer: Tokenizer) -> ChatLogprobs | None:
    """num_top: how many of the most likely tokens each one is shown with."""
    if piece.logprobs is None:
        return None
    return ChatLogprobs(
        [
            _token_logprob(token, entry, num_top, tokenizer)
            for token, entry in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
    )


def _token_logprob(token: int, entry: dict[int, Logprob], num_top: int, tokenizer: Tokenizer) -> TokenLogprob:
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    top = [
        TopLogprob(tokenizer.token_text(i), finite(logprob.logprob), list(tokenizer.token_bytes(i)))
        for i, logprob in ranked[:num_top]
    ]
    text, spelling = tokenizer.token_text(token), list(tokenizer.token_bytes(token))
    return TokenLogprob(text, finite(entry[token].logprob), spelling, top)


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
