"""The other routes, the form of errors, and clients that go away."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from pellucid import __version__
from pellucid.models.checkpoint import ASSETS
from pellucid.sampling_params import SamplingParams
from pellucid.server.options import ServeOptions
from pellucid.server.protocol.openai import ChatRequest, TokenizeRequest
from pellucid.server.renderer import ModelFacts, Renderer
from pellucid.text.chat import render_chat
from pellucid.text.tokenizer import Tokenizer
from tests.patience import PATIENCE, eventually
from tests.server.conftest import Running


def test_it_is_well(server: Running) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ping").status_code == httpx.post(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0, "engine_silence": 0.0}


def test_head_is_get_without_the_body(server: Running) -> None:
    for path in ("/", "/health", "/v1/models"):
        reply = httpx.head(server.url + path)
        length = len(httpx.get(server.url + path).content)
        assert (reply.status_code, reply.content, reply.headers["content-length"]) == (200, b"", str(length))


def test_a_slash_at_the_end_means_nothing(server: Running) -> None:
    assert httpx.get(f"{server.url}/v1/models/").json()["object"] == "list"
    assert httpx.get(f"{server.url}/v1/models/sprout/").json()["id"] == "sprout"
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions/", json=body).status_code == 200


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (card,) = client.models.list()
    assert card.id == "sprout" and card.object == "model"
    assert card.max_model_len == 4096  # type: ignore[attr-defined]
    assert client.models.retrieve("sprout") == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_every_route_is_described(server: Running) -> None:
    paths = set(httpx.get(f"{server.url}/openapi.json").json()["paths"])
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"} <= paths


def test_what_describes_them_needs_no_other_host(server: Running) -> None:
    page = httpx.get(f"{server.url}/docs")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert "page/docs.js" in parts and not any("://" in part for part in parts)
    assert all(httpx.get(f"{server.url}/{part}").status_code == 200 for part in parts)


def test_text_goes_to_tokens_and_back(server: Running) -> None:
    text = "Once upon <|im_end|> a time: größer, 😀"
    reply = httpx.post(f"{server.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 4096
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": reply["tokens"]}).json()
    assert back == {"prompt": text}


TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        {"add_generation_prompt": None},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
    ids=str,
)
def test_messages_go_to_the_tokens_of_a_chat(server: Running, options: dict[str, Any]) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}],
        **options,
    }
    reply = httpx.post(f"{server.url}/tokenize", json=body).json()
    more = {"max_tokens": 1, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **more}).json()
    assert reply["tokens"] == answer["prompt_token_ids"]
    assert reply["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("said", "thinks"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"other": 1}}, False),
        ({"reasoning_effort": "low"}, False),
    ],
    ids=str,
)
def test_a_server_has_defaults_for_the_template(said: dict[str, Any], thinks: bool) -> None:
    tokenizer = Tokenizer.load(ASSETS / "sprout")
    options = ServeOptions(default_chat_template_kwargs='{"enable_thinking": false}')
    facts = ModelFacts(
        names=("m",), options=options, tokenizer_path=None, vocab_size=9, max_model_len=9,
        defaults=SamplingParams(),
    )  # fmt: skip
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **said})
    prompts = {
        is_on: render_chat(tokenizer, body.messages, chat_template_kwargs={"enable_thinking": is_on})
        for is_on in (True, False)
    }
    assert Renderer(facts, tokenizer).render(body) == prompts[thinks] != prompts[not thinks]


@pytest.mark.parametrize("said", ["{", "[1]", "1"])
def test_defaults_for_the_template_are_an_object(said: str) -> None:
    with pytest.raises(ValueError, match="default_chat_template_kwargs .*(no JSON|must be an object)"):
        ServeOptions(default_chat_template_kwargs=said)


@pytest.mark.parametrize(
    "method,path,content,status,message",
    [
        ("GET", "/nothing", None, 404, "Not Found"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("POST", "/v1/completions", "{", 400, "JSON"),
        ("POST", "/v1/completions", "[]", 400, "no JSON object"),
        ("POST", "/v1/completions", '{"prompt": "\\ud800"}', 400, "half of a character"),
        ("POST", "/v1/completions", '{"prompt": "a", "temperature": NaN}', 400, "temperature is nan"),
        ("POST", "/v1/completions", '{"prompt": "a", "logit_bias": {"x": 1}}', 400, "logit_bias"),
        ("POST", "/v1/completions", "[" * 100_000, 400, ""),
        ("POST", "/tokenize", "{}", 400, "give either prompt or messages"),
        ("POST", "/detokenize", '{"tokens": [-1]}', 400, "tokens has -1"),
    ],
)
def test_an_error_has_one_form(
    server: Running, method: str, path: str, content: str | None, status: int, message: str
) -> None:
    headers = {"Content-Type": "application/json"}
    reply = httpx.request(method, server.url + path, content=content, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert message in error["message"] and error["code"] == status


def test_a_client_that_leaves_a_stream_aborts_it(server: Running, client: openai.OpenAI) -> None:
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    options = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="sprout", prompt="Once", stream=True, n=2, **options) as stream:  # type: ignore[call-overload]
        next(iter(stream))
        assert server.metric("vllm:num_requests_running") == 2
        assert server.metric("vllm:kv_cache_usage_perc") > 0
    server.wait_until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == before + 2


def test_a_client_that_waits_no_longer_aborts_its_request(server: Running) -> None:
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    server.wait_until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == before + 1


def test_a_reader_that_stands_still_holds_up_nobody(server: Running, client: openai.OpenAI) -> None:
    body = {"prompt": "Once", "max_tokens": 50, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}
    narrow = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    with (
        httpx.Client(transport=narrow, timeout=60) as slow,
        slow.stream("POST", f"{server.url}/v1/completions", json=body) as still,
    ):
        lines = still.iter_lines()
        next(lines)
        answer = client.completions.create(model="sprout", prompt="Once", max_tokens=8)
        assert answer.usage.completion_tokens == 8  # type: ignore[union-attr]
        assert server.metric("vllm:num_requests_running") == 8
        server.wait_until_idle()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ids: dict[int, int] = dict.fromkeys(range(8), 0)
    for chunk in events:
        for choice in chunk["choices"]:
            ids[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert all(count >= 49 for count in ids.values()), ids


def test_streams_follow_each_other_on_a_connection(server: Running) -> None:
    body = {"prompt": "Once", "max_tokens": 6, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url) as client:
        ports: set[int] = set()
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=body) as stream:
                ports.add(stream.extensions["network_stream"].get_extra_info("client_addr")[1])
                assert stream.read().endswith(b"data: [DONE]\n\n")
    assert len(ports) == 1


def test_an_old_client_reads_to_the_end_of_the_connection(server: Running) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 6, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port or 0), 30) as line:
        line.sendall(f"{head}\r\n\r\n{body}".encode())
        reply = b"".join(iter(lambda: line.recv(4096), b""))
    assert b"connection: close" in reply and b"data: [DONE]" in reply
    assert b'"finish_reason":"length"' in reply


def test_many_streams_at_once(server: Running) -> None:
    failures: list[str] = []

    def talk(number: int) -> None:
        body = {"prompt": f"{number} plus", "max_tokens": 6, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = [line for line in stream.iter_lines() if line]
        failures.extend(line for line in lines if line.startswith('data: {"error"'))
        if lines[-1] != "data: [DONE]":
            failures.append(lines[-1])

    before = server.metric("vllm:generation_tokens_total")
    threads = [threading.Thread(target=talk, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    eventually(lambda: server.metric("vllm:generation_tokens_total") == before + 64 * 6)
    server.wait_until_idle()


def test_metrics_have_vllms_names(server: Running, client: openai.OpenAI) -> None:
    names = (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens",
        "request_params_n", "request_queue_time_seconds", "request_max_num_generation_tokens",
    )  # fmt: skip
    before = [server.metric(f"vllm:{name}_count") for name in names]
    client.completions.create(model="sprout", prompt="Once", max_tokens=2)
    assert [server.metric(f"vllm:{name}_count") for name in names] == [count + 1 for count in before]
    assert server.metric("vllm:prompt_tokens_by_source_total") == server.metric("vllm:prompt_tokens_total")
    assert server.metric("pellucid:spec_decode_info", proposer="none", num_speculative_tokens="0") == 1
    assert server.metric("vllm:cache_config_info", block_size="64", model_name="sprout", engine="0") == 1


def test_tokens_are_counted_as_answers_say(server: Running, client: openai.OpenAI) -> None:
    server.wait_until_idle()
    names = ("prompt_tokens", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
    before = [server.metric(f"vllm:{name}_total") for name in names]
    sums = [0, 0, 0]
    for _ in range(2):
        ids = [5 + i % 90 for i in range(150)]
        extra = {"cache_salt": "counted", "stop_token_ids": [7]}
        usage: Any = client.completions.create(
            model="sprout", prompt=ids, n=2, max_tokens=6, logit_bias={"7": 5}, extra_body=extra
        ).usage
        counts = 2 * usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
    server.wait_until_idle()
    counted = [server.metric(f"vllm:{name}_total") - old for name, old in zip(names, before, strict=True)]
    assert (counted[0], counted[1], counted[3]) == (sums[0], sums[0], sums[2])
    assert counted[2] == 3 * 128 and sums[1] > 0


def test_steps_are_counted_by_their_tokens(server: Running, client: openai.OpenAI) -> None:
    server.wait_until_idle()
    name = "vllm:iteration_tokens_total"
    before = [server.metric(f"{name}_{part}") for part in ("count", "sum")]
    ids = [5 + i % 100 for i in range(50)]
    extra = {"ignore_eos": True, "cache_salt": "steps"}
    client.completions.create(model="sprout", prompt=ids, max_tokens=11, extra_body=extra)
    server.wait_until_idle()
    num_steps, num_tokens = (
        server.metric(f"{name}_{part}") - old for part, old in zip(("count", "sum"), before, strict=True)
    )
    # One chunk and ten decodes; a step that was planned ahead may find that all is over.
    assert 11 <= num_steps <= 12 and 60 <= num_tokens <= 61
    assert server.metric(f"{name}_bucket", le="+Inf") == before[0] + num_steps


def test_the_longest_of_several_answers_is_told(server: Running, client: openai.OpenAI) -> None:
    name = "vllm:request_max_num_generation_tokens"
    before = [server.metric(f"{name}_{part}") for part in ("count", "sum")]
    extra = {"ignore_eos": True}
    client.completions.create(model="sprout", prompt=["a", "b"], n=3, max_tokens=7, extra_body=extra)
    assert [server.metric(f"{name}_{part}") for part in ("count", "sum")] == [before[0] + 2, before[1] + 14]


def test_a_count_and_a_chat_tell_the_template_the_same() -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"text": "a"}]}
    options = {"enable_thinking": False, "documents": said["documents"], "reasoning_effort": "none"}
    for form in (ChatRequest, TokenizeRequest):
        assert form(**said, reasoning_effort="none").template_options == options  # type: ignore[arg-type]


def test_an_engine_may_stand_still(server: Running, client: openai.OpenAI) -> None:
    options: Any = {"model": "sprout", "prompt": "Once", "max_tokens": 200, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    stream = client.completions.create(**options, stream=True)  # type: ignore[call-overload]
    begun = [next(stream).choices[0].text]
    assert httpx.post(f"{server.url}/pause?mode=keep").json() == {"status": "paused"}
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
    tokens = server.metric("vllm:generation_tokens_total")
    answers: list[Any] = []
    waiter = threading.Thread(target=lambda: answers.append(client.completions.create(**options)))
    waiter.start()
    eventually(lambda: server.metric("vllm:num_requests_waiting") == 1)
    assert server.metric("vllm:generation_tokens_total") - tokens < 50 and not answers
    assert httpx.get(f"{server.url}/health").status_code == 200
    httpx.post(f"{server.url}/resume")
    waiter.join(60)
    begun += [chunk.choices[0].text for chunk in stream]
    assert "".join(begun) == answers[0].choices[0].text != ""
    assert httpx.post(f"{server.url}/pause?mode=wait").status_code == 400


def test_a_pause_may_end_what_runs(server: Running, client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="sprout", prompt="Once", max_tokens=3000, extra_body=extra, stream=True
    )
    next(stream)
    with ThreadPoolExecutor(1) as thread:
        options: Any = {"model": "sprout", "prompt": "Once", "max_tokens": 3000, "extra_body": extra}
        whole = thread.submit(client.completions.create, **options)
        eventually(lambda: server.metric("vllm:num_requests_running") == 2)
        httpx.post(f"{server.url}/pause")
        with pytest.raises(openai.APIError, match="the operator has paused the engine"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="has paused the engine") as told:
            whole.result()
    assert told.value.status_code == 503 and told.value.response.headers["Retry-After"]
    httpx.post(f"{server.url}/resume")
    server.wait_until_idle()
    assert client.completions.create(model="sprout", prompt="Once", max_tokens=2).choices[0].text


def test_a_prefix_cache_is_forgotten(server: Running, client: openai.OpenAI) -> None:
    options = {"model": "sprout", "prompt": "word " * 200, "max_tokens": 1}

    def cached() -> int:
        usage = client.completions.create(**options).usage  # type: ignore[call-overload]
        return usage.prompt_tokens_details.cached_tokens

    cached()
    assert cached() > 0
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    assert cached() == 0


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes(server: Running, client: openai.OpenAI, level: int) -> None:
    options: Any = {"model": "sprout", "prompt": "def main(", "max_tokens": 8, "temperature": 0}
    expected = client.completions.create(**options).choices[0].text
    extra = {"ignore_eos": True}
    stream = client.completions.create(**{**options, "max_tokens": 3000}, extra_body=extra, stream=True)
    next(stream)
    assert httpx.post(f"{server.url}/sleep", params={"level": level}, timeout=PATIENCE).status_code == 200
    with pytest.raises(openai.APIError, match="put the engine to sleep"):
        list(stream)
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
    state = ("awake", "weights_offloaded", "discard_all")[level]
    assert server.metric("vllm:engine_sleep_state", sleep_state=state) == 1
    with pytest.raises(openai.InternalServerError, match="POST /wake_up") as refused:
        client.completions.create(**options)
    assert refused.value.status_code == 503
    cache = httpx.post(f"{server.url}/wake_up?tags=kv_cache", timeout=PATIENCE)
    assert cache.status_code == 409 and "comes back behind weights" in cache.text
    assert cache.json()["error"]["type"] == "ConflictError"
    assert httpx.post(f"{server.url}/wake_up?tags=weights", timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
    assert httpx.post(f"{server.url}/wake_up", timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": False}
    assert server.metric("vllm:engine_sleep_state", sleep_state="awake") == 1
    assert client.completions.create(**options).choices[0].text == expected


def test_what_runs_may_end_before_a_sleep(server: Running, client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="sprout", prompt="Once", max_tokens=40, extra_body=extra, stream=True
    )
    next(stream)
    assert httpx.post(f"{server.url}/sleep?mode=wait", timeout=PATIENCE).status_code == 200
    assert len(list(stream)) >= 1
    assert httpx.post(f"{server.url}/wake_up", timeout=PATIENCE).status_code == 200
    assert httpx.post(f"{server.url}/sleep?mode=keep").status_code == 400
    assert httpx.post(f"{server.url}/sleep?level=3").status_code == 400
    assert "level: Input should be" in httpx.post(f"{server.url}/sleep?level=deep").text
    assert httpx.post(f"{server.url}/wake_up?tags=x").status_code == 400
