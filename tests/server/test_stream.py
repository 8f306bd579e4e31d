"""A stream whose events are written at once is, byte for byte, the one whose task wakes for each of them."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fastapi import Request
from starlette.types import Message

from pellucid.async_llm import Mailbox
from pellucid.server import anthropic, chat, completions
from pellucid.server.answer import Answer
from pellucid.server.context import Server
from pellucid.server.parsers.base import Parser, ParserSetting, PlainParser
from pellucid.server.parsers.think import ThinkParser
from pellucid.server.protocol.openai import ChatRequest, CompletionRequest
from pellucid.server.respond import Form, respond
from pellucid.server.stream import FLOW, OPENAI_ENDING, Ending
from pellucid.text.outputs import OutputKind
from pellucid.text.prompts import TokenPrompt
from pellucid.types import CompletionOutput, RequestOutput

TEXTS = ["Grüß", ' "Gott"', "", "\n\\", " </s>\u2028", "🌳", " ok", "."]
THOUGHT = ["<think>", "Hm", ", so", "\n</th", "ink>", "\n\n", "Yes", "!", " or", " no"]
USAGE = {"include_usage": True}
RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}
NO_SERVER = cast(Server, None)  # for what needs no tokenizer


def said(texts: Iterable[str], n: int = 1, name: str = "a") -> list[RequestOutput]:
    """What the engine says, a text of each choice in turn, up to the end of all."""
    outputs = [
        RequestOutput(name, None, [1], [CompletionOutput(index, text, [7])], num_cached_tokens=3)
        for text in texts
        for index in range(n)
    ]
    for output in outputs[-n:]:
        output.outputs[0].finish_reason = "stop"
    outputs[-1].finished = True
    return outputs


@dataclass
class Connection:
    """What a client would read, and how it reads."""

    is_fast: bool
    write_paused: bool = False
    body: bytes = b""
    num_writes: int = 0
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        if self.write_paused:
            await self.may_go_on.wait()
        self.body += message.get("body", b"")
        self.num_writes += bool(message.get("body"))

    async def receive(self) -> Message:
        return await asyncio.get_running_loop().create_future()

    @property
    def scope(self) -> dict[str, Any]:
        extensions = {FLOW: {"flow": self}} if self.is_fast else {}
        return {"type": "http", "method": "POST", "path": "/", "headers": [], "extensions": extensions}


FormMaker = Callable[[Answer], tuple[Any, Form]]


def as_completion(**options: Any) -> FormMaker:
    def make(answer: Answer) -> tuple[Any, Form]:
        body = CompletionRequest.model_validate({"prompt": "x", "stream": True, **options})
        texts = ["the prompt"] if body.echo else None
        return body, completions._CompletionForm(body, answer, "m", NO_SERVER, texts, id="i", created=1)

    return make


def as_chat(**options: Any) -> FormMaker:
    def make(answer: Answer) -> tuple[Any, Form]:
        message = {"role": "user", "content": "hello"}
        body = ChatRequest.model_validate({"messages": [message], "stream": True, **options})
        return body, chat._ChatForm(body, answer, "m", NO_SERVER, id="i", created=1)

    return make


def as_message(answer: Answer) -> tuple[Any, Form]:
    return ChatRequest(messages=[{}], stream=True), anthropic._MessageForm(answer, "m", id="i")


Play = Callable[[Mailbox, Connection], Awaitable[None]]


def stream(
    make_form: FormMaker,
    play: Play,
    *,
    is_fast: bool,
    n: int = 1,
    names: tuple[str, ...] = ("a",),
    parser: type[Parser] = PlainParser,
    ending: Ending = OPENAI_ENDING,
) -> Connection:
    """Everything that is sent while `play` fills the mailbox; no envelopes unless it is fast."""

    async def run() -> Connection:
        mailbox = Mailbox(OutputKind.DELTA, lambda name: None)
        for name in names:
            mailbox.expect(name)
        prompts = [TokenPrompt([1], None) for _ in names]
        answer = Answer(mailbox, prompts, n, lambda: parser(ParserSetting()))  # type: ignore[call-arg]
        body, form = make_form(answer)
        if not is_fast and hasattr(form, "is_plain"):
            form.is_plain = False  # type: ignore[attr-defined]
        connection = Connection(is_fast)
        response = await respond(Request(connection.scope), body, answer, form, ending=ending)
        task = asyncio.create_task(response(connection.scope, connection.receive, connection.send))
        await settle()
        await play(mailbox, connection)
        await asyncio.wait_for(task, 5)
        return connection

    return asyncio.run(run())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def one_by_one(outputs: Callable[[], list[RequestOutput]]) -> Play:
    async def play(mailbox: Mailbox, connection: Connection) -> None:
        for output in outputs():
            num_writes = connection.num_writes
            mailbox.put(output)
            mailbox.tell()
            assert connection.is_fast or connection.num_writes == num_writes, "a task is not there yet"
            await settle()

    return play


@pytest.mark.parametrize(
    "make_form",
    [
        as_completion(),
        as_completion(stream_options=USAGE),
        as_completion(stream_options=RUNNING_USAGE),
        as_completion(echo=True),
        as_completion(return_token_ids=True),
        as_chat(),
        as_chat(stream_options=USAGE),
        as_chat(stream_options=RUNNING_USAGE),
        as_chat(echo=True),
        as_chat(return_token_ids=True),
        as_chat(include_reasoning=False),
        as_message,
    ],
)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("parser,texts", [(PlainParser, TEXTS), (ThinkParser, THOUGHT)])
def test_both_ways_write_the_same(
    make_form: FormMaker, n: int, parser: type[Parser], texts: list[str]
) -> None:
    play = one_by_one(lambda: said(texts, n))
    slow = stream(make_form, play, is_fast=False, n=n, parser=parser)
    fast = stream(make_form, play, is_fast=True, n=n, parser=parser)
    assert fast.body == slow.body
    assert fast.body.endswith(b"data: [DONE]\n\n") and fast.body.count(b"data: ") > 3


def test_several_prompts_are_written_at_once_too() -> None:
    def both() -> list[RequestOutput]:
        first, second = said(TEXTS), said(TEXTS[:4], name="b")
        return [*(each for pair in zip(first, second, strict=False) for each in pair), *first[4:]]

    make_form = as_completion(stream_options=USAGE)
    slow, fast = (
        stream(make_form, one_by_one(both), is_fast=fast, names=("a", "b")) for fast in (False, True)
    )
    assert fast.body == slow.body and b'"index":1' in fast.body


def test_most_is_written_before_any_task_runs() -> None:
    async def play(mailbox: Mailbox, connection: Connection) -> None:
        *most, last = said(TEXTS)
        for number, output in enumerate(most, 1):
            mailbox.put(output)
            mailbox.tell()
            assert connection.num_writes == number
        mailbox.put(last)
        mailbox.tell()
        assert connection.num_writes == len(most), "the end is for the task"

    stream(as_completion(), play, is_fast=True)


def test_what_comes_while_a_connection_is_paused_joins() -> None:
    async def play(mailbox: Mailbox, connection: Connection) -> None:
        a, *waiting, g, h = said("abcdefgh")
        connection.write_paused = True
        for output in (a, *waiting):
            mailbox.put(output)
            mailbox.tell()
            await settle()
        connection.write_paused = False
        mailbox.tell()
        assert connection.num_writes == 0, "a is not out yet, so nothing may overtake it"
        connection.may_go_on.set()
        for output in (g, h):
            await settle()
            mailbox.put(output)
            mailbox.tell()

    fast = stream(as_completion(), play, is_fast=True)
    chunks = [json.loads(line[6:]) for line in fast.body.decode().split("\n\n")[:-2]]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "bcdef", "g", "h"]


def failing(make_form: FormMaker) -> FormMaker:
    def make(answer: Answer) -> tuple[Any, Form]:
        body, form = make_form(answer)
        form.envelopes = None  # type: ignore[attr-defined]
        return body, form

    return make


@pytest.mark.parametrize("is_fast", [False, True])
def test_an_error_ends_a_stream(is_fast: bool) -> None:
    failed = said(TEXTS)
    failed[3].error = "the engine has died"

    body = stream(as_completion(), one_by_one(lambda: failed), is_fast=is_fast).body
    *_, error, done, rest = body.decode().split("\n\n")
    assert "the engine has died" in error and (done, rest) == ("data: [DONE]", "")


def test_a_bug_ends_its_stream_alone() -> None:
    body = stream(failing(as_completion()), one_by_one(lambda: said(TEXTS)), is_fast=True).body
    *_, error, done, rest = body.decode().split("\n\n")
    assert "internal error" in error and (done, rest) == ("data: [DONE]", "")


def test_nothing_is_written_after_the_end_of_interest() -> None:
    async def play(mailbox: Mailbox, connection: Connection) -> None:
        first, second, *_ = said(TEXTS)
        mailbox.put(first)
        mailbox.tell()
        mailbox.close()
        num_writes = connection.num_writes
        mailbox.put(second)
        mailbox.tell()
        assert connection.num_writes == num_writes == 1

    stream(as_completion(), play, is_fast=True)


@pytest.mark.parametrize("make_form", [as_completion(), as_chat(), as_message])
@pytest.mark.parametrize("is_fast", [False, True])
def test_an_answer_whose_stream_has_ended_is_freed_at_once(make_form: FormMaker, is_fast: bool) -> None:
    answers: list[weakref.ref[Answer]] = []

    def make(answer: Answer) -> tuple[Any, Form]:
        answers.append(weakref.ref(answer))
        return make_form(answer)

    gc.disable()
    try:
        stream(make, one_by_one(lambda: said(TEXTS)), is_fast=is_fast)
        assert [answer() for answer in answers] == [None]
    finally:
        gc.enable()
