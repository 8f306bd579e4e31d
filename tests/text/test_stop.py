"""A text ends at its stop string, and no part of it is ever shown."""

from __future__ import annotations

import random

import pytest

from pellucid.text.stop import StopStrings


def feed_all(stops: StopStrings, parts: list[str]) -> list[str]:
    """What is shown for each part, up to the match."""
    shown = []
    for part in parts:
        shown.append(stops.feed(part))
        if stops.matched is not None:
            return shown
    return [*shown, stops.flush()]


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By trying every end in turn."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_any_text_in_any_pieces_ends_where_it_should(include: bool) -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("abc", k=rng.randrange(1, 15)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        watch = StopStrings(stops, include_in_output=include)
        want, matched = expected(text, stops, include)
        assert "".join(feed_all(watch, parts)) == want, (text, stops, parts)
        assert watch.matched == matched


def test_a_possible_beginning_is_held_back_and_then_shown() -> None:
    watch = StopStrings(["\nUser:"])
    assert [watch.feed(part) for part in ["hi", "\n", "Us", "ual", " text"]] == [
        "hi",
        "",
        "",
        "\nUsual",
        " text",
    ]


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    watch = StopStrings(["a very long stop string"])
    assert watch.feed("some text") == "some text"


def test_nothing_of_a_stop_string_is_shown() -> None:
    watch = StopStrings(["STOP"])
    assert [watch.feed(part) for part in ["okS", "TO", "P and on"]] == ["ok", "", ""]
    assert watch.matched == "STOP"


def test_the_string_that_is_complete_first_wins_whatever_their_order() -> None:
    for stops in (["bcd", "bc"], ["bc", "bcd"]):
        watch = StopStrings(stops)
        assert watch.feed("abcd") == "a"
        assert watch.matched == "bc"


def test_unarmed_text_cannot_end_it_but_may_begin_the_string() -> None:
    watch = StopStrings(["ab"])
    assert watch.feed("ab", armed=False) == "ab"
    assert watch.matched is None
    assert watch.feed("a", armed=False) == ""
    assert watch.feed("b") == ""
    assert watch.matched == "ab"


def test_a_string_within_held_unarmed_text_does_not_count_later() -> None:
    watch = StopStrings(["abc", "b"])
    assert watch.feed("ab", armed=False) == ""
    assert watch.feed("x") == "abx"
    assert watch.matched is None
