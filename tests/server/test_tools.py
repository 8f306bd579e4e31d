# The official client types messages more strictly than tests write them.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""Tools and reasoning over HTTP, as OpenAI's client sees them; and what a forced call must look like."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from pellucid.server.parsers.base import (
    TOOL_PARSERS,
    Content,
    ParserSetting,
    PlainParser,
    ToolCallStart,
)
from pellucid.server.parsers.compose import Parsers
from pellucid.server.tools import ToolUse, forced_calls, strict_calls
from tests.server.conftest import Running

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
MESSAGES = [{"role": "user", "content": "What's the weather in Paris?"}]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **options: Any) -> Any:
    options = {"model": "sprout", "temperature": 0, "max_tokens": 300, "extra_body": QUIET, **options}
    return client.chat.completions.create(messages=messages, **options)


def test_what_a_parser_finds_is_counted(server: Running, client: openai.OpenAI) -> None:
    def count(mode: str, outcome: str) -> float:
        name = "vllm:tool_call_parser_invocations_total"
        return server.metric(name, mode=mode, outcome=outcome, request_type="chat_completions")

    modes = ("non_streaming", "streaming")
    before = {mode: count(mode, "tool_call") for mode in modes}
    silent = count("non_streaming", "no_tool_call")
    chat(client, tools=[WEATHER], n=2)
    assert count("non_streaming", "tool_call") == before["non_streaming"] + 2
    chat(client, tools=[WEATHER], max_tokens=1)
    assert count("non_streaming", "no_tool_call") == silent + 1
    chat(client)
    assert count("non_streaming", "no_tool_call") == silent + 1, "nothing was looked for"
    list(chat(client, tools=[WEATHER], stream=True))
    assert count("streaming", "tool_call") > before["streaming"]


@pytest.fixture(scope="module")
def called(client: openai.OpenAI) -> Any:
    return chat(client, tools=[WEATHER]).choices[0]


def test_a_call_is_told_from_content(called: Any) -> None:
    (call,) = called.message.tool_calls
    assert call.id.startswith("call_") and call.type == "function"
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    assert called.finish_reason == "tool_calls" and called.message.content is None


def test_a_streamed_call_joins_to_the_whole(client: openai.OpenAI, called: Any) -> None:
    with client.chat.completions.stream(
        model="sprout", messages=MESSAGES, tools=[WEATHER], temperature=0, extra_body=QUIET
    ) as stream:  # type: ignore[arg-type]
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function.name == "get_weather" and deltas[0].index == 0
    assert len(deltas) > 2 and all(delta.id is None for delta in deltas[1:])
    assert final.message.tool_calls[0].function.arguments == called.message.tool_calls[0].function.arguments
    assert final.finish_reason == "tool_calls" and not final.message.content


def test_a_result_goes_back(client: openai.OpenAI, called: Any) -> None:
    messages = [
        *MESSAGES,
        called.message.to_dict(),
        {"role": "tool", "tool_call_id": called.message.tool_calls[0].id,
         "content": '{"temperature": 18, "condition": "sunny"}'},
    ]  # fmt: skip
    answer = chat(client, messages, tools=[WEATHER]).choices[0]
    assert "18" in answer.message.content and answer.finish_reason == "stop"


ALLOWED = [{"type": "function", "function": {"name": "get_weather"}}]
DEMANDS = [
    "required",
    {"type": "function", "function": {"name": "get_weather"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": ALLOWED}},
]


@pytest.mark.parametrize("choice", DEMANDS)
def test_a_call_may_be_demanded(client: openai.OpenAI, choice: Any) -> None:
    answer = chat(client, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("num_tokens", [1, 4, 10])
def test_a_demanded_call_that_was_cut_off_leaves_no_markup(
    client: openai.OpenAI, choice: Any, num_tokens: int
) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": num_tokens}
    whole = chat(client, **options).choices[0]
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("", None, "length")
    chunks = [chunk.choices[0] for chunk in chat(client, **options, stream=True)]
    assert not any(chunk.delta.content or chunk.delta.tool_calls for chunk in chunks)
    assert chunks[-1].finish_reason == "length"


def test_tools_may_be_forbidden(client: openai.OpenAI) -> None:
    answer = chat(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert answer.message.tool_calls is None and answer.finish_reason == "stop"


def test_thinking_has_fields_of_its_own(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is 47+85?"}]
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = chat(client, messages, extra_body=extra).choices[0].message
    assert whole.reasoning and whole.reasoning == whole.reasoning_content and whole.content == "132"
    stream = [chunk.choices[0].delta for chunk in chat(client, messages, extra_body=extra, stream=True)]
    assert "".join(getattr(delta, "reasoning", "") for delta in stream) == whole.reasoning
    assert "".join(delta.content or "" for delta in stream) == whole.content
    silent = chat(client, messages, extra_body={**extra, "include_reasoning": False}).choices[0].message
    assert silent.content == whole.content and not hasattr(silent, "reasoning")


@pytest.mark.parametrize(
    "options,message",
    [
        ({"tools": [{"type": "function"}]}, "tools has at 0 no function with a name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice must be auto"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice names 'f'; tools has get_weather",
        ),
        ({"tool_choice": "required"}, "tool_choice is 'required', which needs tools"),
    ],
)
def test_bad_tools_are_refused(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    body: Any = caught.value.body
    assert message in body["message"] and body["param"] == message.partition(" ")[0]


def strictly(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def use(choice: object, *, parallel: bool = True, strict: bool = False) -> ToolUse:
    weather = strictly(WEATHER) if strict else WEATHER
    return ToolUse.from_request([weather, TIME], choice, parallel_tool_calls=parallel)


def accepts(spec: str | None, text: str) -> bool:
    """Does xgrammar let this text pass, and end?"""
    xgrammar = pytest.importorskip("xgrammar")
    assert spec is not None
    grammar = xgrammar.Grammar.from_structural_tag(spec)
    return xgrammar.testing._is_grammar_accept_string(grammar, text)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
TIME_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def test_a_required_call_is_in_the_models_own_words() -> None:
    spec = forced_calls(use("required"), "hermes")
    assert accepts(spec, CALL) and accepts(spec, f"{CALL}\n{TIME_CALL}")
    assert not accepts(spec, "") and not accepts(spec, "It is sunny.")
    assert not accepts(spec, CALL.replace("city", "town")) and not accepts(spec, CALL.replace("weather", "w"))
    assert not accepts(forced_calls(use("required", parallel=False), "hermes"), f"{CALL}\n{TIME_CALL}")
    assert accepts(forced_calls(use("required"), "llama3_json"), f"{LLAMA_CALL}; {LLAMA_CALL}")


def test_a_named_function_is_called_once() -> None:
    spec = forced_calls(use({"type": "function", "function": {"name": "get_weather"}}), "hermes")
    assert accepts(spec, CALL) and not accepts(spec, TIME_CALL) and not accepts(spec, f"{CALL}\n{CALL}")


@pytest.mark.parametrize(
    "parser,call,lead,between", [("hermes", CALL, "I look.\n", "\n"), ("llama3_json", LLAMA_CALL, "", "; ")]
)
def test_a_strict_call_is_of_its_schema(parser: str, call: str, lead: str, between: str) -> None:
    spec = strict_calls(use("auto", strict=True), parser)
    other = call.replace("get_weather", "get_time")
    for text in ("", "It is sunny.", '\nAs {"name": "f"}', lead + call, f"{lead}{call}{between}{other}"):
        assert accepts(spec, text), text
    assert accepts(spec, lead + other.replace("city", "anything"))
    for text in (call.replace("city", "town"), call.replace("weather", "w"), call.replace('"Paris"', "7")):
        assert not accepts(spec, lead + text) and not accepts(spec, f"{lead}{call}{between}{text}"), text
    once = strict_calls(use("auto", strict=True, parallel=False), parser)
    assert accepts(once, lead + call) and not accepts(once, f"{lead}{call}{between}{call}")


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_forced_call_is_found_by_its_parser(name: str) -> None:
    spec = json.loads(forced_calls(use("required"), name) or "")["format"]
    texts = [tag["begin"] + '{"city": "Paris"}' + tag["end"] for tag in spec["tags"]]
    parser = Parsers(tools=name).make(ParserSetting(tools=[WEATHER, TIME]))
    events = [*parser.feed(spec["separator"].join(texts)), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["get_weather", "get_time"]
    assert not any(isinstance(event, Content) for event in events)


def test_a_free_answer_has_no_grammar() -> None:
    assert forced_calls(use("auto"), "hermes") is forced_calls(use("none"), "hermes") is None
    assert forced_calls(use("required"), "plain") is None
    assert strict_calls(use("auto"), "hermes") is strict_calls(use("none", strict=True), "hermes") is None
    assert strict_calls(use("required", strict=True), "hermes") is None, "forced, and so held already"


def test_a_server_must_know_how_calls_look() -> None:
    with pytest.raises(ValueError, match="start the server with --tool-call-parser"):
        use("auto").check_parser("plain", is_auto_enabled=True)
    with pytest.raises(ValueError, match="tool_choice 'auto' is turned off"):
        use("auto").check_parser("hermes", is_auto_enabled=False)
    use("none").check_parser("plain", is_auto_enabled=False)
    use("required").check_parser("hermes", is_auto_enabled=False)


class Frameless(PlainParser):
    """Of a convention in which nobody has said how a call is written."""


def test_a_call_that_cannot_be_forced_is_not_left_to_chance() -> None:
    TOOL_PARSERS.register("frameless", f"{__name__}:Frameless")
    use("auto").check_parser("frameless", is_auto_enabled=True)
    with pytest.raises(ValueError, match="tool_choice 'required' cannot be met.* 'frameless'.*use 'auto'"):
        use("required").check_parser("frameless", is_auto_enabled=True)
