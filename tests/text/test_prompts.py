"""Every form of a prompt becomes checked token ids, or an error that says what to do."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import pytest

from pellucid.text.prompts import Prompt, TokenPrompt, bad_words_token_ids, tokenize_prompts
from pellucid.text.tokenizer import Tokenizer


class Limits(TypedDict):
    vocab_size: int
    max_model_len: int


LIMITS: Limits = {"vocab_size": 1000, "max_model_len": 100}


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenPrompt:
    (tokenized,) = tokenize_prompts([prompt], tokenizer, **LIMITS)
    return tokenized


def test_text_and_ids_and_dicts_are_prompts(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello")
    prompts = ["hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids, "prompt": "hello"}]
    parsed = tokenize_prompts(prompts, byte_level, **LIMITS)
    assert [prompt.token_ids for prompt in parsed] == [ids] * 5
    assert [prompt.text for prompt in parsed] == ["hello", None, None, "hello", "hello"]


def test_integers_of_any_type_are_ids() -> None:
    ids = tokenize([1, np.int64(2), np.uint8(3)], None).token_ids
    assert ids == [1, 2, 3] and {type(token) for token in ids} == {int}
    for prompt in (np.array([1, 2, 3]), {"prompt_token_ids": np.array([1, 2, 3])}, range(1, 4)):
        ids = tokenize(prompt, None).token_ids  # type: ignore[arg-type]
        assert ids == [1, 2, 3] and {type(token) for token in ids} == {int}


def test_given_ids_are_not_encoded_again(byte_level: Tokenizer) -> None:
    prompt = {"prompt": "some text", "prompt_token_ids": [5, 6], "cache_salt": "tenant"}
    parsed = tokenize(prompt, byte_level)
    assert (parsed.token_ids, parsed.text, parsed.cache_salt) == ([5, 6], "some text", "tenant")


def test_ids_need_no_tokenizer_but_text_does() -> None:
    assert tokenize([1, 2], None).token_ids == [1, 2]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        tokenize("hello", None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt_token_ids is empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        (np.array([]), "prompt_token_ids is empty"),
        (np.array([0.5]), "token id 0.5 is a float"),
        (np.array(5), "a prompt is a int, must be text"),
        ({1, 2}, "a prompt is a set, must be text"),
        ({}, "needs an entry 'prompt' or 'prompt_token_ids'"),
        ({"text": "hello"}, "no entry 'text'"),
        ({"prompt": ["a"]}, "prompt is a list, must be text"),
        ([3, 1000], "token id 1000 is out of range, the vocabulary has ids 0 to 999"),
        ([3, -1], "token id -1 is out of range"),
        ([3, "x"], "token id 'x' is a str"),
        ([True], "token id True is a bool"),
        ([0, 1, 0.5], "token id 0.5 is a float"),
        (7, "a prompt is a int"),
        (
            [1] * 9120,
            "is 100 tokens, but the prompt contains 9120 input tokens; raise --max-model-len or shorten",
        ),
        ([1] * 100, "leaves no room for an answer"),
    ],
)
def test_a_wrong_prompt_is_told_what_is_wrong(byte_level: Tokenizer, prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenize(prompt, byte_level)


def test_a_prompt_may_leave_room_for_one_token_only(byte_level: Tokenizer) -> None:
    assert len(tokenize([1] * 99, byte_level).token_ids) == 99


def test_a_bad_word_is_spelt_with_and_without_its_space(byte_level: Tokenizer) -> None:
    bare = byte_level.encode("add", add_special_tokens=False)
    spaced = byte_level.encode(" add", add_special_tokens=False)
    assert len(bare) == len(spaced) == 1
    assert bad_words_token_ids(["add"], byte_level, vocab_size=1000) == (tuple(bare), tuple(spaced))
    assert bad_words_token_ids([" add"], byte_level, vocab_size=1000) == (tuple(bare), tuple(spaced))


def test_a_word_that_is_spelt_alike_with_a_space_is_named_once(family: dict[str, Tokenizer]) -> None:
    assert len(bad_words_token_ids(["the"], family["word_piece"], vocab_size=10**6)) == 1


def test_a_space_that_is_a_token_of_its_own_forbids_nothing_new(byte_level: Tokenizer) -> None:
    bare = byte_level.encode("Zq", add_special_tokens=False)
    assert len(byte_level.encode(" Zq", add_special_tokens=False)) > len(bare)
    assert bad_words_token_ids(["Zq"], byte_level, vocab_size=1000) == (tuple(bare),)


def test_a_bad_word_of_a_token_that_the_model_lacks_forbids_nothing(byte_level: Tokenizer) -> None:
    bare, spaced = (byte_level.encode(text, add_special_tokens=False) for text in ("add", " add"))
    low, high = sorted((bare, spaced))
    assert bad_words_token_ids(["add"], byte_level, vocab_size=high[0]) == (tuple(low),)
    assert bad_words_token_ids(["add"], byte_level, vocab_size=low[0]) == ()
