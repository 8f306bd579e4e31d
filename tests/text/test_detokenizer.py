"""Text that comes in pieces is the text that comes at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pellucid.text.detokenizer import make_detokenizer
from pellucid.text.token_bytes import LeadingSpace, PieceDecoder
from pellucid.text.tokenizer import Tokenizer
from tests.text.conftest import save, train_word_piece

ALPHABET = ["a", "b", "the", " ", "  ", "\n", "é", "ß", "你", "好", "😀", "👩‍🚀", "\u2581", "<s>"]
BYTE_FAMILIES = ["byte_level", "byte_fallback", "gemma", "wrapped"]
PLAIN = ["the", "cat", "Paris", "hello", "world", "forty", "two"]


def random_text(rng: random.Random, words: list[str] = ALPHABET) -> str:
    return "".join(rng.choice(words) for _ in range(rng.randrange(1, 30)))


def random_splits(rng: random.Random, ids: list[int]) -> list[list[int]]:
    parts, rest = [], ids
    while rest:
        n = rng.randrange(0, 5)
        parts.append(rest[:n])
        rest = rest[n:]
    return parts


def read(
    tokenizer: Tokenizer, parts: list[list[int]], prompt: Sequence[int] = (), *, skip: bool = True
) -> str:
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return "".join([detokenizer.feed(part) for part in parts]) + detokenizer.flush()


@pytest.mark.parametrize("name", BYTE_FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_whole_text(family: dict[str, Tokenizer], name: str, skip: bool) -> None:
    tokenizer, rng = family[name], random.Random(0)
    for _ in range(300):
        ids = tokenizer.encode(random_text(rng))
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert read(tokenizer, random_splits(rng, ids), skip=skip) == whole


@pytest.mark.parametrize("name", ["metaspace", "word_piece"])
def test_pieces_join_to_the_whole_text_without_bytes(family: dict[str, Tokenizer], name: str) -> None:
    tokenizer, rng = family[name], random.Random(1)
    for _ in range(300):
        ids = tokenizer.encode(" ".join(rng.choices([*PLAIN, "</s>", "你好", "Köln"], k=8)))
        assert read(tokenizer, random_splits(rng, ids)) == tokenizer.decode(ids)


def test_any_ids_at_all_read_like_the_whole_in_byte_level_bpe(byte_level: Tokenizer) -> None:
    rng = random.Random(2)
    for _ in range(500):
        ids = rng.choices(
            range(byte_level.vocab_size + 3), k=rng.randrange(1, 20)
        )  # some beyond the vocabulary
        assert read(byte_level, random_splits(rng, ids)) == byte_level.decode(ids)


@pytest.mark.parametrize("name", [*BYTE_FAMILIES, "metaspace", "word_piece"])
def test_an_answer_goes_on_where_the_prompt_ended(family: dict[str, Tokenizer], name: str) -> None:
    tokenizer, rng = family[name], random.Random(3)
    words = ALPHABET[:-2] if name in BYTE_FAMILIES else PLAIN
    for _ in range(200):
        ids = tokenizer.encode(" ".join([random_text(rng, words), random_text(rng, words)]))
        cut = rng.randrange(1, len(ids) + 1)
        prompt, answer = ids[:cut], ids[cut:]
        before = make_detokenizer(tokenizer).feed(prompt)  # without the bytes that wait for the answer
        assert before + read(tokenizer, random_splits(rng, answer), prompt) == tokenizer.decode(ids)


def test_half_a_character_is_held_back(byte_level: Tokenizer) -> None:
    detokenizer = make_detokenizer(byte_level)
    ids = byte_level.encode("😀")
    assert len(ids) == 4
    assert [detokenizer.feed([i]) for i in ids] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_half_a_character_is_shown_at_the_end(byte_level: Tokenizer) -> None:
    detokenizer = make_detokenizer(byte_level)
    assert detokenizer.feed(byte_level.encode("a😀")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_a_byte_fallback_character_is_shown_once_it_is_complete(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("a你好")
    detokenizer = make_detokenizer(byte_fallback)
    texts = [detokenizer.feed([i]) for i in ids]
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) == "a你好"
    assert texts.count("") >= 4


def test_the_first_space_is_the_tokenizers_own_only_at_the_beginning(byte_fallback: Tokenizer) -> None:
    answer = byte_fallback.encode("Paris")
    assert read(byte_fallback, [answer]) == "Paris"
    assert read(byte_fallback, [answer], byte_fallback.encode("is")) == " Paris"


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>hello</s>")
    assert read(byte_level, [ids]) == "hello"
    assert read(byte_level, [ids], skip=False) == "<|im_start|>hello</s>"


@pytest.mark.parametrize("name", ["byte_level", "wrapped"])
def test_broken_bytes_are_shown_by_and_by(family: dict[str, Tokenizer], name: str) -> None:
    """A model that stutters half a character must not hold back its text for ever."""
    half = family[name].encode("😀")[0]
    detokenizer = make_detokenizer(family[name])
    assert len(detokenizer.feed([half] * 100)) >= 90


class RecordingTokenizer(Tokenizer):
    """Remembers how many tokens it was asked to decode at most."""

    longest = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_long_text_costs_no_more_per_token(tmp_path: Path) -> None:
    tokenizer = RecordingTokenizer.load(save(tmp_path, train_word_piece()))
    assert isinstance(tokenizer, RecordingTokenizer)
    words = tokenizer.encode("the cat sat on the mat")
    make_detokenizer(tokenizer, words * 100).feed(words * 100)
    assert 0 < tokenizer.longest <= 16


def test_an_unknown_decoder_is_left_to_the_library() -> None:
    assert PieceDecoder.from_decoder_json('{"type": "WordPiece", "prefix": "##", "cleanup": true}') is None
    assert PieceDecoder.from_decoder_json("null") is None
    steps = '{"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}'
    assert PieceDecoder.from_decoder_json(steps) is None


def test_metaspace_keeps_the_first_space_if_none_was_put_there() -> None:
    decoder = PieceDecoder.from_decoder_json(
        '{"type": "Metaspace", "replacement": "\\u2581", "prepend_scheme": "never", "split": true}'
    )
    assert decoder is not None
    assert decoder.leading_space is LeadingSpace.KEEP
