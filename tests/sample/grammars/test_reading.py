"""How texts are read: what may come behind them, behind their drafts, and behind their thinking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("xgrammar")

from pellucid.sample.grammars.base import GrammarSpec, Matcher, Spelling
from pellucid.sample.grammars.reading import Delayed, Readings, bit
from pellucid.sample.grammars.wire import Row
from pellucid.sample.grammars.xgrammar import XGrammarBackend

WORDS = [bytes([i]) for i in range(128)]
WORDS[0] = b""  # the end of the text
START, END, WIDE = 128, 129, 130
SPELLING = Spelling(token_bytes=[*WORDS, b"<think>", b"</think>", b"ab"], vocab_size=140, stop_token_ids=(0,))


class Texts:
    """Masks of single rows."""

    def __init__(self, regex: str, spelling: Spelling = SPELLING) -> None:
        compiled = XGrammarBackend(spelling).compile(GrammarSpec("regex", regex))
        self.readings = Readings(compiled, spelling)
        self.ended: dict[str, str | None] = {}

    def masks(self, text: str = "", drafts: str = "", *, may_stop: bool = True) -> np.ndarray:
        """text: what is new of it."""
        row = Row("r", [*map(ord, text)], [*map(ord, drafts)], may_stop)
        masks = np.zeros((1 + len(drafts), SPELLING.num_words), dtype=np.int32)
        self.ended = self.readings.fill([row], masks).ended
        return masks

    def allowed(self, text: str = "", drafts: str = "") -> list[set[int]]:
        return [allowed(mask) for mask in self.masks(text, drafts)]


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def letters(text: str) -> set[int]:
    return {*map(ord, text)}


def test_every_draft_has_a_mask_and_none_is_left_in_the_text() -> None:
    texts = Texts("abc|abd|x")
    assert texts.allowed("", "abd") == [letters("ax") | {WIDE}, letters("b"), letters("cd"), {0}]
    assert texts.allowed("a", "b") == [letters("b"), letters("cd")]


def test_behind_a_draft_that_may_not_come_anything_may() -> None:
    masks = Texts("abc").masks("", "axc")
    assert [allowed(mask) for mask in masks[:2]] == [letters("a") | {WIDE}, letters("b")]
    assert (masks[2:] == -1).all()


def test_a_draft_that_may_not_come_is_no_complaint(capfd: pytest.CaptureFixture[str]) -> None:
    unspelt = chr(WIDE + 1)
    Texts("abc").masks("", f"a{unspelt}")
    assert capfd.readouterr() == ("", "")


def test_drafts_behind_the_end_of_the_text_are_no_text() -> None:
    assert Texts("a").allowed("a", "\0bc") == [{0}] * 4


@pytest.mark.parametrize(
    "text,may_stop,ended",
    [
        ("a", True, {}),
        ("a", False, {"r": None}),  # nothing but the end may come, and that is held back
        ("a\0", True, {"r": None}),
        ("a\0b", True, {"r": None}),
    ],
)
def test_a_text_that_is_whole_ends(text: str, may_stop: bool, ended: dict) -> None:
    texts = Texts("a")
    texts.masks(text, may_stop=may_stop)
    assert texts.ended == ended


def test_a_text_that_is_whole_ends_without_a_stop_token() -> None:
    texts = Texts("ab", replace(SPELLING, stop_token_ids=()))
    for new, ended in {"": {}, "a": {}, "b": {"r": None}}.items():
        texts.masks(new)
        assert texts.ended == ended


def test_a_grammar_that_keeps_others_waiting_ends_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, clock = Texts("(a*)*b"), iter(0.4 * i for i in range(100))
    monkeypatch.setattr("pellucid.sample.grammars.reading.time.thread_time", lambda: next(clock))
    told = []
    for _ in range(6):
        texts.masks("a")
        told.append(texts.ended)
    assert told[:5] == [{}] * 5
    assert str(told[5]["r"]).startswith("its grammar has taken 2.4 s for 6 masks")


def test_a_text_that_has_left_its_language_ends_in_an_error() -> None:
    texts = Texts("ab")
    texts.masks("ax")
    assert "left its grammar" in str(texts.ended["r"])


def test_a_forgotten_request_begins_anew() -> None:
    texts = Texts("ab")
    texts.masks("a")
    texts.readings.forget("r")
    assert texts.allowed() == [{ord("a"), WIDE}]


def test_texts_of_one_language_each_have_their_own_place_in_it() -> None:
    texts = Texts("ab")
    rows = [Row("1", [], [], True), Row("2", [ord("a")], [], True)]
    masks = np.zeros((2, SPELLING.num_words), dtype=np.int32)
    texts.readings.fill(rows, masks)
    assert [allowed(mask) for mask in masks] == [{ord("a"), WIDE}, {ord("b")}]


def filled(matcher: Matcher) -> set[int]:
    masks = np.zeros((1, SPELLING.num_words), dtype=np.int32)
    matcher.fill(masks, 0)
    return allowed(masks[0])


def delayed(start: int | None) -> Delayed:
    matcher = XGrammarBackend(SPELLING).compile(GrammarSpec("regex", "ab")).start()
    stops = np.zeros(SPELLING.num_words, dtype=np.int32)
    stops[0] = bit(0)
    return Delayed(matcher, start=start, end=END, stops=stops)


def test_thinking_may_begin_a_text_and_the_grammar_holds_behind_it() -> None:
    matcher = delayed(START)
    assert filled(matcher) == {ord("a"), WIDE, START}
    assert matcher.accept(START) and filled(matcher) == set(range(1, 32 * SPELLING.num_words))
    assert matcher.accept(ord("z")) and matcher.accept(END) and filled(matcher) == {ord("a"), WIDE}
    assert not matcher.accept(ord("b")) and matcher.accept(ord("a")) and filled(matcher) == {ord("b")}
    matcher.rollback(3)
    assert matcher.accept(END) and matcher.accept(WIDE) and filled(matcher) == {0}
    assert matcher.accept(0) and matcher.is_done
    matcher.rollback(4)
    assert not matcher.is_done and filled(matcher) == {ord("a"), WIDE, START}


def test_a_text_that_does_not_think_is_bound_from_the_start() -> None:
    matcher = delayed(START)
    assert not matcher.accept(ord("b")) and matcher.accept(ord("a"))
    assert filled(matcher) == {ord("b")} and not matcher.accept(START)


def test_where_the_prompt_thinks_so_does_the_text() -> None:
    matcher = delayed(None)
    assert matcher.accept(ord("z")) and matcher.accept(START) and matcher.accept(END)
    assert filled(matcher) == {ord("a"), WIDE}


def test_a_text_that_cannot_be_read_ends_alone() -> None:
    texts = Texts("[a-z]+")
    rows = [
        Row(name, [], [], may_stop=True, thinking=(None, END) if name == "thinks" else None)
        for name in ("x", "thinks")
    ]
    masks = np.zeros((2, SPELLING.num_words), dtype=np.int32)
    assert texts.readings.fill(rows, masks).ended == {}
    rows = [Row("x", ["no token"], [], may_stop=True), Row("thinks", [END], [], may_stop=True)]  # type: ignore[list-item]
    (error,) = texts.readings.fill(rows, masks).ended.items()
    assert error[0] == "x" and "its grammar has failed: TypeError" in str(error[1])
    assert allowed(masks[1]) == {*range(ord("a"), ord("z") + 1), WIDE}
