"""The host's side of grammars: what may come behind a text, behind its drafts, and behind its thinking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("xgrammar")

from pellucid.sample.grammars.base import GrammarSpec, Matcher, Spelling
from pellucid.sample.grammars.host import Delayed, Grammars, bit
from pellucid.sample.grammars.xgrammar import XGrammarBackend
from pellucid.schedule.scheduler import HostBoundRow
from pellucid.types import Request, SamplingParams

WORDS = [bytes([i]) for i in range(128)]
WORDS[0] = b""  # the end of the text
START, END, WIDE = 128, 129, 130
SPELLING = Spelling(token_bytes=[*WORDS, b"<think>", b"</think>", b"ab"], vocab_size=140, stop_token_ids=(0,))


def row(spec: GrammarSpec, text: str, drafts: str = "", **sampling: int) -> HostBoundRow:
    request = Request(
        id="r", prompt_token_ids=[1, 2], sampling=SamplingParams(**sampling), grammar=spec.encode()
    )
    return HostBoundRow(request, [1, 2, *map(ord, text)], [*map(ord, drafts)])


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def make() -> Grammars:
    return Grammars(lambda: SPELLING, vocab_size=SPELLING.vocab_size)


def letters(text: str) -> set[int]:
    return {*map(ord, text)}


def test_every_draft_has_a_mask_and_none_is_left_in_the_text() -> None:
    grammars, spec = make(), GrammarSpec("regex", "abc|abd|x")
    masks = grammars.masks({4: row(spec, "", "abd")})[4]
    assert [allowed(mask) for mask in masks] == [letters("ax") | {WIDE}, letters("b"), letters("cd"), {0}]
    again = grammars.masks({0: row(spec, "a", "b")})[0]
    assert [allowed(mask) for mask in again] == [letters("b"), letters("cd")]


def test_behind_a_draft_that_may_not_come_anything_may() -> None:
    masks = make().masks({0: row(GrammarSpec("regex", "abc"), "", "axc")})[0]
    assert [allowed(mask) for mask in masks[:2]] == [letters("a") | {WIDE}, letters("b")]
    assert (masks[2:] == -1).all()


def test_a_draft_that_may_not_come_is_no_complaint(capfd: pytest.CaptureFixture[str]) -> None:
    grammars, unspelt = make(), chr(WIDE + 1)
    grammars.masks({0: row(GrammarSpec("regex", "abc"), "", f"a{unspelt}")})
    assert capfd.readouterr() == ("", "")


def test_drafts_behind_the_end_of_the_text_are_no_text() -> None:
    masks = make().masks({0: row(GrammarSpec("regex", "a"), "a", "\0bc")})[0]
    assert [allowed(mask) for mask in masks] == [{0}] * 4


@pytest.mark.parametrize(
    "text,min_tokens,ended",
    [
        ("a", 0, {}),
        ("a", 2, {"r": None}),  # nothing but the end may come, and that is held back
        ("a\0", 0, {"r": None}),
        ("a\0b", 0, {"r": None}),
    ],
)
def test_a_text_that_is_whole_ends(text: str, min_tokens: int, ended: dict) -> None:
    grammars = make()
    grammars.masks({0: row(GrammarSpec("regex", "a"), text, min_tokens=min_tokens)})
    assert grammars.take_ended() == ended and grammars.take_ended() == {}


def test_a_text_that_is_whole_ends_without_a_stop_token() -> None:
    grammars = Grammars(lambda: replace(SPELLING, stop_token_ids=()), vocab_size=SPELLING.vocab_size)
    for text, ended in {"": {}, "a": {}, "ab": {"r": None}}.items():
        grammars.masks({0: row(GrammarSpec("regex", "ab"), text)})
        assert grammars.take_ended() == ended


def test_a_grammar_that_keeps_others_waiting_ends_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, clock = make(), iter(0.4 * i for i in range(100))
    monkeypatch.setattr("pellucid.sample.grammars.host.time.thread_time", lambda: next(clock))
    told = []
    for length in range(6):
        grammars.masks({0: row(GrammarSpec("regex", "(a*)*b"), length * "a")})
        told.append(grammars.take_ended())
    assert told[:5] == [{}] * 5
    assert told[5]["r"].startswith("its grammar has taken 2.4 s for 6 masks")


def test_a_text_that_has_left_its_language_ends_in_an_error() -> None:
    grammars = make()
    grammars.masks({0: row(GrammarSpec("regex", "ab"), "ax")})
    assert "left its grammar" in str(grammars.take_ended()["r"])


def test_a_forgotten_request_begins_anew() -> None:
    grammars, spec = make(), GrammarSpec("regex", "ab")
    grammars.masks({0: row(spec, "a")})
    grammars.forget("r")
    assert allowed(grammars.masks({0: row(spec, "")})[0][0]) == {ord("a"), WIDE}


def test_equal_languages_are_compiled_once_and_the_oldest_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.sample.grammars.host.MOST_LANGUAGES", 2)
    grammars = make()
    first, thinking = GrammarSpec("regex", "a"), GrammarSpec("regex", "a", (None, END))
    compiled = grammars.compile(first.encode())
    assert grammars.compile(thinking.encode()) is compiled
    for text in "bcd":
        grammars.compile(GrammarSpec("regex", text).encode()).result()
    assert grammars.compile(first.encode()) is not compiled


def test_what_cannot_be_compiled_is_told_to_whoever_asks() -> None:
    error = make().compile(GrammarSpec("regex", "[a").encode()).exception()
    assert isinstance(error, ValueError) and "Unclosed" in str(error) and ".cc" not in str(error)


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
