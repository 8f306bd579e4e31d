"""Chats become the prompts that transformers makes of them, and bad chats are told what is wrong."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import tokenizers

from pellucid.text.chat import render, render_chat
from pellucid.text.tokenizer import Tokenizer
from tests.text.conftest import save, train_byte_level, with_bos
from tests.text.templates import LLAMA_LIKE, MISTRAL_LIKE, QWEN_LIKE

USER = {"role": "user", "content": "Weather in Köln & <b>Paris</b>?"}
SYSTEM = {"role": "system", "content": " Be brief. "}
ANSWER = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny.  "}
ARGUMENTS = {"city": "Köln", "days": [1, 2], "metric": True}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "weather", "arguments": ARGUMENTS}}],
}
RESULT = {"role": "tool", "content": '{"sun": "yes"}', "tool_call_id": "c1"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the wéather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CHATS = {
    "one turn": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "two turns": ([SYSTEM, USER, ANSWER, USER], None),
    "tools": ([SYSTEM, USER], TOOLS),
    "tool call": ([USER, CALL, RESULT, {**ANSWER, "reasoning_content": "So."}, USER, CALL, RESULT], TOOLS),
}


@pytest.fixture(scope="module")
def theirs():
    """transformers' own tokenizer, with the same special tokens as ours."""
    transformers = pytest.importorskip("transformers")
    trained = train_byte_level()
    assert isinstance(trained, tokenizers.Tokenizer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def assert_same(theirs, template: str, messages: list, tools: list | None, **options: bool) -> str:
    """Render with both and compare; `options` are template variables and add_generation_prompt."""
    before = copy.deepcopy(messages)
    add = options.pop("add_generation_prompt", True)
    want = theirs.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=add, **options
    )
    got = render(
        template,
        messages,
        tools=tools,
        add_generation_prompt=add,
        chat_template_kwargs={**SPECIAL, **options},
    )
    assert got == want
    assert messages == before, "the caller's messages were changed"
    return got


@pytest.mark.parametrize("name", list(CHATS))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_qwen_like_chats_read_as_in_transformers(
    theirs, name: str, add_generation_prompt: bool, options: dict[str, bool]
) -> None:
    text = assert_same(
        theirs, QWEN_LIKE, *CHATS[name], add_generation_prompt=add_generation_prompt, **options
    )
    assert ("<think>\n\n</think>" in text) == (
        options == {"enable_thinking": False} and add_generation_prompt
    )


@pytest.mark.parametrize("name", list(CHATS))
def test_llama_like_chats_read_as_in_transformers(theirs, name: str) -> None:
    text = assert_same(theirs, LLAMA_LIKE, *CHATS[name])
    assert text.startswith("<s>")


def test_mistral_like_chats_read_as_in_transformers(theirs) -> None:
    text = assert_same(theirs, MISTRAL_LIKE, [USER, ANSWER, USER], None)
    assert text.count("<s>") == text.count("</s>") == 1


def test_documents_are_none_unless_given(theirs) -> None:
    assert assert_same(theirs, "{{ documents is none }}", [USER], None) == "True"


def test_arguments_may_be_an_object_or_json(theirs) -> None:
    as_json = copy.deepcopy(CALL)
    as_json["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln", "days": [1, 2], "metric": true}'
    for template in (QWEN_LIKE, LLAMA_LIKE):
        texts = [render(template, [USER, c], chat_template_kwargs=SPECIAL) for c in (CALL, as_json)]
        assert texts[0] == texts[1]
        assert '"city": "Köln"' in texts[0]


@pytest.mark.parametrize("text", ['{"city', '{"city": "K\u00f6ln"} or so', "[" * 100_000, "{"])
@pytest.mark.parametrize(
    "template", [QWEN_LIKE, LLAMA_LIKE, "{{ messages[1].tool_calls[0].function.arguments }}"]
)
def test_arguments_that_were_cut_off_are_shown_as_they_were(template: str, text: str) -> None:
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = text
    assert text in render(template, [USER, call], chat_template_kwargs=SPECIAL)


def test_a_template_that_reads_arguments_one_by_one_finds_none_in_cut_off_ones() -> None:
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = '{"city'
    template = "{% for n, v in messages[0].tool_calls[0].function.arguments|items %}{{ n }}{% endfor %}."
    assert render(template, [call]) == "."


@pytest.mark.parametrize("template", [QWEN_LIKE, LLAMA_LIKE, MISTRAL_LIKE])
@pytest.mark.parametrize("content", ["Sunny", "Sunny, and  ", "USER"])
def test_the_last_message_is_continued_as_in_transformers(theirs, template: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    want = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    got = render(
        template,
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs=SPECIAL,
    )
    assert got == want
    assert got.endswith(content if template is not LLAMA_LIKE else content.rstrip())


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    listed = render(QWEN_LIKE, [{"role": "user", "content": parts}])
    assert listed == render(QWEN_LIKE, [{"role": "user", "content": "one\ntwo\nthree"}])
    question = {"role": "user", "content": "one"}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert render(QWEN_LIKE, [question, refusal, question]) == render(
        QWEN_LIKE, [question, {"role": "assistant", "content": "No."}, question]
    )


def test_absent_entries_may_be_given_as_none() -> None:
    """OpenAI's client sends every field, most of them null."""
    nulls = {"role": "user", "content": "hi", "tool_calls": None, "name": None}
    plain = {"role": "user", "content": "hi"}
    assert render(LLAMA_LIKE, [nulls], chat_template_kwargs=SPECIAL) == render(
        LLAMA_LIKE, [plain], chat_template_kwargs=SPECIAL
    )


def test_reasoning_is_known_by_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        answer = {"role": "assistant", "content": "Four.", name: "Hm."}
        text = render(QWEN_LIKE, [USER, answer], add_generation_prompt=False)
        assert "<think>\nHm.\n</think>\n\nFour." in text


def test_developers_are_the_system_to_templates_that_do_not_know_them() -> None:
    developer = {**SYSTEM, "role": "developer"}
    for template in (QWEN_LIKE, LLAMA_LIKE):
        want = render(template, [SYSTEM, USER], chat_template_kwargs=SPECIAL)
        assert render(template, [developer, USER], chat_template_kwargs=SPECIAL) == want
    knowing = "{% if messages[0].role == 'developer' %}{{ messages[0].content }}{% endif %}"
    assert render(knowing, [developer, USER]) == SYSTEM["content"]
    helping = "You help developers. {% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    assert render(helping, [developer, USER]).endswith(str(SYSTEM["content"]))
    assert developer["role"] == "developer", "the caller's message was changed"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([USER, "hi"], "message 1 is a str"),
        ([USER, {"content": "hi"}], "message 1 has role None"),
        ([{"role": "user"}], r"message 0 \(user\) has neither content nor tool_calls"),
        ([{"role": "user", "content": 3}], r"message 0 \(user\) has content of type int"),
        (
            [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"message 1 \(user\) has a content part of type 'image_url'; only text",
        ),
        (
            [{"role": "assistant", "tool_calls": "f()"}],
            r"message 0 \(assistant\) has tool_calls that",
        ),
    ],
)
def test_a_malformed_message_is_named(messages: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(QWEN_LIKE, messages)


def test_what_a_template_refuses_names_the_roles() -> None:
    with pytest.raises(ValueError, match=r"\(0 user, 1 user\): Conversation roles must alternate"):
        render(MISTRAL_LIKE, [USER, USER], chat_template_kwargs=SPECIAL)


def test_templates_have_no_way_out_of_the_sandbox() -> None:
    with pytest.raises(ValueError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}", [USER])
    with pytest.raises(ValueError, match="refused"):
        render("{% set _ = messages.append(1) %}", [USER])


def test_a_template_with_a_syntax_error_says_where() -> None:
    with pytest.raises(ValueError, match="syntax error in line 2"):
        render("{{ messages }}\n{% if %}", [USER])


def test_continuing_and_a_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        render(QWEN_LIKE, [USER], continue_final_message=True)
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) has no content"):
        render(
            QWEN_LIKE,
            [USER, CALL | {"content": None}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_a_chat_gets_one_bos_however_it_is_encoded(tmp_path: Path) -> None:
    trained = with_bos(train_byte_level())
    tokenizer = Tokenizer.load(save(tmp_path, trained, {"chat_template": LLAMA_LIKE}))
    prompt = render_chat(tokenizer, [USER])
    assert prompt.startswith("<s><|start_header_id|>")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(1) == 1
    assert tokenizer.encode(prompt) == ids


def test_a_tokenizer_without_a_template_says_so(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no chat template; pass chat_template"):
        render_chat(byte_level, [USER])
    assert render_chat(byte_level, [USER], chat_template="{{ eos_token }}") == "</s>"
