"""/v1/messages, as Anthropic's client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Generator
from typing import Any

import anthropic
import httpx
import pytest

from pellucid.server.anthropic import ENDING
from pellucid.server.errors import AnswerFailedError, ApiError, error_response
from pellucid.server.protocol.anthropic import CountRequest, MessagesRequest
from pellucid.server.protocol.openai import ChatRequest
from tests.server.conftest import Running

WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
    },
}
PARIS = [{"role": "user", "content": "What's the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 47+85?"}]
SCREENSHOT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def test_tools_of_servers_are_refused(server: Running) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {"max_tokens": 9, "messages": SUM, "tools": [search]}
    answer = httpx.post(f"{server.url}/v1/messages", json=body)
    assert answer.status_code == 400
    assert "runs no tools of its own, such as 'web_search_20250305'" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def claude(server: Running) -> Generator[anthropic.Anthropic, None, None]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def wish(messages: Any, options: dict[str, Any]) -> Any:
    """What every request here asks for.  The client's newer versions know no temperature."""
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    return {"model": "sprout", "max_tokens": 300, "messages": messages, "extra_body": extra, **options}


def ask(client: anthropic.Anthropic, messages: Any, **options: Any) -> Any:
    return client.messages.create(**wish(messages, options))


def streamed(client: anthropic.Anthropic, messages: Any, **options: Any) -> tuple[list[Any], Any]:
    with client.messages.stream(**wish(messages, options)) as stream:
        return list(stream), stream.get_final_message()


def test_an_answer_is_a_message(claude: anthropic.Anthropic) -> None:
    message = ask(claude, SUM, system="You are terse.")
    (block,) = message.content
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    assert block.type == "text" and block.text == "132"
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.output_tokens > 0
    counted = claude.messages.count_tokens(model="sprout", messages=SUM, system="You are terse.")  # type: ignore[arg-type]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_models_are_listed(claude: anthropic.Anthropic) -> None:
    (model,) = claude.models.list().data
    assert (model.id, model.display_name, model.type) == ("sprout", "sprout", "model")
    assert claude.models.retrieve("sprout") == model and model.created_at is not None


def test_what_claude_code_says_to_anthropics_accounts_is_no_part_of_the_prompt(
    claude: anthropic.Anthropic,
) -> None:
    terse: Any = {"type": "text", "text": "You are terse."}
    billing: Any = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cch=36ee5;"}

    def count(**options: Any) -> int:
        return claude.messages.count_tokens(model="sprout", messages=SUM, **options).input_tokens  # type: ignore[arg-type]

    assert count(system=[billing, terse]) == count(system=[terse])
    assert count(system=[billing]) == count()


def test_a_context_may_be_managed_by_leaving_it(claude: anthropic.Anthropic) -> None:
    def managed(keep: object) -> Any:
        edit = {"type": "clear_thinking_20251015", "keep": keep}
        body = {"context_management": {"edits": [edit]}}
        return claude.messages.create(model="sprout", max_tokens=1, messages=SUM, extra_body=body)

    assert managed("all").type == "message", "as Claude Code says"
    with pytest.raises(anthropic.BadRequestError, match="context_management is not supported"):
        managed({"type": "thinking_turns", "value": 1})


def test_what_is_obeyed_or_refused_is_not_said_to_be_ignored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.server.protocol.openai._ignored", set())
    wish = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    CountRequest.model_validate({"messages": PARIS, "output_config": wish})
    MessagesRequest.model_validate({"messages": PARIS, "output_config": wish, "max_tokens": 1})
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    CountRequest.model_validate({"messages": [*PARIS, {"role": "assistant", "content": [thought]}]})
    ChatRequest.model_validate({"messages": PARIS, "guided_regex": "a", "ebnf": "b"})
    assert caplog.messages == []


def test_a_stream_joins_to_the_whole(claude: anthropic.Anthropic) -> None:
    whole = ask(claude, SUM, thinking=THINKING)
    events, final = streamed(claude, SUM, thinking=THINKING)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0] == whole.content[0] and final.content[1].text == whole.content[1].text
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in events if event.type.startswith(("message", "content"))]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_events_are_named_and_a_ping_comes_early(server: Running) -> None:
    body = {"model": "sprout", "max_tokens": 4, "stream": True, "messages": SUM}
    lines = httpx.post(f"{server.url}/v1/messages", json=body).text.split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert all(f'{{"type":"{name}"' in lines[lines.index(f"event: {name}") + 1] for name in names)
    assert "[DONE]" not in lines[-3]


def test_without_a_wish_there_is_no_thinking(claude: anthropic.Anthropic) -> None:
    assert [block.type for block in ask(claude, SUM).content] == ["text"]
    assert [block.type for block in ask(claude, SUM, thinking={"type": "disabled"}).content] == ["text"]


def test_a_tool_is_used_and_its_result_goes_back(claude: anthropic.Anthropic) -> None:
    whole = ask(claude, PARIS, tools=[WEATHER])
    (call,) = whole.content
    assert call.type == "tool_use" and call.name == "get_weather" and call.input == {"city": "Paris"}
    assert whole.stop_reason == "tool_use"
    events, final = streamed(claude, PARIS, tools=[WEATHER])
    assert final.content[0].input == call.input and final.stop_reason == "tool_use"
    assert sum(event.type == "input_json" for event in events) > 1
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": '{"temperature": 18, "condition": "sunny"}',
    }
    messages = [
        *PARIS,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    (answer,) = ask(claude, messages, tools=[WEATHER]).content
    assert answer.type == "text" and "18" in answer.text


@pytest.mark.parametrize(
    "choice,is_called",
    [
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "get_weather"}, True),
        ({"type": "auto"}, True),
        ({"type": "none"}, False),
    ],
)
def test_a_call_may_be_demanded_or_forbidden(
    claude: anthropic.Anthropic, choice: Any, is_called: bool
) -> None:
    kinds = [block.type for block in ask(claude, PARIS, tools=[WEATHER], tool_choice=choice).content]
    assert ("tool_use" in kinds) == is_called


def test_a_strict_tool_is_used_by_its_schema(claude: anthropic.Anthropic) -> None:
    city = {"type": "string", "description": "Name of the city", "enum": ["London", "Rome"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    (use,) = ask(claude, PARIS, tools=[{**WEATHER, "input_schema": schema, "strict": True}]).content
    assert use.type == "tool_use" and use.input["city"] in ("London", "Rome")


def test_lengths_and_stop_sequences_end_answers(claude: anthropic.Anthropic) -> None:
    assert ask(claude, SUM, max_tokens=1).stop_reason == "max_tokens"
    message = ask(claude, SUM, stop_sequences=["3", "zzz"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "3")
    assert message.content[0].text == "1"


def test_an_answer_may_be_begun(claude: anthropic.Anthropic) -> None:
    message = ask(claude, [*SUM, {"role": "assistant", "content": "13"}], extra_body={"top_k": 1})
    assert message.content[0].text == "2"


def test_a_call_that_is_cut_off_has_no_input(claude: anthropic.Anthropic) -> None:
    message = ask(claude, PARIS, tools=[WEATHER], max_tokens=14)
    assert message.stop_reason == "max_tokens"
    assert [block.input for block in message.content if block.type == "tool_use"] in ([], [{}])


def test_parts_of_every_kind_are_understood(claude: anthropic.Anthropic) -> None:
    cached = {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Paris"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "18"}]},
            {"type": "tool_result", "tool_use_id": "a", "is_error": True},
            {"type": "text", "text": "What is 47+85?"},
        ]},
    ]  # fmt: skip
    assert ask(claude, messages, system=[cached], tools=[WEATHER], max_tokens=4).content


@pytest.mark.parametrize(
    "options,message",
    [
        ({"messages": []}, "messages: "),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"temperature": -1}}, "temperature is -1"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only parts"),
        ({"messages": [{"role": "user", "content": [SCREENSHOT]}]}, "tool_result.content.parts.0.type: "),
        ({"system": [{"type": "image", "source": {}}]}, "system.parts.0.type: Input should be 'text'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'required', which needs tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "needs a name"),
        ({"stop_sequences": [""]}, "stop_sequences contains an empty string"),
        ({"extra_body": {"mcp_servers": [{"url": "http://a"}]}}, "mcp_servers is not supported"),
        ({"extra_body": {"n": 2}}, "n is not supported: one answer is made"),
        ({"extra_body": {"stop": ["a"]}}, "stop is not supported: say stop_sequences"),
        ({"extra_body": {"seed": 0}}, "seed is not supported"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "response_format is not supported"),
        ({"extra_body": {"logit_bias": {"5": 1}}}, "logit_bias is not supported"),
        ({"extra_body": {"max_completion_tokens": 5}}, "max_completion_tokens is not supported"),
        ({"extra_body": {"container": "a"}}, "container is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "'thinking'"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_body(claude: anthropic.Anthropic, options: Any, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, **{"messages": SUM, **options})
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]


def test_a_stream_that_fails_says_so() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"event: ping\n\n"
        raise AnswerFailedError("the engine has died")

    async def whole() -> list[bytes]:
        return [chunk async for chunk in ENDING.mended(events())]

    error = b'{"type":"error","error":{"type":"api_error","message":"the engine has died"}}'
    assert asyncio.run(whole()) == [b"event: ping\n\n", b"event: error\ndata: " + error + b"\n\n"]


@pytest.mark.parametrize("status,kind", [(401, "authentication_error"), (503, "overloaded_error")])
def test_the_servers_refusals_have_it_too(status: int, kind: str) -> None:
    response = error_response("/v1/messages", ApiError(status, "no"))
    assert json.loads(bytes(response.body)) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert (
        json.loads(bytes(error_response("/v1/models", ApiError(status, "no")).body))["error"]["code"]
        == status
    )


def test_an_unknown_model_is_not_found(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(claude, SUM, model="gpt")
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"
