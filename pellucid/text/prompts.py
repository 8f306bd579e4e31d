"""What users give as a prompt, to token ids that the engine can trust.

Every check on a prompt is here: emptiness, the vocabulary's range, the model's length.
Knows nothing about chat messages or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from pellucid.text.tokenizer import Tokenizer, check_text

Prompt = str | Sequence[int] | Mapping[str, object]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt ready for the engine; `text` is None for a prompt of ids; `cache_salt` keys the cache."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


def tokenize_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_model_len: int,
    add_special_tokens: bool = True,
) -> list[TokenPrompt]:
    """Turn prompts (text, ids, {"prompt": ...} or {"prompt_token_ids": ...}) into checked token ids.

    vocab_size: of the model's embedding; max_model_len: tokens of prompt and answer together.
    Raises ValueError naming the value, the limit and the way out.
    """
    parsed = [_parse(prompt) for prompt in prompts]
    to_encode = [i for i, prompt in enumerate(parsed) if prompt.text is not None and not prompt.token_ids]
    if to_encode:
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; give prompt_token_ids or load the tokenizer")
        texts = [parsed[i].text or "" for i in to_encode]
        for text in texts:
            _check_length(text, tokenizer, max_model_len)
        batch = tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        for i, ids in zip(to_encode, batch, strict=True):
            parsed[i] = replace(parsed[i], token_ids=ids)
    for prompt in parsed:
        _check(prompt.token_ids, vocab_size, max_model_len)
    return parsed


def bad_words_token_ids(
    words: Sequence[str], tokenizer: Tokenizer, *, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell each word, at the beginning of a text and after a space.

    vocab_size: of the model's embedding; sequences with a token beyond it never occur, and are left out.
    The spelling after a space counts only if it is as long and begins differently; otherwise the space is a
    token of its own, and forbidding the sequence would forbid nothing new.
    """
    sequences: list[tuple[int, ...]] = []
    stripped = [word.lstrip() for word in words]
    both = [*stripped, *(f" {word}" for word in stripped)]
    ids = [tuple(each) for each in tokenizer.encode_batch(both, add_special_tokens=False)]
    for word, bare, spaced in zip(words, ids[: len(words)], ids[len(words) :], strict=True):
        if not bare:
            raise ValueError(f"bad_words has {word!r}, which this tokenizer cannot spell; remove it")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(sequence for sequence in sequences if max(sequence) < vocab_size)


def _parse(prompt: Prompt) -> TokenPrompt:
    if isinstance(prompt, str):
        return TokenPrompt([], prompt)
    if not isinstance(prompt, Mapping):
        return TokenPrompt(_ids(prompt))
    unknown = [key for key in prompt if key not in PROMPT_KEYS]
    if unknown:
        raise ValueError(f"a prompt has no entry {unknown[0]!r}; it may have {', '.join(PROMPT_KEYS)}")
    text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"cache_salt is {salt!r}, must be a string")
    check_text("cache_salt", salt or "")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt is a {type(text).__name__}, must be text; give ids as prompt_token_ids")
    if ids is not None:
        return TokenPrompt(_ids(ids), text, salt)
    if text is None:
        raise ValueError("a prompt dict needs an entry 'prompt' or 'prompt_token_ids'")
    return TokenPrompt([], text, salt)


def _ids(value: object) -> list[int]:
    """Token ids, of any integer type; checks the type of each, since True is an int to Python."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"a prompt is a {type(value).__name__}, must be text, token ids or a dict")
    if not value:
        raise ValueError("prompt_token_ids is empty; a prompt needs at least one token")
    kinds = set(map(type, value))
    for kind in kinds - {int}:
        if not issubclass(kind, Integral) or kind is bool:
            token = next(token for token in value if type(token) is kind)
            raise ValueError(f"token id {token!r} is a {kind.__name__}, must be an integer")
    return list(value) if kinds == {int} else [int(token) for token in value]


def _check_length(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuse what cannot fit before it is tokenized, which takes a second for some megabytes."""
    if len(text) < max_model_len:  # a token has a character at least: most texts are not looked at further
        return
    longest = tokenizer.longest_token
    if longest is not None and len(text) > max_model_len * longest:
        characters = f", as it has {len(text):,} characters"
        raise _too_long(f"at least {max_model_len + 1}", max_model_len, characters)


def _check(token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    if not token_ids:
        raise ValueError("prompt is empty; a prompt needs at least one token")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is out of range, the vocabulary has ids 0 to {vocab_size - 1}")
    num_tokens = len(token_ids)
    if num_tokens < max_model_len:
        return
    room = ", which leaves no room for an answer" if num_tokens == max_model_len else ""
    raise _too_long(str(num_tokens), max_model_len, room)


def _too_long(num_tokens: str, max_model_len: int, more: str) -> ValueError:
    """In the words by which clients know that they must shorten a conversation, and by how much."""
    return ValueError(
        f"prompt is too long: this model's maximum context length is {max_model_len} tokens, but the prompt "
        f"contains {num_tokens} input tokens{more}; raise --max-model-len or shorten it"
    )
