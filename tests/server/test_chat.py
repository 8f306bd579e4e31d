"""/v1/chat/completions, as OpenAI's client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **options: Any) -> Any:
    options = {"model": "sprout", "temperature": 0, "max_completion_tokens": 12, **options}
    return client.chat.completions.create(messages=messages, **options)


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> Any:
    return chat(client, extra_body={"return_token_ids": True, **NO_THINKING})


def test_an_answer_is_a_message(plain: Any) -> None:
    (choice,) = plain.choices
    assert plain.object == "chat.completion" and plain.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and choice.message.tool_calls is None
    assert plain.usage.completion_tokens == len(choice.token_ids)
    assert plain.usage.prompt_tokens == len(plain.prompt_token_ids)


def test_a_stream_begins_with_the_role_and_joins_to_the_whole(client: openai.OpenAI, plain: Any) -> None:
    stream = chat(client, stream=True, stream_options={"include_usage": True}, extra_body=NO_THINKING)
    first, *chunks, last = list(stream)
    delta = first.choices[0].delta
    assert first.object == "chat.completion.chunk"
    assert (delta.role, delta.content, first.choices[0].finish_reason) == ("assistant", "", None)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == plain.choices[0].finish_reason
    assert last.usage == plain.usage and not last.choices
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in (first, *chunks))


def test_tokens_of_thoughts_are_counted(client: openai.OpenAI, plain: Any) -> None:
    """As many as there are up to the tag that ends the thought, however the answer comes."""
    options: dict[str, Any] = {"max_completion_tokens": 200}
    whole = chat(client, logprobs=True, **options)
    tokens = [entry.token for entry in whole.choices[0].logprobs.content]
    num_thought = tokens.index("</think>") + 1
    assert whole.usage.completion_tokens_details.reasoning_tokens == num_thought < len(tokens)
    *_, last = chat(client, stream=True, stream_options={"include_usage": True}, **options)
    assert last.usage == whole.usage
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    cut = chat(client, max_completion_tokens=5).usage
    assert cut.completion_tokens_details.reasoning_tokens == 5


def test_the_answer_may_be_as_long_as_the_context(client: openai.OpenAI) -> None:
    answer = chat(client, max_completion_tokens=openai.omit, extra_body=NO_THINKING)
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_is_an_older_name(client: openai.OpenAI) -> None:
    answer = chat(client, max_completion_tokens=openai.omit, max_tokens=3)
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"


def test_several_answers_have_indices(client: openai.OpenAI) -> None:
    options = {"n": 3, "temperature": 3, "seed": 1, "extra_body": {"top_k": -1, "top_p": 1, **NO_THINKING}}
    whole = {choice.index: choice.message.content for choice in chat(client, **options).choices}
    texts = dict.fromkeys(range(3), "")
    for chunk in chat(client, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert whole == texts and len(set(texts.values())) > 1


def test_logprobs_spell_their_tokens(client: openai.OpenAI, plain: Any) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3, extra_body=NO_THINKING).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == plain.usage.completion_tokens
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
    bare = chat(client, logprobs=True, extra_body=NO_THINKING).choices[0].logprobs.content[0]
    assert bare.top_logprobs == [] and bare.token == entries[0].token
    stream = chat(client, stream=True, logprobs=True, top_logprobs=3, extra_body=NO_THINKING)
    shown = [chunk.choices[0].logprobs.content for chunk in stream if chunk.choices[0].logprobs]
    assert [entry.token for part in shown for entry in part] == [entry.token for entry in entries]


def test_template_options_reach_the_template(client: openai.OpenAI, plain: Any) -> None:
    thinking = chat(client, extra_body={"return_token_ids": True})
    assert thinking.prompt_token_ids != plain.prompt_token_ids


def test_no_effort_is_no_thinking(client: openai.OpenAI, plain: Any) -> None:
    answer = chat(client, reasoning_effort="none", extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids == plain.prompt_token_ids


def test_a_message_may_be_continued(client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "min_tokens": 3}
    answer = chat(client, messages, extra_body=extra)
    assert answer.choices[0].message.content
    echoed = chat(client, messages, extra_body={**extra, "echo": True})
    assert echoed.choices[0].message.content == "The answer is" + answer.choices[0].message.content


def test_text_parts_and_tools_are_understood(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]}]
    bare, tooled = chat(client, parts), chat(client, parts, tools=tools)
    assert tooled.usage.prompt_tokens > bare.usage.prompt_tokens
    assert (
        chat(client, parts, tools=tools, tool_choice="none").usage.prompt_tokens == bare.usage.prompt_tokens
    )


def test_no_top_logprobs_need_no_logprobs(client: openai.OpenAI, plain: Any) -> None:
    answer = chat(client, logprobs=False, top_logprobs=0, extra_body=NO_THINKING)
    assert answer.choices[0].logprobs is None
    assert answer.choices[0].message == plain.choices[0].message


def test_a_conversation_may_be_cut_to_its_last_tokens(client: openai.OpenAI, plain: Any) -> None:
    extra = {"return_token_ids": True, **NO_THINKING}
    cut = chat(client, extra_body={**extra, "truncate_prompt_tokens": 5})
    assert cut.prompt_token_ids == plain.prompt_token_ids[-5:]
    whole = chat(client, extra_body={**extra, "truncate_prompt_tokens": -1})
    assert whole.prompt_token_ids == plain.prompt_token_ids
    assert whole.choices[0].message == plain.choices[0].message


@pytest.mark.parametrize(
    "options,message,param",
    [
        ({"messages": []}, "messages: ", "messages"),
        ({"messages": [{"content": "x"}]}, "message 0 has role None", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts", None),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs asks for 50, this", "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0, must", "max_completion_tokens"),
        ({"max_completion_tokens": openai.omit, "max_tokens": 0}, "max_tokens is 0, must", "max_tokens"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template is not supported", "chat_template"),
        ({"functions": [{"name": "f"}]}, "functions is not supported: say tools", "functions"),
        ({"extra_body": {"prompt": "a"}}, "prompt is not supported: say messages", "prompt"),
        (
            {"extra_body": {"stop_sequences": ["a"]}},
            "not supported: say stop",
            "stop_sequences",
        ),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "cannot be streamed", "prompt_logprobs"),
        (
            {"extra_body": {"min_tokens": 13}},
            "must be in [0, max_completion_tokens=12]",
            "min_tokens",
        ),
    ],
)
def test_a_bad_field_is_named(
    client: openai.OpenAI, options: dict[str, Any], message: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    body: Any = caught.value.body
    assert message in body["message"] and body["param"] == param
