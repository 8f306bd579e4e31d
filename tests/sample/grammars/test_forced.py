"""What a grammar leaves no choice of is drafted, as the longest tokens of the only text that may come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("xgrammar")

from pellucid.sample.grammars.base import GrammarSpec, Matcher
from pellucid.sample.grammars.forced import allowed_tokens, forced_tokens, longest_within
from pellucid.sample.grammars.reading import Delayed, Readings
from pellucid.sample.grammars.wire import Row
from pellucid.sample.grammars.xgrammar import XGrammarBackend
from tests.sample.grammars.test_reading import END, SPELLING, START, WIDE, WORDS, letters

A, B, C = map(ord, "abc")


def matcher_of(regex: str) -> Matcher:
    return XGrammarBackend(SPELLING).compile(GrammarSpec("regex", regex)).start()


@pytest.mark.parametrize(
    "regex,most,expected",
    [
        ("abc[xy]", 4, [WIDE, C]),  # `a` and `ab` begin the same text: the longer one
        ("abc[xy]", 1, [WIDE]),
        ("abc", 9, [WIDE, C]),  # its end is no text
        ("[xy]abc", 4, []),
        ("b{5}", 3, [B, B, B]),
        ("ac|ab", 4, []),  # `a`, `ab`: the longer one is not the only text
        ("(ab|ax)c", 4, []),
    ],
)
def test_tokens_of_the_only_text(regex: str, most: int, expected: list[int]) -> None:
    matcher = matcher_of(regex)
    before, after = np.zeros((2, 1, SPELLING.num_words), dtype=np.int32)
    matcher.fill(before, 0)
    assert forced_tokens(matcher, SPELLING, most) == expected
    matcher.fill(after, 0)
    assert np.array_equal(before, after), "it stays where it was"


def test_where_a_character_is_cut_nothing_is_drafted() -> None:
    halves = replace(SPELLING, token_bytes=[*WORDS, b"\xc3", b"\xa9", b""])
    matcher = XGrammarBackend(halves).compile(GrammarSpec("regex", "é|è")).start()
    assert forced_tokens(matcher, halves, 4) == []
    assert matcher.accept(128) and not matcher.forced, "what is left is no character"


def test_tokens_that_may_come_are_read_from_a_mask() -> None:
    mask = np.zeros(5, dtype=np.int32)
    mask[0], mask[4] = 5, np.int32(-(1 << 31))
    assert allowed_tokens(mask) == [0, 2, 159]
    assert allowed_tokens(np.full(200, -1, dtype=np.int32)) == [], "there are too many to be one text's"


@pytest.mark.parametrize(
    "tokens,expected",
    [([A, WIDE], WIDE), ([A], A), ([A, B], None), ([0], None), ([A, 0], None), ([], None), ([139], None)],
)
def test_all_tokens_begin_the_text(tokens: list[int], expected: int | None) -> None:
    assert longest_within(b"abc", tokens, SPELLING.token_bytes) == expected


def test_a_token_that_goes_on_behind_the_text_may_be_the_wrong_one() -> None:
    assert longest_within(b"a", [A, WIDE], SPELLING.token_bytes) is None


def test_thinking_is_free() -> None:
    stops = np.zeros(SPELLING.num_words, dtype=np.int32)
    matcher = Delayed(matcher_of("abc"), start=START, end=END, stops=stops)
    assert forced_tokens(matcher, SPELLING, 4) == [], "it may begin to think"
    assert matcher.accept(START)
    assert forced_tokens(matcher, SPELLING, 4) == []
    assert matcher.accept(END)
    assert forced_tokens(matcher, SPELLING, 4) == [WIDE, C]


def test_what_has_been_read_for_drafts_is_not_read_again() -> None:
    readings = Readings(XGrammarBackend(SPELLING).compile(GrammarSpec("regex", "xab[cd]")), SPELLING)
    assert readings.force([Row("r", [ord("x")], [], True)], 4).token_ids == {"r": [WIDE]}
    masks = np.zeros((2, SPELLING.num_words), dtype=np.int32)
    assert not readings.fill([Row("r", [], [WIDE], True)], masks).ended
    assert [set(allowed_tokens(mask)) for mask in masks] == [{A, WIDE}, letters("cd")]


def test_a_text_that_leaves_its_language_while_drafts_are_sought_ends_with_the_next_masks() -> None:
    readings = Readings(XGrammarBackend(SPELLING).compile(GrammarSpec("regex", "ab")), SPELLING)
    assert readings.force([Row("r", [C], [], True)], 4).token_ids == {}
    masks = np.zeros((1, SPELLING.num_words), dtype=np.int32)
    assert "left its grammar" in str(readings.fill([Row("r", [], [], True)], masks).ended["r"])
