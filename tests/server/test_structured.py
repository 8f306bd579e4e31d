"""Structured outputs over HTTP: OpenAI's response_format, vLLM's structured_outputs, forced tool calls."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

pytest.importorskip("xgrammar")

from pellucid.sampling_params import StructuredOutputsParams
from pellucid.server.parsers.base import Content, ParserSetting
from pellucid.server.parsers.harmony import HarmonyParser
from pellucid.server.structured import in_final_channel
from tests.patience import eventually
from tests.server.conftest import Running, running

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["sum", "ok"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 10}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "time_of_day")
]


def post(server: Running, route: str = "chat/completions", **fields: object) -> httpx.Response:
    body = {"model": "sprout", "max_tokens": 200, "seed": 1, **fields}
    if route == "chat/completions":
        body.setdefault("messages", MESSAGES)
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds_behind_the_thinking(server: Running, stream: bool) -> None:
    client = server.client()
    for seed in range(3):
        answer = client.chat.completions.create(
            model="sprout",
            messages=MESSAGES,
            response_format=FORMAT,
            seed=seed,
            stream=stream,  # type: ignore[arg-type]
        )
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        said = json.loads(text)
        assert set(said) == {"sum", "ok"} and 0 <= said["sum"] <= 99 and isinstance(said["ok"], bool)


def test_a_language_may_begin_with_white_space(server: Running) -> None:
    wish = {"temperature": 0, "structured_outputs": {"regex": "\\n\\n(yes|no)"}}
    message = post(server, **wish).json()["choices"][0]["message"]
    assert message["reasoning"] and message["content"] in ("\n\nyes", "\n\nno")


def test_a_completion_has_no_thinking_to_wait_for(server: Running) -> None:
    for fields, pattern in [
        ({"structured_outputs": {"regex": r"[ab]{3}\d"}}, r"[ab]{3}\d"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, r"x\dy"),
    ]:
        answer = post(server, "completions", prompt="Say: ", n=2, **fields).json()
        assert all(re.fullmatch(pattern, choice["text"]) for choice in answer["choices"]), answer


def test_any_object(server: Running) -> None:
    text = post(server, "completions", prompt="Say: ", response_format={"type": "json_object"}).json()
    assert text["choices"][0]["text"].lstrip().startswith("{")
    assert post(server, response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time_of_day"}}])
def test_calls_are_forced(server: Running, choice: object) -> None:
    answer = post(server, tools=TOOLS, tool_choice=choice, temperature=1.5).json()
    (call, *_) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in ("weather", "time_of_day")
    assert choice == "required" or call["function"]["name"] == "time_of_day"
    assert set(json.loads(call["function"]["arguments"])) == {"place"}


def test_a_strict_tool_is_called_by_its_schema(server: Running) -> None:
    city = {"type": "string", "description": "Name of the city", "enum": ["London", "Rome"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    question = [{"role": "user", "content": "What's the weather in Paris?"}]

    def ask(*, strict: bool, parameters: object = schema, **fields: object) -> httpx.Response:
        function = {"name": "get_weather", "description": "Get the current weather for a city"}
        tools = [{"type": "function", "function": {**function, "parameters": parameters, "strict": strict}}]
        return post(server, messages=question, tools=tools, temperature=0, **fields)

    def calls(answer: httpx.Response) -> list[dict[str, object]]:
        message = answer.json()["choices"][0]["message"]
        return [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]

    assert calls(ask(strict=False)) == [{"city": "Paris"}]
    (call,) = calls(ask(strict=True))
    assert call["city"] in ("London", "Rome")
    assert calls(ask(strict=True, response_format=FORMAT)) == [], "the whole answer is of another language"
    error = ask(strict=True, parameters={"type": "no"}).json()["error"]
    assert error["param"] == "tools" and "tools: cannot be compiled: Unsupported type" in error["message"]
    assert ask(strict=False, parameters={"type": "no"}).status_code == 200


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_holds_however_strict_it_is_said_to_be(server: Running, strict: bool | None) -> None:
    form = {"type": "json_schema", "json_schema": {**FORMAT["json_schema"], "strict": strict}}
    said = json.loads(post(server, response_format=form).json()["choices"][0]["message"]["content"])
    assert set(said) == {"sum", "ok"}


@pytest.mark.parametrize(
    "fields,param,words",
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs"),
        ({"response_format": {"type": "yaml"}}, "response_format", "'yaml'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format",
            "response_format: cannot be compiled: Unsupported type",
        ),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", "Unclosed"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "no 'regexp'"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "must be a list"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, None, "leave one out"),
        ({"guided_json": SCHEMA}, None, "guided_json is not supported: say structured_outputs"),
        ({"guided_json": {}}, None, "guided_json is not supported: say structured_outputs"),
    ],
)
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_what_cannot_be_is_refused(
    server: Running, route: str, fields: dict, param: str | None, words: str
) -> None:
    prompt = {} if route == "chat/completions" else {"prompt": "x"}
    answer = post(server, route, **prompt, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and (param is None or error["param"] == param), error


def test_a_schema_that_would_hang_is_refused_while_others_are_served(server: Running) -> None:
    values = [f"value number {i}" for i in range(300_000)]
    with httpx.Client(timeout=60) as client:  # 8 times its 5 s, and reading the body
        body = {"prompt": "x", "structured_outputs": {"choice": values}}
        answer = client.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 400 and "takes more than 5 s to compile" in answer.text
    assert post(server, "completions", prompt="x", structured_outputs={"choice": ["y"]}).status_code == 200


def test_a_reader_who_leaves_leaves_nothing_behind(server: Running) -> None:
    with (
        pytest.raises(openai.APITimeoutError),
        server.client().with_options(timeout=0.5) as client,
    ):
        client.chat.completions.create(
            model="sprout", messages=MESSAGES, max_tokens=4000,  # type: ignore[arg-type]
            extra_body={"structured_outputs": {"regex": "[ab ]{2500,3000}"}},
        )  # fmt: skip
    server.wait_until_idle()


def grammar_server(server: Running) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    return next(child for child in children if "pellucid.sample.grammars.server" in child.cmdline())


def languages(server: Running) -> set[int]:
    return {process.pid for process in grammar_server(server).children()}


def test_a_compile_ends_with_its_client(server: Running) -> None:
    post(server, "completions", prompt="x", structured_outputs={"choice": ["y"]})
    before = languages(server)
    for route, prompt in [("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})]:
        values = "|".join(f"{route}{i * 7919:08d}" for i in range(100_000))
        body = json.dumps({**prompt, "structured_outputs": {"regex": values}}).encode()
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            head = f"POST /v1/{route} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            eventually(lambda: bool(languages(server) - before))
        eventually(lambda: not languages(server) - before)


def test_the_engine_does_not_know_how_to_compile(server: Running) -> None:
    assert post(server, "completions", prompt="x", structured_outputs={"choice": ["y"]}).status_code == 200
    files = {kind: process.memory_maps() for kind, process in [
        ("engine", server.engine), ("compiler", grammar_server(server)),
    ]}  # fmt: skip
    has_library = {kind: any("xgrammar" in part.path for part in maps) for kind, maps in files.items()}
    assert has_library == {"engine": False, "compiler": True}


def test_what_others_ask_for_stalls_nobody(server: Running) -> None:
    """benchmarks/stalls.py, a little of it; it compares with what it has measured before."""
    command = [sys.executable, "benchmarks/stalls.py", "--url", server.url, "--busy", "--scale", "0.1"]
    run = subprocess.run(
        [*command, "--attacks", "regexes", "schemas"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()[1:]] == ["nothing", "regexes", "schemas"]


def test_the_process_that_compiles_runs_before_it_is_needed() -> None:
    def is_there() -> bool:
        with suppress(StopIteration, psutil.NoSuchProcess):
            return grammar_server(server).is_running()
        return False

    with running() as server:
        eventually(is_there)


WISHES = {
    "json": (StructuredOutputsParams(json={"type": "integer"}), "12", "hm"),
    "json_object": (StructuredOutputsParams(json_object=True), '{"a": [1]}', "[1]"),
    "regex": (StructuredOutputsParams(regex=r"\d+ km"), "12 km", "km"),
    "choice": (StructuredOutputsParams(choice=["red", "blue"]), "blue", "green"),
    "one choice": (StructuredOutputsParams(choice=["red"]), "red", "blue"),
    "grammar": (StructuredOutputsParams(grammar='root ::= "yes" | "no"'), "no", "perhaps"),
    "structural tag": (
        StructuredOutputsParams(
            structural_tag='{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'
        ),
        "x",
        "y",
    ),
}


@pytest.mark.parametrize("kind", WISHES)
def test_harmonys_final_channel_is_held_to_a_language(kind: str) -> None:
    import xgrammar

    wish, right, wrong = WISHES[kind]
    tag = in_final_channel(wish).structural_tag
    assert tag is not None
    grammar = xgrammar.Grammar.from_structural_tag(tag)

    def accepts(text: str) -> bool:
        return xgrammar.testing._is_grammar_accept_string(grammar, text)

    thought = "<|channel|>analysis<|message|>Well, {thinking}.<|end|><|start|>assistant"
    for before in ("", thought):
        assert accepts(f"{before}<|channel|>final<|message|>{right}")
        assert not accepts(f"{before}<|channel|>final<|message|>{wrong}")
    assert not accepts(right) and not accepts(f"{thought}{right}")
    parser = HarmonyParser(ParserSetting())
    events = [*parser.feed(f"{thought}<|channel|>final<|message|>{right}"), *parser.finish()]
    assert "".join(event.text for event in events if isinstance(event, Content)) == right
