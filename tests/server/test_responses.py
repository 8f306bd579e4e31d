"""/v1/responses, as OpenAI's client and agents built on it see it."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import msgspec
import openai
import pytest

from pellucid.sampling_params import SamplingParams
from pellucid.server.errors import ApiError
from pellucid.server.options import ServeOptions
from pellucid.server.protocol.responses import ResponsesRequest
from pellucid.server.protocol.responses_output import ResponseBody
from pellucid.server.renderer import ModelFacts, Renderer
from pellucid.server.responses import prepare
from pellucid.server.stored_responses import StoredResponse, StoredResponses
from tests.patience import PATIENCE, eventually
from tests.server.conftest import Running

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
    },
}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(client: openai.OpenAI, input: Any, **options: Any) -> Any:
    options = {"model": "sprout", "temperature": 0, "max_output_tokens": 300, "extra_body": QUIET, **options}
    return client.responses.create(input=input, **options)


def streamed(client: openai.OpenAI, input: Any, **options: Any) -> list[Any]:
    return list(ask(client, input, stream=True, **options))


def test_an_answer_is_a_response(client: openai.OpenAI) -> None:
    answer = ask(client, "What is 47+85?", instructions="You are terse.", metadata={"a": "b"})
    assert answer.output_text == "132" and answer.status == "completed" and answer.id.startswith("resp_")
    (message,) = answer.output
    assert message.type == "message" and message.role == "assistant" and message.status == "completed"
    assert answer.instructions == "You are terse." and answer.metadata == {"a": "b"}
    usage = answer.usage
    assert usage.input_tokens > 10 and usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_thinking_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    answer = ask(client, "What is 47+85?", extra_body=None, reasoning={"effort": "medium"})
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.content[0].text and message.content[0].text == "132"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    cut = ask(client, "What is 47+85?", extra_body={}, max_output_tokens=5).usage
    assert cut.output_tokens_details.reasoning_tokens == 5
    silent = ask(client, "What is 47+85?", extra_body=None, reasoning={"effort": "none"})
    assert [item.type for item in silent.output] == ["message"]


def test_a_stream_tells_all_in_order(client: openai.OpenAI) -> None:
    events = streamed(client, "What is 47+85?", extra_body=None)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    steps = [kind for i, kind in enumerate(kinds) if kind != (kinds[i - 1] if i else None)]
    assert steps == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        "completed",
    ]
    final = events[-1].response
    assert (
        final.output_text
        == "132"
        == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    )
    thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert final.output[0].content[0].text == thought and final.usage.output_tokens > 0
    assert events[0].response.status == "in_progress" and events[0].response.output == []


def test_the_clients_own_stream_reads_it(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="sprout", input="What is 47+85?", temperature=0, max_output_tokens=300, extra_body=QUIET
    ) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(texts) == "132"


def test_a_tool_is_called_and_its_result_read(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "What's the weather in Paris?"}
    answer = ask(client, [question], tools=[WEATHER])
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "get_weather" and call.call_id != call.id
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 18}'}
    by_hand = ask(client, [question, call.model_dump(exclude_none=True), result], tools=[WEATHER])
    by_id = ask(client, [result], tools=[WEATHER], previous_response_id=answer.id)
    assert "18" in by_hand.output_text and by_id.output_text == by_hand.output_text
    assert by_id.previous_response_id == answer.id
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens, "the same prompt"


def test_a_streamed_call_joins_to_the_whole(client: openai.OpenAI) -> None:
    events = streamed(client, "What's the weather in Paris?", tools=[WEATHER])
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == events[-1].response.output[0].arguments
    (added,) = [e for e in events if e.type == "response.output_item.added"]
    assert added.item.name == "get_weather" and added.item.arguments == ""


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_a_call_may_be_demanded(client: openai.OpenAI, choice: Any) -> None:
    time = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
    answer = ask(client, "What's the weather in Paris?", tools=[time, WEATHER], tool_choice=choice)
    assert answer.output[0].type == "function_call"
    if choice != "required":
        assert {item.name for item in answer.output} == {"get_weather"}


def test_text_may_have_a_form(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    answer = ask(client, "What is 47+85?", text=form)
    assert set(json.loads(answer.output_text)) == {"sum"} and answer.text.format.name == "sum"


def test_what_was_said_goes_on(client: openai.OpenAI) -> None:
    first = ask(client, "What is 47+85?")
    second = ask(client, "What is 1+1?", previous_response_id=first.id)
    third = ask(client, "What is 2+2?", previous_response_id=second.id)
    assert first.usage.input_tokens < second.usage.input_tokens < third.usage.input_tokens
    shown = client.responses.retrieve(second.id)
    assert shown.output_text == second.output_text and shown.usage == second.usage
    with pytest.raises(openai.BadRequestError, match="not streamed again"):
        client.responses.retrieve(second.id, stream=True)
    count = client.responses.input_tokens.count(model="sprout", input="What is 47+85?", extra_body=QUIET)
    assert count.input_tokens == first.usage.input_tokens
    items = client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items] == ["What is 1+1?"]  # type: ignore[union-attr]
    client.responses.delete(second.id)
    for lost in (
        lambda: client.responses.retrieve(second.id),
        lambda: ask(client, "Hi", previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError, match="is not stored here"):
            lost()
    assert client.responses.retrieve(third.id).id == third.id


def test_what_was_asked_is_listed_as_it_came(client: openai.OpenAI) -> None:
    asked: list[Any] = [
        {"role": "user", "content": "What's the weather in Paris?"},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {"role": "assistant", "content": "I shall see."},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c", "output": "18"},
        {"role": "user", "content": "Thanks"},
    ]
    id = ask(client, asked, max_output_tokens=2).id
    items = [item.to_dict() for item in client.responses.input_items.list(id, order="asc")]
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in items] == kinds
    assert items[3]["arguments"] == '{"city": "Paris"}' and items[4] == items[4] | asked[4]
    names = [item.id for item in client.responses.input_items.list(id)]
    assert names == [item["id"] for item in items][::-1] and len(set(names)) == len(asked)
    page = client.responses.input_items.list(id, limit=2)
    assert [item.id for item in page.data] == names[:2] and page.has_more
    assert [item.id for item in page] == names, "all pages"
    for wrong in ({"after": "nobody"}, {"limit": 0}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.responses.input_items.list(id, **wrong)  # type: ignore[arg-type]


def test_who_wants_nothing_stored_gets_that(client: openai.OpenAI) -> None:
    answer = ask(client, "What is 1+1?", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_an_answer_may_be_cut_off(client: openai.OpenAI) -> None:
    answer = ask(client, "What is 47+85?", max_output_tokens=1)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert streamed(client, "What is 47+85?", max_output_tokens=1)[-1].type == "response.incomplete"
    as_benchmarks_ask = {**QUIET, "ignore_eos": True, "stop": None}
    answer = ask(client, "What is 47+85?", max_output_tokens=40, extra_body=as_benchmarks_ask)
    assert answer.usage.output_tokens == 40


def test_logprobs_come_with_the_text(client: openai.OpenAI) -> None:
    answer = ask(client, "What is 47+85?", include=["message.output_text.logprobs"], top_logprobs=2)
    entries = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith("132") and len(entries[0].top_logprobs) == 2


def test_the_background_answers_too(client: openai.OpenAI) -> None:
    begun = ask(client, "What is 47+85?", background=True)
    assert begun.status == "in_progress" and begun.output == []
    eventually(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == "132"


def test_the_background_can_be_told_to_stop(server: Running, client: openai.OpenAI) -> None:
    endless = {**QUIET, "stop": [], "logit_bias": None}
    with server.held(lambda: server.metric("vllm:num_requests_running") == 0):
        begun = ask(client, "Count.", background=True, max_output_tokens=2000, extra_body=endless)
        assert httpx.get(f"{server.url}/load").json()["server_load"] == 1
        assert client.responses.cancel(begun.id).status == "cancelled"
    server.wait_until_idle()
    with pytest.raises(openai.BadRequestError, match="can be cancelled"):
        client.responses.cancel(ask(client, "What is 1+1?").id)


@pytest.mark.parametrize(
    "fields,param,message",
    [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "item of type 'item_reference'"),
        ({"input": [{"content": [{"type": "input_image"}]}]}, "input", "of type 'input_image'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search', which this server cannot run"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "must be auto"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"top_logprobs": 99}, "top_logprobs", "top_logprobs asks for 99"),
        ({"background": True, "stream": True}, "background", "stream to be false"),
        ({"conversation": "c"}, "conversation", "say previous_response_id"),
        ({"messages": [{}]}, "messages", "say input"),
        ({"text": {"format": {"type": "xml"}}}, "text", "has type 'xml'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(server: Running, fields: Any, param: str, message: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "Hi", **fields}, timeout=PATIENCE)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] == param


def test_items_of_one_turn_are_one_message() -> None:
    items: Any = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "developer", "content": "c"},
    ]
    messages = ResponsesRequest(input=items).messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "developer"]
    assert messages[0]["content"] == "a\nb" and messages[3]["content"] == "y"
    turn: Any = messages[1]
    assert turn["content"] == "I look." and turn["reasoning_content"] == "Hm."
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["f", "g"]


def stored(name: str, owner: str = "", text: str = "") -> StoredResponse:
    own: Any = [{"role": "user", "content": text}]
    body = ResponseBody(name, 0, "m", status="completed")
    return StoredResponse(body=body, owner=owner, messages=own, own=own)


def test_the_store_keeps_the_last_ones_within_its_bounds() -> None:
    responses = StoredResponses(2)
    for name in ("a", "b", "c"):
        responses.put(stored(name))
        if name == "b":
            responses.get("a", "")
    assert responses.get("a", "") and responses.get("c", "")
    with pytest.raises(ApiError, match="'b' is not stored"):
        responses.get("b", "")
    small = StoredResponses(10, most_bytes=2000)
    for name in ("a", "b", "c"):
        small.put(stored(name, text=500 * "x"))
    with pytest.raises(ApiError):
        small.get("a", "")
    assert small.get("b", "") and small.get("c", "")
    with pytest.raises(ApiError):
        small.get("c", "another key")
    begun = StoredResponses(1)
    made = [stored(name) for name in ("a", "b", "c")]
    for each in made:
        each.body.status = "in_progress"
        begun.put(each)
    assert begun.get("a", "") and begun.get("c", ""), "nobody could ask for what they become"
    begun.delete("c", "")
    for each in made:
        each.body.status = "cancelled"
        begun.end(each)
    for lost in ("a", "c"):
        with pytest.raises(ApiError):
            begun.get(lost, "")
    assert begun.get("b", "") and not begun._begun
    nothing = StoredResponses(0)
    nothing.put(stored("a"))
    with pytest.raises(ApiError):
        nothing.get("a", "")
    facts = ModelFacts(
        names=("m",), options=ServeOptions(max_stored_responses=0), tokenizer_path=None, vocab_size=9,
        max_model_len=9, defaults=SamplingParams(),
    )  # fmt: skip
    with pytest.raises(ApiError, match="--max-stored-responses"):
        prepare(ResponsesRequest(input="Hi", background=True), Renderer(facts, cast(Any, None)))


@pytest.mark.parametrize("keeps", ["a conversation", "several of one beginning", "what the request said"])
def test_the_store_is_bounded_by_all_that_it_keeps(keeps: str) -> None:
    """Also what the responses before have said, that are not kept any more, though each says little."""
    store = StoredResponses(1000, most_bytes=100_000)
    before: list[Any] = []
    for i in range(200):
        each = stored(f"{i}", text=(9000 if i % 10 == 0 else 10) * "x")
        if keeps == "what the request said":
            each.body.tools = [{"name": 2000 * "y"}]
        elif keeps == "several of one beginning":
            each.messages = [*before, *each.own]
            before = [*each.own] if i % 10 == 0 else before
        else:
            each.messages = before = [*(before if i % 10 else []), *each.own]
        store.put(each)
        store.put(each)  # at its end again
    there = [*store._stored.values()]
    held = {id(message): message for response in there for message in response.messages}
    size = len(json.dumps([*held.values()])) + sum(len(msgspec.json.encode(each.body)) for each in there)
    assert 50_000 < size <= 100_000 and len(there) > 5
    for response in there:
        store.delete(response.body.id, "")
    assert store._num_bytes == 0 and not store._messages


def test_agents_run(server: Running) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """Get the current weather for a city

        Args:
            city: Name of the city
        """
        asked.append(city)
        return '{"temperature": 18}'

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE)
    agent = agents.Agent(
        name="Assistant",
        model=agents.OpenAIResponsesModel(model="sprout", openai_client=client),
        model_settings=agents.ModelSettings(temperature=0, max_tokens=300, extra_body=QUIET),
        tools=[agents.function_tool(get_weather)],
    )
    result = agents.Runner.run_sync(agent, "What's the weather in Paris?")
    assert asked == ["Paris"] and "18" in result.final_output
