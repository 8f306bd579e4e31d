"""Reasoning, content and calls are found in a text, and the same ones however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pellucid.server.parsers.base import (
    Content,
    Event,
    Parser,
    ParserSetting,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from pellucid.server.parsers.compose import Parsers, choose

TOOLS = ({"type": "function", "function": {"name": "weather"}},)
ALL = [Parsers(reasoning, tools) for reasoning in ("plain", "qwen3") for tools in ("hermes", "llama3_json")]
HERMES, LLAMA, QWEN = Parsers(tools="hermes"), Parsers(tools="llama3_json"), Parsers("qwen3", "hermes")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Paris"}}'


def fed(parser: Parser, pieces: list[str]) -> list[tuple[str, ...]]:
    """All events of a text in pieces, as short as can be, without the calls' ids."""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert all(not isinstance(event, Content | Reasoning) or event.text for event in events)
    return [shown(event) for event in joined(events)]


def shown(event: Event) -> tuple[str, ...]:
    match event:
        case ToolCallStart(id, name):
            assert id
            return ("call", name)
        case Content(text):
            return ("content", text)
        case Reasoning(text):
            return ("reasoning", text)
        case ToolCallArguments(text):
            return ("arguments", text)


def read(parsers: Parsers, text: str, **setting: object) -> list[tuple[str, ...]]:
    made = {"tools": TOOLS, **setting}
    whole = fed(parsers.make(ParserSetting(**made)), [text])  # type: ignore[arg-type]
    letters = fed(parsers.make(ParserSetting(**made)), list(text))  # type: ignore[arg-type]
    assert whole == letters
    return whole


PARIS = [("call", "weather"), ("arguments", '{"city": "Paris"}')]


@pytest.mark.parametrize(
    "text,reasoning,content",
    [
        ("<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four."),
        ("\n<think>Hm.</think>Four.", "Hm.", "Four."),
        ("<think>\nHm, and\n\nthen", "Hm, and\n\nthen", ""),
        ("<think>\nHm </thin", "Hm </thin", ""),
        ("<think>\n\n</think>\n\nFour.", "", "Four."),
        ("Four.", "", "Four."),
        ("\n Four.\n", "", "\n Four.\n"),
        ("<thin", "", "<thin"),
        ("A <think> opens, </think> ends it.", "", "A <think> opens, </think> ends it."),
        ("<think>a</think>b</think>", "a", "b</think>"),
    ],
)  # fmt: skip
def test_thinking_is_told_from_the_answer(text: str, reasoning: str, content: str) -> None:
    expected = [("reasoning", reasoning)] * bool(reasoning) + [("content", content)] * bool(content)
    assert read(QWEN, text, tools=()) == expected


def test_an_answer_of_a_language_keeps_its_white_space() -> None:
    for text, content in [
        ("<think>\nHm.\n</think>\n\nFour.", "\n\nFour."),
        ("<think>Hm.</think>Four.", "Four."),
        ("<think>Hm.</think> ", " "),
    ]:
        expected = [("reasoning", "Hm."), ("content", content)]
        assert read(QWEN, text, tools=(), is_constrained=True) == expected
    assert read(QWEN, f"<think>Hm.</think>\n{CALL}", is_constrained=True) == [("reasoning", "Hm."), *PARIS]


@pytest.mark.parametrize(
    "setting",
    [{"prompt": "...<think>\n"}, {"prompt": "<think>\nHm", "continued": "<think>\nHm"}],
)
def test_a_prompt_may_open_the_thought(setting: dict[str, str]) -> None:
    assert read(QWEN, "\nHm.\n</think>\nFour.", **setting) == [("reasoning", "Hm."), ("content", "Four.")]
    assert read(QWEN, "<think>\nHm.</think>Four.", **setting) == [("reasoning", "Hm."), ("content", "Four.")]
    assert read(QWEN, "Hm.", **setting) == [("reasoning", "Hm.")]


def test_what_users_write_opens_no_thought() -> None:
    setting = {"prompt": "user: <think>\nassistant: ", "continued": "<think></think>"}
    assert read(QWEN, "Four.", **setting) == [("content", "Four.")]


def test_calls_are_found_in_order_and_the_rest_is_content() -> None:
    text = f'I look.\n{CALL}\n<tool_call>{{"name": "time", "arguments": "{{}}"}}</tool_call>\n'
    assert read(HERMES, text) == [("content", "I look."), *PARIS, ("call", "time"), ("arguments", "{}")]
    assert read(QWEN, f"<think>\n{CALL}\n</think>\n\n{CALL}") == [("reasoning", CALL), *PARIS]
    assert read(LLAMA, f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}") == PARIS * 2


def test_calls_that_a_thought_drafts_by_the_hundred_are_a_thought() -> None:
    text = f"{CALL}\n" * 600 + "But no."
    assert read(QWEN, f"<think>\n{text}") == [("reasoning", text)]


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        CALL.removesuffix("</tool_call>"),
        CALL.removesuffix("}\n</tool_call>"),
        CALL.replace("}}\n", "}\n"),  # a brace is missing
        CALL.replace("}}", '}, "id": 7}'),
        CALL.replace("\n", ""),
        "\n\n" + CALL + "\n",
        CALL.replace("arguments", "parameters"),
    ],
)
def test_a_call_may_be_untidy(text: str) -> None:
    assert read(HERMES, text) == PARIS


def test_keys_may_come_in_any_order() -> None:
    text = '<tool_call>{"id": 1, "arguments": {"city": "Köln"}, "name": "weather"}</tool_call>'
    assert read(HERMES, text) == [("call", "weather"), ("arguments", '{"city": "Köln"}')]


def test_half_of_a_character_stays_an_escape() -> None:
    arguments = '{"city": "\\ud83d"}'
    text = f'{{"parameters": {arguments}, "name": "weather"}}'
    assert read(LLAMA, text) == [("call", "weather"), ("arguments", arguments)]
    assert read(LLAMA, text.replace("weather", "\\ud83d"))[0][0] == "content"


def test_a_call_that_was_cut_off_shows_what_there_is() -> None:
    assert read(HERMES, CALL[: CALL.index("ris")]) == [("call", "weather"), ("arguments", '{"city": "Pa')]


@pytest.mark.parametrize("parsers,call,between", [(QWEN, CALL, "\n"), (LLAMA, LLAMA_CALL, "; ")])
def test_a_forced_call_that_was_cut_off_leaves_no_markup(parsers: Parsers, call: str, between: str) -> None:
    for length in range(len(call)):
        for before, expected in (("", []), (call + between, PARIS)):
            events = read(parsers, before + call[:length], is_forced=True)
            assert events[: len(expected)] == expected
            assert all(kind in ("call", "arguments") for kind, _ in events), (before, call[:length])


@pytest.mark.parametrize("value", ["</tool_call>", '"}}{{', "\\", '\\"', "\n", "<tool_call>", "日本 🌍"])
def test_strings_may_hold_anything(value: str) -> None:
    for escaped in (True, False):
        arguments = json.dumps({"a": [{"b": value}]}, ensure_ascii=escaped)
        called = [("call", "f"), ("arguments", arguments)]
        assert read(HERMES, f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>') == called
        assert read(LLAMA, f'{{"name": "f", "parameters": {arguments}}}') == called


@pytest.mark.parametrize(
    "block",
    ["not json", '{"name": 3}', '"text"', '{"arguments": {}}', '{"name": "f", "arguments": [1]}', "{", "",
     '{"name": "f', '{"name": "", "arguments": {}}', "[" * 3000, '{"a":' * 3000 + "1" + "}" * 3000]
)  # fmt: skip
def test_what_is_no_call_stays_in_the_text(block: str) -> None:
    for text in (f"a <tool_call>\n{block}</tool_call> b ", f"<tool_call> {block} "):
        assert read(HERMES, text) == [("content", text)]
    assert read(LLAMA, f"\n{block} ") == [("content", f"\n{block} ")]
    assert read(HERMES, f"<tool_call>{block}{CALL}")[-2:] == PARIS or block in ("{", '{"name": "f')


def test_arguments_come_as_they_are_written() -> None:
    parser = HERMES.make(ParserSetting(tools=TOOLS))
    parser.feed('<tool_call>{"name": "f", "arguments": {"te')
    assert parser.feed('xt": "a') == [ToolCallArguments('xt": "a')]
    assert parser.feed('"') == [ToolCallArguments('"')]


def test_words_are_not_held_back() -> None:
    parser = QWEN.make(ParserSetting(tools=TOOLS))
    assert parser.feed("Hello") == [Content("Hello")] and parser.feed(" there <") == [Content(" there")]
    assert parser.feed("b") == [Content(" <b")]


def test_one_call_if_they_are_not_to_be_parallel() -> None:
    assert read(HERMES, f"a{CALL}\n{CALL}", is_parallel=False) == [("content", "a"), *PARIS]


def test_no_tools_no_calls() -> None:
    assert read(HERMES, CALL, tools=()) == [("content", CALL)]


MARKUP = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "{", "}", '"', "\\", "\n", " ", ";",
     "<|python_tag|>", CALL, LLAMA_CALL, '{"name": "f", "arguments": {', '"a": [1, {"b": "}"}]', "é", "🌍"]
)  # fmt: skip
TEXTS = st.lists(st.one_of(MARKUP, st.text(max_size=4)), max_size=12)


@given(
    TEXTS, st.data(), st.sampled_from(ALL), st.sampled_from(["", "<think>\n"]), st.booleans(), st.booleans()
)
def test_every_cut_says_the_same(
    parts: list[str],
    data: st.DataObject,
    parsers: Parsers,
    prompt: str,
    is_constrained: bool,
    is_forced: bool,
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    setting = ParserSetting(prompt=prompt, tools=TOOLS, is_constrained=is_constrained, is_forced=is_forced)
    whole = fed(parsers.make(setting), [text])
    assert fed(parsers.make(setting), pieces) == whole
    assert fed(parsers.make(setting), list(text)) == whole


@given(TEXTS, st.sampled_from(ALL))
@example(["<think>", "a", "</think>"], ALL[2])
def test_nothing_is_lost(parts: list[str], parsers: Parsers) -> None:
    """Joined, the events are the text but for tags, white space and the frames of calls."""
    text = "".join(parts)
    events = fed(parsers.make(ParserSetting(tools=TOOLS)), [text])
    at = 0
    for kind, shown_text in events:
        if kind in ("content", "reasoning"):
            at = text.index(shown_text, at) + len(shown_text)
    if not any(kind in ("call", "reasoning") for kind, _ in events) and not text.lstrip().startswith(
        "<think>"
    ):
        assert "".join(shown_text for _, shown_text in events) == text


def test_templates_show_what_their_models_write() -> None:
    hermes, xml = "... <tool_call> </think>", "<tool_call><function=f> </think>"
    llama = '{"name": function name, "parameters": dictionary} <|eot_id|>'
    assert choose(hermes) == Parsers("qwen3", "hermes")
    assert choose(xml) == Parsers("qwen3", "qwen3_coder")
    assert choose(llama) == Parsers("plain", "llama3_json")
    assert choose(None) == choose(hermes, reasoning="plain", tools="plain") == Parsers()
    with pytest.raises(ValueError, match="unknown tool call parser 'hermse'; did you mean 'hermes'"):
        choose(None, tools="hermse")
