"""/v1/completions, as OpenAI's client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

MODEL = "sprout"
PROMPT = "Once upon a time"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    options = {"model": MODEL, "max_tokens": 8, "temperature": 0, **options}
    return client.completions.create(prompt=prompt, **options)


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> Any:
    return complete(client, extra_body={"return_token_ids": True})


def test_a_completion_has_text_usage_and_an_end(plain: Any) -> None:
    (choice,) = plain.choices
    assert plain.object == "text_completion" and plain.model == MODEL and plain.id.startswith("cmpl-")
    assert choice.text and choice.finish_reason == "length" and choice.stop_reason is None
    assert len(choice.token_ids) == plain.usage.completion_tokens == 8
    assert plain.usage.prompt_tokens == len(choice.prompt_token_ids) > 0
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + 8
    assert plain.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_joins_to_the_whole(client: openai.OpenAI, plain: Any) -> None:
    stream = complete(client, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert not last.choices and last.usage == plain.usage
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_an_answer_is_called_what_its_caller_calls_it(client: openai.OpenAI) -> None:
    headers, field = {"X-Request-Id": 'a "b"/1'}, {"request_id": "c-2"}
    messages: Any = [{"role": "user", "content": "Hi"}]
    both = complete(client, extra_headers=headers, extra_body=field)
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=field)
    assert (both.id, chat.id) == ('cmpl-a "b"/1', "chatcmpl-c-2")
    chunks = list(complete(client, stream=True, extra_headers={"X-Request-Id": 300 * "x"}))
    assert {chunk.id for chunk in chunks} == {"cmpl-" + 256 * "x"}


def test_every_chunk_may_tell_the_usage_so_far(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens for chunk in complete(client, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts) and counts[-1] == 8


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, plain: Any) -> None:
    ids = plain.choices[0].prompt_token_ids
    assert complete(client, ids).choices[0].text == plain.choices[0].text
    both = complete(client, [ids, ids])
    assert [choice.text for choice in both.choices] == 2 * [plain.choices[0].text]
    assert both.usage.prompt_tokens == 2 * len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI, stream: bool) -> None:
    options = {"n": 2, "temperature": 1, "seed": 7, "max_tokens": 6, "stream": stream}
    texts = dict.fromkeys(range(4), "")
    answer = complete(client, ["The cat", "Two plus"], **options)
    for body in answer if stream else [answer]:
        for choice in body.choices:
            texts[choice.index] += choice.text
    first, second = complete(client, "The cat", **{**options, "stream": False}).choices
    assert (texts[0], texts[1]) == (first.text, second.text)
    assert first.text != second.text, "n completions have seeds of their own"
    assert all(texts.values())


def test_a_stop_string_ends_the_text(client: openai.OpenAI, plain: Any) -> None:
    text = plain.choices[0].text
    stop = text[8:11]
    choice = complete(client, stop=[stop, "never"], max_tokens=20).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[:8], "stop", stop)
    shown = complete(client, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert shown.text == text[:11]


def test_a_stop_token_ends_the_text(client: openai.OpenAI, plain: Any) -> None:
    token = plain.choices[0].token_ids[3]
    choice = complete(client, extra_body={"stop_token_ids": [token]}).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)


def test_a_seed_repeats_and_no_seed_varies(client: openai.OpenAI) -> None:
    def text(**options: Any) -> str:
        return complete(client, temperature=1, max_tokens=16, **options).choices[0].text

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert len({text() for _ in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_shows_the_prompt_first(client: openai.OpenAI, plain: Any, stream: bool) -> None:
    answer = complete(client, echo=True, stream=stream)
    text = "".join(body.choices[0].text for body in (answer if stream else [answer]))
    assert text == PROMPT + plain.choices[0].text


def test_logprobs_name_the_tokens_and_their_rivals(client: openai.OpenAI, plain: Any) -> None:
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == plain.choices[0].text
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert logprob == max(top.values()) == top[token] <= 0 and len(top) == 2


def test_offsets_are_those_of_characters(client: openai.OpenAI) -> None:
    text = "Grüße, 😀!"
    logprobs = complete(client, text, logprobs=0, echo=True, max_tokens=0).choices[0].logprobs
    assert len(logprobs.tokens) > len(text), "some characters are several tokens"
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)


def test_tokens_may_be_shown_by_their_ids(client: openai.OpenAI, plain: Any) -> None:
    extra = {"return_tokens_as_token_ids": True}
    logprobs = complete(client, logprobs=1, extra_body=extra).choices[0].logprobs
    assert logprobs.tokens == [f"token_id:{token}" for token in plain.choices[0].token_ids]
    assert [next(iter(top)) for top in logprobs.top_logprobs] == logprobs.tokens


def test_streamed_logprobs_are_the_same(client: openai.OpenAI) -> None:
    whole = complete(client, logprobs=1, echo=True).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=1, echo=True, stream=True)]
    for name in ("tokens", "text_offset"):
        assert [each for chunk in chunks for each in getattr(chunk, name)] == getattr(whole, name)
    streamed = [each for chunk in chunks for each in chunk.token_logprobs]
    assert streamed[0] is whole.token_logprobs[0] is None, "nothing comes before the first token"
    assert streamed[1:] == pytest.approx(whole.token_logprobs[1:], abs=1e-2)


def test_a_prompt_alone_can_be_scored(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == PROMPT and "".join(choice.logprobs.tokens) == PROMPT
    assert choice.logprobs.token_logprobs[0] is None and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs_come_in_vllms_form(client: openai.OpenAI, plain: Any) -> None:
    choice = complete(client, extra_body={"prompt_logprobs": 1}).choices[0]
    first, *others = choice.prompt_logprobs
    assert first is None
    for token, entry in zip(plain.choices[0].prompt_token_ids[1:], others, strict=True):
        assert {"logprob", "rank", "decoded_token"} == set(entry[str(token)])


def test_sampling_may_be_bent(client: openai.OpenAI, plain: Any) -> None:
    ids = plain.choices[0].token_ids

    def first_ids(**options: Any) -> list[int]:
        extra = {"return_token_ids": True, **options}
        return complete(client, extra_body=extra).choices[0].token_ids

    assert first_ids(allowed_token_ids=[ids[1]]) == 8 * [ids[1]]
    assert first_ids(logit_bias={str(ids[0]): -100})[0] != ids[0]
    assert "Tina" in plain.choices[0].text
    assert "Tina" not in complete(client, extra_body={"bad_words": ["Tina"]}).choices[0].text
    assert first_ids(top_k=1, temperature=1.0)[:3] == ids[:3]
    assert first_ids(min_p=1.0, temperature=1.0)[:3] == ids[:3]
    assert first_ids(top_p=1e-6, temperature=1.0)[:3] == ids[:3]
    assert len(set(first_ids(repetition_penalty=50.0, max_tokens=24))) > 18
    assert first_ids(presence_penalty=2, frequency_penalty=2) is not None


def test_a_text_may_be_forced_to_go_on(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    answer = complete(client, "<|im_end|>", max_tokens=40, extra_body=extra)
    assert answer.usage.completion_tokens == 40
    answer = complete(client, max_tokens=40, extra_body={"min_tokens": 30, "stop_token_ids": [13]})
    assert answer.usage.completion_tokens >= 30


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    prompt = [7 + i % 50 for i in range(200)]

    def num_cached(salt: str) -> int:
        usage = complete(client, prompt, max_tokens=1, extra_body={"cache_salt": salt}).usage
        return usage.prompt_tokens_details.cached_tokens

    assert num_cached("a") == 0
    assert num_cached("a") == 192, "three blocks of 64"
    assert num_cached("b") == 0


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("temperature", -1, "temperature is -1.0, must be at least 0"),
        ("temperature", "hot", "temperature: "),
        ("top_p", 2, "top_p is 2.0, must be in (0, 1]"),
        ("n", 0, "n is 0, must be in [1, 1024]"),
        ("n", 500, "n asks for 500, this server allows 128 (--max-n)"),
        ("n", True, "n: "),
        ("logprobs", 21, "logprobs asks for 21, this server allows 20 (--max-logprobs)"),
        ("max_tokens", 0, "max_tokens is 0"),
        ("max_tokens", -5, "max_tokens is -5, must be at least 1"),
        ("stop", ["a"] * 65, "stop asks for 65, this server allows 64 (--max-stop-strings)"),
        ("stop", "", "stop contains an empty string"),
        ("allowed_token_ids", [4096], "a token id in allowed_token_ids is 4096, must be in [0, 4095]"),
        ("seed", 2**70, "seed: "),
        ("suffix", "x", "suffix is not supported by this model"),
        ("best_of", 2, "best_of is not supported"),
        ("top_logprobs", 2, "top_logprobs is not supported: say logprobs"),
        ("max_completion_tokens", 2, "max_completion_tokens is not supported: say max_tokens"),
        ("stop_sequences", ["a"], "stop_sequences is not supported: say stop"),
        ("tools", [{"type": "function"}], "tools is not supported: this route has no chat"),
        ("length_penalty", 2, "length_penalty is not supported"),
        ("enable_thinking", False, "enable_thinking is not supported: say chat_template_kwargs"),
        ("use_beam_search", True, "use_beam_search is not supported"),
        ("thinking_token_budget", 0, "thinking_token_budget is not supported"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens is 0, must be at least 1"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens: "),
        ("prompt", [5000], "token id 5000 is out of range"),
        ("prompt", [], "prompt is empty"),
        ("prompt", "", "prompt is empty"),
        ("prompt", {"a": 1}, "prompt: Input should be a valid string or Input should be a valid array"),
        ("stop", [1], "stop: Input should be a valid string"),
    ],
)
def test_a_bad_field_is_named(client: openai.OpenAI, field: str, value: object, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **({"prompt": value} if field == "prompt" else {"extra_body": {field: value}}))
    body: Any = caught.value.body
    assert message in body["message"]
    assert body["code"] == 400 and body["type"] == "BadRequestError"
    if field != "prompt" or isinstance(value, dict):
        assert body["param"] == field


def test_a_prompt_that_does_not_fit_is_told_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [5] * 5000)
    body: Any = caught.value.body
    message = body["message"]
    assert "this model's maximum context length is 4096 tokens" in message  # as litellm's users expect it
    assert message.startswith("prompt is too long: ")  # as LangChain's and Anthropic's do
    assert "contains 5000 input tokens" in message


def test_fields_that_ask_for_nothing_are_let_pass(client: openai.OpenAI, plain: Any) -> None:
    nothing = {"best_of": 1, "use_beam_search": False, "prompt_embeds": None, "functions": []}
    for priority in (0, 1, None):
        extra = {**nothing, "priority": priority}
        assert complete(client, extra_body=extra).choices[0].text == plain.choices[0].text


def test_a_long_text_is_cut_before_it_is_tokenized(client: openai.OpenAI) -> None:
    text = "The cat sat on the mat. " * 40_000
    extra = {"truncate_prompt_tokens": 300, "return_token_ids": True}
    long, short = (complete(client, each, extra_body=extra).choices[0] for each in (text, text[-24_000:]))
    assert len(long.prompt_token_ids) == 300 and long.prompt_token_ids == short.prompt_token_ids


@pytest.mark.parametrize("wish,num_kept", [(3, 3), (-1, 4096 - 8), (4096, 4096 - 8)])
def test_a_prompt_may_be_cut_to_its_last_tokens(client: openai.OpenAI, wish: int, num_kept: int) -> None:
    extra = {"truncate_prompt_tokens": wish, "return_token_ids": True}
    ids = [5 + i % 1000 for i in range(5000 if wish < 0 else 4088)]
    (choice,) = complete(client, ids, extra_body=extra).choices
    assert choice.prompt_token_ids == ids[-num_kept:]


def test_a_text_is_cut_as_its_tokens_are(client: openai.OpenAI, plain: Any) -> None:
    extra = {"truncate_prompt_tokens": 2, "return_token_ids": True}
    (choice,) = complete(client, [PROMPT], echo=True, max_tokens=2, extra_body=extra).choices
    kept = plain.choices[0].prompt_token_ids[-2:]
    assert choice.prompt_token_ids == kept and len(kept) == 2
    assert choice.text.startswith(" a time"), "the echo shows what was kept"
    whole = complete(client, extra_body={**extra, "truncate_prompt_tokens": 100}).choices[0]
    assert whole.prompt_token_ids == plain.choices[0].prompt_token_ids


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist") as caught:
        complete(client, model="other")
    assert caught.value.body["param"] == "model"  # type: ignore[index]


def test_unknown_fields_are_ignored(client: openai.OpenAI, plain: Any) -> None:
    assert complete(client, extra_body={"best_before": 3}).choices[0].text == plain.choices[0].text
