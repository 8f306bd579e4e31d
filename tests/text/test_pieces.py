"""A long text is tokenized in pieces only where nobody can tell from its tokens."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from pellucid.text import pieces
from pellucid.text.pieces import can_be_cut, pieces_of
from pellucid.text.tokenizer import Tokenizer
from tests.text.conftest import FAMILIES, save, train_byte_level, with_bos

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "qwen2": [rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"],
    "llama3": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"
    ],
    "gpt-4o": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS}*{SMALL}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{LETTERS}+{SMALL}*"
        rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{END}",
    ],
}


def with_pattern(*patterns: str) -> tokenizers.Tokenizer:
    tokenizer = train_byte_level()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


FAMILY = {"gpt2": train_byte_level(), **{name: with_pattern(*each) for name, each in PATTERNS.items()}}
SCRAPS = [
    *("\n", "\n\n", "\r\n", "\r", " ", "  ", "\t", "a", "the", "S", "'s", "'", ".", "!\n", "/", "12", "1"),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "你好",
        "\u2028",
        "\x0b",
        "\u3000",
        "<|im_end|>",
        "</s>",
        "<tool call>",
        "\0",
    ),
    *("x\ny", ">\nuser", "\nthe cat", "'\ns", "K", "ﬁ", "def add(a):\n    return"),
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=30).map("".join), st.integers(1, 9))
def test_pieces_have_the_tokens_of_the_whole(text: str, size: int) -> None:
    whole = {name: tokenizer.encode(text).ids for name, tokenizer in FAMILY.items()}
    before, pieces.PIECE = pieces.PIECE, size
    try:
        cut = list(pieces_of(text))
    finally:
        pieces.PIECE = before
    assert "".join(cut) == text
    for name, tokenizer in FAMILY.items():
        assert can_be_cut(tokenizer), name
        assert [i for piece in cut for i in tokenizer.encode(piece).ids] == whole[name], (name, cut)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("byte_level", "wrapped")])
def test_who_splits_elsewhere_is_given_texts_whole(name: str) -> None:
    assert not can_be_cut(FAMILIES[name]())


@pytest.mark.parametrize(
    "pattern", [r"\p{N}|x\ny|\s+", r"\p{N}{1,3}", r"[^\r\n\p{L}\p{N}]?\p{L}+|\s+|.+", r"\s+$|\s+", ""]
)
def test_an_unknown_pattern_is_given_texts_whole(pattern: str) -> None:
    assert not can_be_cut(with_pattern(pattern))


@pytest.mark.parametrize("trait", ["lstrip", "rstrip", "single_word"])
def test_a_token_that_looks_around_wants_texts_whole(trait: str) -> None:
    tokenizer = train_byte_level()
    tokenizer.add_tokens([AddedToken("the", **{trait: True})])
    assert not can_be_cut(tokenizer)


def test_a_token_with_a_line_break_wants_texts_whole() -> None:
    tokenizer = train_byte_level()
    tokenizer.add_tokens([AddedToken(".\nuser")])
    assert not can_be_cut(tokenizer)


def test_a_splitter_of_another_behaviour_wants_texts_whole() -> None:
    tokenizer = train_byte_level()
    spec = json.loads(with_pattern(PATTERNS["qwen2"][0]).to_str())
    spec["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert not can_be_cut(tokenizer)


def test_a_long_text_gets_its_special_tokens_once(tmp_path: Path) -> None:
    trained = with_bos(train_byte_level())
    tokenizer = Tokenizer.load(save(tmp_path, trained))
    text = "the cat sat.\nhello world\n" * 8000
    assert len(list(pieces_of(text))) > 5
    assert tokenizer.encode(text) == trained.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=False) == trained.encode(text).ids[1:]
    short = "hello"
    assert tokenizer.encode_batch([text, short]) == [tokenizer.encode(text), tokenizer.encode(short)]


@pytest.mark.parametrize("text", ["the cat sat on the mat. " * 40_000, "the cat\nsat " * 80_000])
def test_long_texts_hold_up_no_other_thread(byte_level: Tokenizer, text: str) -> None:
    """Beside a control: the library's method for one text, which keeps the interpreter to itself."""
    ids = byte_level.encode(text)
    library = byte_level._vocabulary._tokenizer  # type: ignore[attr-defined]
    control = longest_silence(lambda: library.encode(text))
    assert longest_silence(lambda: byte_level.encode(text)) < control / 2
    assert longest_silence(lambda: byte_level.decode(ids)) < control / 2


def longest_silence(work) -> float:
    """Seconds that this thread is kept from the interpreter while another one works."""
    thread = threading.Thread(target=work)
    longest, before = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest
