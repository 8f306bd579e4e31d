"""What each family's models write, in their own form: calls and thoughts are found, whole, cut and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pellucid.sampling_params import SamplingParams
from pellucid.server.options import ServeOptions
from pellucid.server.parsers.base import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Content,
    ParserSetting,
    ToolCallStart,
    reasoning_parser,
    tool_parser,
)
from pellucid.server.parsers.compose import Parsers, choose
from pellucid.server.parsers.pythonic import MOST_IN_VAIN, PythonicParser
from pellucid.server.renderer import ModelFacts, Renderer
from pellucid.server.tools import ToolUse, forced_calls, strict_calls
from pellucid.text.tokenizer import Tokenizer
from tests.server.parsers.test_parsers import fed, read
from tests.tiny import write_checkpoint

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "places": {"type": "array"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
)
PARIS = [("call", "weather"), ("arguments", '{"city": "Paris", "days": 2}')]
TIME = [("call", "time"), ("arguments", "{}")]
LOOK = [("content", "I look.")]
JSON = '{"city": "Paris", "days": 2}'

# Name of the tool parser, what comes before calls, one call with `weather`, one with `time`, between, behind.
FORMS = {
    "hermes": (
        "", f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', "\n", "",
    ),
    "mistral": ("", f"[TOOL_CALLS]weather[ARGS]{JSON}", "[TOOL_CALLS]time[ARGS]{}", "", ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>",
        "\n", "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>",
    ),
    "qwen3_coder": (
        "",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=time>\n</function>\n</tool_call>", "\n", "",
    ),
    "glm45": (
        "",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "<tool_call>time\n</tool_call>", "\n", "",
    ),
    "granite": (
        "<|tool_call|>[", f'{{"name": "weather", "arguments": {JSON}}}', '{"name": "time", "arguments": {}}',
        ", ", "]",
    ),
    "phi4_mini_json": (
        "functools[", f'{{"name": "weather", "arguments": {JSON}}}', '{"name": "time", "arguments": {}}',
        ", ", "]",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
        "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "", "<|tool_calls_section_end|>",
    ),
    "minimax_m2": (
        "<minimax:tool_call>\n",
        '<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n',
        '<invoke name="time">\n</invoke>\n', "", "</minimax:tool_call>",
    ),
}  # fmt: skip
ALL_TAGS = sorted({part for form in FORMS.values() for part in form if part})
SIGNS = ["<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:", "Here is my response:",
         "<|channel|>", "analysis", "commentary", "final", "<|message|>", "<|end|>", "<|start|>assistant",
         " to=functions.weather", "to=", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "\n[", "\n{",
         "weather(", "city='", '"name": "weather"', "parameters", "'", '"', "{", "}", "[", "]", ")", ",", ":",
         "\n", " ", "\\", "<",
         "{'name': 'weather', 'arguments': {'city': 'Paris'}}", "</arg_key>", "<arg_value>", "</parameter\n",
         "<function=weather", "x" * 130]  # fmt: skip


def found(parser: str, text: str, **setting: object) -> list[tuple[str, ...]]:
    return read(Parsers(tools=parser), text, **{"tools": TOOLS, **setting})


@pytest.mark.parametrize("parser", FORMS)
def test_calls_are_found(parser: str) -> None:
    opening, weather, time, between, closing = FORMS[parser]
    assert found(parser, f"{opening}{weather}{closing}") == PARIS
    assert found(parser, f"I look.\n\n{opening}{weather}{between}{time}{closing}\n") == [*LOOK, *PARIS, *TIME]
    text = f"{opening}{weather}{between}{weather}{closing}"
    assert found(parser, text) == PARIS * 2
    assert found(parser, text, is_parallel=False) == PARIS
    assert found(parser, "No tool: <, [ and { are signs.") == [("content", "No tool: <, [ and { are signs.")]


# Texts that each mean PARIS, as models write them that do not keep to their templates.
VARIANTS = [
    ("openai", f"<|channel|>analysis to=functions.weather code<|message|>{JSON}<|call|>"),
    (
        "openai",
        f"<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|> json<|message|>\n{JSON}",
    ),
    (
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">\nParis\n</parameter>'
        '<parameter name="days">2</parameter></invoke></minimax:tool_call>',
    ),
    (
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name=weather>\n<parameter name='city'>Paris</parameter>\n"
        "<parameter name='days'>2</parameter>\n</invoke>\n",
    ),
    ("mistral", f'[TOOL_CALLS] [{{"arguments": {JSON}, "name": "weather"}}]'),
    ("mistral", f"[TOOL_CALLS]weather{JSON}"),
    (
        "kimi_k2",
        "<|tool_call_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_section_end|>",
    ),
    (
        "kimi_k2",
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|> <|tool_call_begin|> weather:0 <|tool_call_argument_begin|> "
        f"{JSON} <|tool_call_end|>",
    ),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}",
    ),
    ("deepseek_v31", f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"),
    ("llama3_json", f'{{"type": "function", "name": "weather", "parameters": {JSON}}}'),
    ("llama3_json", f'{{"name": "weather", "parameters": {json.dumps(JSON)}}}'),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(JSON)}}}</tool_call>'),
    ("granite", f'<tool_call>[{{"name": "weather", "arguments": {JSON}}}]'),
    ("granite", f'<|tool_call|> [{{"arguments": {JSON}, "name": "weather"}}]'),
    ("phi4_mini_json", f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}]<|/tool_call|>'),
    (
        "qwen3_coder",
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>2</parameter>"
        "</function></tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n</function>\n</tool_call>",
    ),
]


@pytest.mark.parametrize(("parser", "text"), VARIANTS)
def test_models_do_not_always_keep_to_their_templates(parser: str, text: str) -> None:
    assert found(parser, text) == PARIS


def test_no_arguments_may_be_null() -> None:
    assert found("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>') == TIME


@pytest.mark.parametrize("parser", FORMS)
def test_a_call_cut_anywhere_is_its_beginning(parser: str) -> None:
    """Content, until it is sure that it is a call; then as much of its arguments as there is."""
    opening, weather, _, _, closing = FORMS[parser]
    text = f"{opening}{weather}{closing}"
    for length in range(1, len(text)):
        events = found(parser, text[:length])
        if events[0][0] == "content":
            assert len(events) == 1 and text.startswith(events[0][1].strip())
        else:
            arguments = "".join(text for kind, text in events if kind == "arguments")
            assert events[0] == PARIS[0] and JSON.startswith(arguments), (text[:length], events)
    assert all(
        kind != "content"
        for length in range(len(text))
        for kind, _ in found(parser, text[:length], is_forced=True)
    )


@pytest.mark.parametrize("parser", FORMS)
def test_what_is_no_call_stays_in_the_text(parser: str) -> None:
    opening, weather, _, _, closing = FORMS[parser]
    is_object = '"name": ' in weather
    replaced = ('"name": ', '"what is this?": ') if is_object else ("weather", "what is this?")
    broken = f"{opening}{weather}{closing}".replace(*replaced)
    events = found(parser, f"So: {broken} and so on")
    assert [kind for kind, _ in events] == ["content"] and events[0][1].startswith("So: ")
    assert "what is this?" in events[0][1] and events[0][1].endswith("and so on")
    assert found(parser, f"{opening or weather[:8]} ...")[0][0] == "content"


def test_calls_that_never_end_are_read_up_to_a_bound() -> None:
    """Each would be read to the end of the text."""
    text = "\n[weather(city='Paris'" * 2000
    parser = PythonicParser(ParserSetting(tools=TOOLS))
    assert fed(parser, [text]) == [("content", text)]
    assert 0 < parser._num_in_vain < MOST_IN_VAIN + len(text)


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 36}', 'So:\n{"name": "weather", "version": "1.0"}'])
def test_data_that_has_a_name_is_no_call(text: str) -> None:
    assert found("llama3_json", text) == [("content", text)]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("pythonic", "So:\n[other(city='Paris')] it is"),
        ("pythonic", "So:\n[ 1, 2\nand so on"),
        ("llama3_json", "So:\n{ x = 1\nand so on"),
    ],
)
def test_a_bracket_that_begins_no_call_holds_nothing_up(parser: str, text: str) -> None:
    events = Parsers(tools=parser).make(ParserSetting(tools=TOOLS)).feed(text)
    assert "".join(event.text for event in events if isinstance(event, Content)) == text


@given(
    st.lists(
        st.one_of(st.sampled_from(ALL_TAGS + SIGNS), st.sampled_from(SIGNS), st.text(max_size=3)), max_size=10
    ),
    st.data(),
)
def test_every_cut_says_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    parsers = Parsers(
        data.draw(st.sampled_from(sorted(REASONING_PARSERS))),
        data.draw(st.sampled_from(sorted(TOOL_PARSERS))),
    )
    setting = ParserSetting(tools=TOOLS, is_forced=data.draw(st.booleans()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = fed(parsers.make(setting), [text])
    assert fed(parsers.make(setting), pieces) == whole
    assert fed(parsers.make(setting), list(text)) == whole


@given(st.sampled_from(sorted(FORMS)), st.text(max_size=8))
def test_texts_in_arguments_are_as_they_are_written(parser: str, value: str) -> None:
    """But for the white space and the tags that XML cannot tell from its own."""
    if any(sign in value for sign in "<[\n") or "\ud800" in value:
        return
    opening, weather, _, _, closing = FORMS[parser]
    is_json = '"city": ' in weather
    text = f"{opening}{weather}{closing}".replace("Paris", json.dumps(value)[1:-1] if is_json else value)
    (_, name), (_, arguments) = found(parser, text)
    assert name == "weather" and json.loads(arguments) == {"city": value, "days": 2}


def test_mistrals_models_have_written_calls_in_three_ways() -> None:
    older = (
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}, {{"name": "time", "arguments": {{}}}}]'
    )
    assert found("mistral", older) == [*PARIS, *TIME]
    with_id = f"[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{JSON}"
    (start, *_) = Parsers(tools="mistral").make(ParserSetting(tools=TOOLS)).feed(with_id)
    assert start.id == "abcdef123"  # type: ignore[union-attr]
    (start, *_) = Parsers(tools="mistral").make(ParserSetting(tools=TOOLS)).feed(FORMS["mistral"][1])
    assert len(start.id) == 9 and start.id.isalnum()  # type: ignore[union-attr]


def test_kimis_calls_keep_their_names() -> None:
    opening, weather, time, _, closing = FORMS["kimi_k2"]
    parser = Parsers(tools="kimi_k2").make(ParserSetting(tools=TOOLS))
    events = parser.feed(opening + weather + time + weather + closing)
    ids = [event.id for event in events if isinstance(event, ToolCallStart)]
    assert ids == ["functions.weather:0", "functions.time:1", "functions.weather:1"]
    nameless = opening + weather.replace("functions.weather:0", "0") + closing
    assert found("kimi_k2", nameless, tools=TOOLS[:1]) == PARIS
    assert found("kimi_k2", nameless)[0][0] == "content", "which of the two is not said"


@pytest.mark.parametrize("parser", ["pythonic", "llama4_pythonic"])
def test_calls_may_be_pythons(parser: str) -> None:
    assert found(parser, '[weather(city="Paris", days=2), time()]') == [*PARIS, *TIME]
    assert found(parser, "<|python_start|>[weather(city='Paris', days=2)]<|python_end|>") == PARIS
    nested = found(parser, '[weather(city="a ) \\" ]", places=[{"x": [1, -2.5]}], exact=True, units=null)]')
    value = {"city": 'a ) " ]', "places": [{"x": [1, -2.5]}], "exact": True, "units": None}
    assert json.loads(nested[1][1]) == value
    for text in (
        "[1, 2]",
        "[x]",
        "[weather(1)]",
        "[f(**x)]",
        "[f(a=open('x'))]",
        "[a citation] says",
        "[f(x=",
    ):
        assert found(parser, text) == [("content", text)]
    assert found(parser, "[time(), time(1)]")[:2] == TIME


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45", "minimax_m2"])
@pytest.mark.parametrize(
    "name,text,value",
    [
        ("city", "007", "007"),
        ("city", '{"a": 1}', '{"a": 1}'),
        ("city", 'say "hi" \\ now', 'say "hi" \\ now'),
        ("days", "7", 7),
        ("days", "seven", "seven"),
        ("exact", "True", True),
        ("exact", "false", False),
        ("units", "null", None),
        ("units", "metric", "metric"),
        ("places", '[{"a": [1]}]', [{"a": [1]}]),
        ("places", "['a']", ["a"]),
        ("other", "12", 12),
        ("other", "twelve", "twelve"),
        ("other", "NaN", "NaN"),
    ],
)
def test_schemas_say_what_plain_text_means(parser: str, name: str, text: str, value: object) -> None:
    call = FORMS[parser][0] + FORMS[parser][1].replace("city", name).replace("Paris", text)
    arguments = json.loads(found(parser, call)[1][1])
    assert arguments[name] == (2 if name == "days" else value) or name == "days"
    if name == "days":  # which comes twice, and the last one counts
        assert arguments == {"days": 2}
    else:
        assert type(arguments[name]) is type(value)


def test_a_file_is_streamed_while_it_is_written() -> None:
    parser = Parsers(tools="qwen3_coder").make(ParserSetting(tools=TOOLS))
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\nline one")
    events = parser.feed('\n"line" two\n')
    assert "".join(event.text for event in events) == '\\n\\"line\\" two'  # type: ignore[union-attr]
    more = parser.feed("</parameter>\n</function>\n</tool_call>")
    assert "".join(event.text for event in more) == '"}'  # type: ignore[union-attr]


GPT_OSS = Parsers("openai_gptoss", "openai")
ANALYSIS = "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + JSON
THOUGHT = [("reasoning", "The user asks.")]


@pytest.mark.parametrize("parsers", [GPT_OSS, Parsers("openai_gptoss"), Parsers("plain", "openai")])
def test_gpt_oss_speaks_on_channels(parsers: Parsers) -> None:
    final = "<|channel|>final<|message|>It is\n 5 < 6."
    assert read(parsers, ANALYSIS + final, tools=TOOLS) == [*THOUGHT, ("content", "It is\n 5 < 6.")]
    assert read(parsers, final + "<|return|>", tools=TOOLS) == [("content", "It is\n 5 < 6.")]
    assert read(parsers, "Plain words.", tools=TOOLS) == [("content", "Plain words.")]
    assert read(parsers, ANALYSIS[:40], tools=TOOLS) == [("reasoning", ANALYSIS[30:40])]
    assert read(parsers, ANALYSIS + CALL, tools=TOOLS) == [*THOUGHT, *PARIS]
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    other_order = f" to=functions.weather<|channel|>commentary json<|message|>{JSON}<|call|>"
    assert read(parsers, preamble + other_order, tools=TOOLS) == [*LOOK, *PARIS]
    python = "<|channel|>commentary to=python code<|message|>1+1<|end|>"
    assert read(parsers, python, tools=TOOLS) == [("reasoning", "1+1")]


def test_gpt_oss_calls_nothing_where_there_is_nothing_to_call() -> None:
    assert read(GPT_OSS, ANALYSIS + CALL, tools=()) == [*THOUGHT, ("content", JSON)]
    both = CALL + "<|call|><|start|>assistant" + CALL
    assert read(GPT_OSS, both, tools=TOOLS) == PARIS * 2
    assert read(GPT_OSS, both, tools=TOOLS, is_parallel=False) == PARIS


@pytest.mark.parametrize(
    "text",
    [
        "Here is my thought process:\nHm.\n\nHere is my response:\nFour.",
        "Here's my thought process: Hm. Here's my response: Four.",
        "<think>Hm.</think>\n<response>Four.</response>",
    ],
)
def test_granite_announces_what_it_thinks(text: str) -> None:
    granite = Parsers("granite", "granite")
    assert read(granite, text) == [("reasoning", "Hm."), ("content", "Four.")]
    assert read(granite, "Here is my answer: four.") == [("content", "Here is my answer: four.")]
    call = FORMS["granite"][0] + FORMS["granite"][1] + "]"
    assert read(granite, text[: text.rindex("Four")] + call, tools=TOOLS) == [("reasoning", "Hm."), *PARIS]


@pytest.mark.parametrize(
    "name", ["deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "qwen3", "mistral"]
)
def test_thoughts_are_between_tags(name: str) -> None:
    start, end = ("[THINK]", "[/THINK]") if name == "mistral" else ("<think>", "</think>")
    parsers, answer = Parsers(name), [("reasoning", "Hm.\nSo"), ("content", "Four.")]
    assert read(parsers, f"{start}Hm.\nSo{end}Four.") == answer
    assert read(parsers, f"Hm.\nSo\n{end}\n\nFour.", prompt=f"<bot>{start}\n") == answer
    assert read(parsers, f"{start}Hm.") == [("reasoning", "Hm.")]
    assert parsers.thinking == (start, end)


@pytest.mark.parametrize(
    "template,reasoning,tools",
    [
        ("<|start|>assistant<|channel|>analysis<|message|> to=functions. ", "openai_gptoss", "openai"),
        ("[INST] [TOOL_CALLS] [ARGS]", "plain", "mistral"),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral", "mistral"),
        ("<think> </think> <｜tool▁calls▁begin｜> function ```json", "qwen3", "deepseek_v3"),
        ("<think> </think> <｜tool▁calls▁begin｜>", "qwen3", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "plain", "kimi_k2"),
        ("]~b]ai <think> </think> <minimax:tool_call>", "qwen3", "minimax_m2"),
        ("<tool_call> <function=example>", "plain", "qwen3_coder"),
        ("<think></think> <tool_call>{name} <arg_key>", "qwen3", "glm45"),
        ("<|start_of_role|> Here is my thought process: <|tool_call|>", "granite", "granite"),
        ("<|start_of_role|> <tool_call>", "plain", "hermes"),
        ("<|system|> <|tool|> <|/tool|>", "plain", "phi4_mini_json"),
        ("[func_name1(params_name1=...)] <|eot|>", "plain", "llama4_pythonic"),
    ],
)  # fmt: skip
def test_templates_show_which_parsers_are_needed(template: str, reasoning: str, tools: str) -> None:
    assert choose(template) == Parsers(reasoning, tools)


def test_every_name_is_a_parser() -> None:
    for name in REASONING_PARSERS:
        assert reasoning_parser(name)(ParserSetting()).feed("") == []
    for name in TOOL_PARSERS:
        assert tool_parser(name)(ParserSetting()).feed("") == []


OWN = """
from pellucid.server.parsers.script import ScriptParser

class Shout(ScriptParser):
    tags, frame, keeps = None, None, ()

    def __init__(self, setting):
        super().__init__()

    def read(self):
        while (yield from self._until("CALL!")):
            name, _ = yield from self._head("!")
            self._start(name)
            yield from self._arguments()
"""


def test_a_parser_may_be_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    parsers = choose(None, tools=f"{file}:Shout")
    assert read(parsers, "Well. CALL!time!{}", tools=TOOLS) == [("content", "Well."), *TIME]
    with pytest.raises(ValueError, match="the file has no 'Whisper'"):
        choose(None, tools=f"{file}:Whisper")
    with pytest.raises(ValueError, match="is no file"):
        choose(None, reasoning=f"{tmp_path}/other.py:Shout")


def structural_tag(parser: str, choice: str, *, strict: bool = False, parallel: bool = True) -> str:
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": strict}}, TOOLS[1]]
    use = ToolUse.from_request(tools, choice, parallel_tool_calls=parallel)
    tag = strict_calls(use, parser) if strict else forced_calls(use, parser)
    assert tag is not None
    return tag


def accepts(spec: str, text: str) -> bool:
    """Does xgrammar let this text pass, and end?"""
    xgrammar = pytest.importorskip("xgrammar")
    return xgrammar.testing._is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(spec), text)


@pytest.mark.parametrize("parser", FORMS)
def test_calls_are_forced_in_the_models_own_form(parser: str) -> None:
    opening, weather, time, between, closing = FORMS[parser]
    if parser == "kimi_k2":
        time = time.replace(":1", ":0")
    if parser in ("qwen3_coder", "glm45"):  # xgrammar has a line break for no arguments, too
        time = time.replace("time>\n", "time>\n\n").replace("time\n", "time\n\n")
    spec = structural_tag(parser, "required")
    one, two = f"{opening}{weather}{closing}", f"{opening}{weather}{between}{time}{closing}"
    assert accepts(spec, one) and accepts(spec, two)
    assert found(parser, one) == PARIS and found(parser, two) == [*PARIS, *TIME]
    for text in ("", "It is sunny.", one.replace("weather", "whether"), one.replace("days", "nights")):
        assert not accepts(spec, text) or "nights" in text  # schemas may allow more keys
    assert not accepts(structural_tag(parser, "required", parallel=False), two)


HEADS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
)
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("before", ["", ANALYSIS, ANALYSIS + PREAMBLE])
def test_gpt_oss_is_held_to_a_call_behind_what_it_thinks(head: str, before: str) -> None:
    weather, time = head.format("weather") + JSON, head.format("time") + "{}"
    forced, strict = structural_tag("openai", "required"), structural_tag("openai", "auto", strict=True)
    final = "<|channel|>final<|message|>It is <sunny>."
    assert accepts(forced, before + weather) and accepts(forced, before + time)
    assert read(GPT_OSS, before + weather, tools=TOOLS, is_forced=True)[-2:] == PARIS
    assert not accepts(structural_tag("openai", "weather"), before + time)
    assert accepts(strict, before + weather) and accepts(strict, before + final)
    again = f"<|call|><|start|>assistant{weather}"
    for text in ("", final, "It is.", weather + again, weather.replace("weather", "whether")):
        assert not accepts(forced, before + text), text
    for text in ("It is.", weather.replace("2", '"2"'), f"{final}<|end|><|start|>assistant{weather}"):
        assert not accepts(strict, before + text), text


def test_calls_of_pythons_form_are_held_to_their_schemas() -> None:
    forced, strict = structural_tag("pythonic", "required"), structural_tag("pythonic", "auto", strict=True)
    for text in (
        "[time()]",
        '[weather(city="Paris", days=2), time()]',
        '[weather(days=2, places=[{"x": 1}], exact=True)]',
        "[weather(units=null)]",
        "[weather()]",
    ):
        assert accepts(forced, text) and accepts(strict, text), text
        assert [kind for kind, _ in found("pythonic", text)].count("call") == 1 + (", time" in text)
    for text in ("[weather(days=2.5)]", "[weather(exact=true)]", '[whether(city="a")]', "[weather(2)]"):
        assert not accepts(forced, text) and not accepts(strict, text), text
    for text in ("It is [sunny].", "", "<", "< 5", " <b>"):
        assert accepts(strict, text) and not accepts(forced, text)
    assert not accepts(strict, "<|python_start|>[weather(days=2.5)]")
    assert not accepts(structural_tag("pythonic", "required", parallel=False), "[time(), time()]")
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {}}, "required": ["b", "a"],
              "$defs": {"n": {"type": "integer"}}}  # fmt: skip
    use = ToolUse.from_request(
        [{"type": "function", "function": {"name": "f", "parameters": schema}}], "f", parallel_tool_calls=None
    )
    spec = forced_calls(use, "llama4_pythonic") or ""
    assert (
        accepts(spec, '[f(b="x", a=1)]')
        and not accepts(spec, "[f(b=1)]")
        and not accepts(spec, "[f(b=1, a={})]")
    )
    schema["required"] = schema["properties"]["from"] = ["from"]  # type: ignore[index]
    with pytest.raises(ValueError, match="f requires 'from'.*rename it"):
        forced_calls(use, "pythonic")


def test_halves_of_letters_are_joined() -> None:
    smile = found("pythonic", r'[weather(city="\ud83d\ude00 \ud83d")]')
    assert smile == [("call", "weather"), ("arguments", '{"city": "\U0001f600 \ufffd"}')]


@pytest.mark.parametrize("parser", FORMS)
def test_a_strict_call_is_of_its_schema(parser: str) -> None:
    opening, weather, _, _, closing = FORMS[parser]
    spec, call = structural_tag(parser, "auto", strict=True), f"{opening}{weather}{closing}"
    assert accepts(spec, "It is sunny.") and accepts(spec, call) and accepts(spec, f"I look.\n{call}")
    assert not accepts(spec, call.replace("weather", "whether"))
    wrong = call.replace("2", "two") if '"days": 2' not in call else call.replace('"days": 2', '"days": "2"')
    assert not accepts(spec, wrong), wrong


@pytest.mark.parametrize("tools,is_shown", [("mistral", True), ("hermes", False)])
def test_special_tokens_that_are_markup_are_left_in_the_text(
    tmp_path: Path, tools: str, is_shown: bool
) -> None:
    write_checkpoint(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(["[TOOL_CALLS]"])
    library.save(str(tmp_path / "tokenizer.json"))
    facts = ModelFacts(
        names=("m",), options=ServeOptions(), tokenizer_path=tmp_path, vocab_size=999, max_model_len=99,
        parsers=Parsers(tools=tools), defaults=SamplingParams(),
    )  # fmt: skip
    assert Renderer(facts, Tokenizer.load(tmp_path)).shows_special_tokens is is_shown
