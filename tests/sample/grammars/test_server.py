"""Whether a grammar can be used is told in time, and no compile keeps others from being told."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Generator

import numpy as np
import psutil
import pytest

pytest.importorskip("xgrammar")

from pellucid.features.base import AskingRow
from pellucid.features.grammar.host import Grammars
from pellucid.sample.grammars import client as client_module
from pellucid.sample.grammars.base import GrammarRef, GrammarSpec, Spelling
from pellucid.sample.grammars.client import GrammarClient
from pellucid.sample.grammars.wire import Verdict
from pellucid.sampling_params import SamplingParams
from pellucid.types import Request
from tests.sample.grammars.engine import grammars_of
from tests.server.conftest import eventually

SPELLING = Spelling(token_bytes=[bytes([i]) for i in range(128)], vocab_size=130, stop_token_ids=(0,))
PROPERTIES = ",".join(f'"p{i}":{{"type":"integer"}}' for i in range(20_000))
WIDE = GrammarSpec("json", f'{{"type":"object","properties":{{{PROPERTIES}}}}}')


def endless(salt: int) -> GrammarSpec:
    return GrammarSpec("regex", "|".join(f"{(i + salt) * 7919:08d}" for i in range(100_000)))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def ask(client: GrammarClient, spec: GrammarSpec, seconds: float = 60.0) -> str | None:
    return client.ask(client.question(spec, seconds)).error


async def ask_async(client: GrammarClient, spec: GrammarSpec) -> Verdict:
    return await client.ask_async(client.question(spec, 60.0), client.address)


def server_of(client: GrammarClient) -> psutil.Process:
    assert client._process is not None
    return psutil.Process(client._process._process.pid)


def languages(client: GrammarClient) -> list[psutil.Process]:
    return server_of(client).children()


@pytest.fixture(scope="module")
def client() -> Generator[GrammarClient, None, None]:
    client = GrammarClient(lambda: SPELLING, most_held=2)
    assert ask(client, regex("a+")) is None  # the process has started
    yield client
    client.shutdown()


@pytest.mark.parametrize("spec", [endless(0), WIDE], ids=["regex", "schema"])
def test_what_takes_too_long_is_refused_in_time_and_then_at_once(
    client: GrammarClient, spec: GrammarSpec
) -> None:
    question = client.question(spec, 0.5)
    while client.known(question) is None:  # a machine too busy for 0.5 s of work is no grammar's fault
        assert client.ask(question).error == "takes more than 0.5 s to compile; make it simpler"
    assert client.ask(question) is client.known(question)
    assert ask(client, regex("b+")) is None


@pytest.mark.parametrize(
    "spec,words",
    [
        (regex("[a"), "cannot be compiled: .*Unclosed"),
        # In either version of xgrammar's words.
        (GrammarSpec("json", '{"$ref": "#"}'), r"describes no text at all|Circular \$ref"),
        (GrammarSpec("json", '{"$ref": "http://a.org"}'), "cannot be compiled: .*is not followed"),
        (GrammarSpec("json", '{"a": ' * 100_000), "cannot be compiled"),
    ],
)
def test_what_is_no_language_is_told_in_words(client: GrammarClient, spec: GrammarSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        raise ValueError(ask(client, spec))


def test_a_text_that_is_no_unicode_is_refused(client: GrammarClient) -> None:
    with pytest.raises(ValueError, match="cannot be compiled: .*surrogates"):
        client.question(regex("\ud800"), 1.0)


def test_bombs_take_nobodys_turn_and_end_with_those_who_wait_for_them(client: GrammarClient) -> None:
    """More of them than are compiled at once; what is known or new is told before any has ended."""

    async def scene() -> None:
        bombs = [asyncio.create_task(ask_async(client, endless(1000 + salt))) for salt in range(6)]
        twice = asyncio.create_task(ask_async(client, endless(1000)))
        while len(languages(client)) < 4:
            await asyncio.sleep(0.02)
        known = client.known(client.question(regex("a+"), 60.0))
        assert known is not None and known.error is None
        assert (await ask_async(client, regex("new+"))).error is None
        assert await asyncio.to_thread(ask, client, regex("newer+")) is None
        assert not any(bomb.done() for bomb in (*bombs, twice))
        compiling = len(languages(client)) - 2
        bombs[0].cancel()  # somebody else still waits for the same
        bombs[1].cancel()
        while len(languages(client)) - 2 > compiling - 1:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        assert not twice.done() and len(languages(client)) - 2 >= 1
        for task in (*bombs, twice):
            task.cancel()

    asyncio.run(scene())
    eventually(lambda: len(languages(client)) <= 2)  # what is held: none that compiles


def test_no_more_is_remembered_than_may_be(client: GrammarClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_VERDICTS", 3)
    asked = [client.question(regex(f"{i}"), 1.0) for i in range(5)]
    client._verdicts.clear()
    for question in asked[:3]:
        client._note(question, Verdict("no"))
    assert client.known(asked[0]) == Verdict("no")
    for question in asked[3:]:
        client._note(question, Verdict("no"))
    assert [client.known(question) is not None for question in asked] == [True, False, False, True, True]


def test_equal_questions_share_one_compile(client: GrammarClient) -> None:
    async def scene() -> None:
        spec = regex("|".join(f"{i:05d}" for i in range(3000)))
        before = {process.pid for process in languages(client)}
        verdicts = asyncio.gather(*(ask_async(client, spec) for _ in range(8)))
        seen: set[int] = set()
        while not verdicts.done():
            seen |= {process.pid for process in languages(client)} - before
            await asyncio.sleep(0.001)
        assert {each.error for each in await verdicts} == {None} and len(seen) == 1

    asyncio.run(scene())


def test_a_grammar_that_its_process_dies_of_is_refused(client: GrammarClient) -> None:
    before = {process.pid for process in languages(client)}

    def kill() -> None:
        eventually(lambda: any(process.pid not in before for process in languages(client)))
        for process in languages(client):
            if process.pid not in before:
                process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    assert "takes too much memory" in str(ask(client, endless(7)))
    thread.join()


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs xgrammar; pip install 'pellucid\[serve\]'"):
        GrammarClient(lambda: SPELLING).question(regex("a+"), 1.0)


# The engine's side


def request(client: GrammarClient, name: str, text: str) -> Request:
    question = client.question(regex(text), 60.0)
    ref = GrammarRef(address=client.address, digest=question.digest)
    return Request(
        id=name, prompt_token_ids=[1, 2], sampling=SamplingParams(min_tokens=1), grammar=ref.encode()
    )


def allowed(grammars: Grammars, request: Request, text: str) -> set[int]:
    row = AskingRow(3, request, np.array([1, 2, *map(ord, text)], dtype=np.int32), 0, samples=True)
    mask = np.frombuffer(grammars.late([row]).rows[3], dtype=np.uint8)
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


@pytest.fixture
def grammars() -> Generator[Grammars, None, None]:
    grammars = grammars_of(SPELLING.vocab_size)
    yield grammars
    grammars.shutdown()


def test_languages_that_are_kept_no_longer_are_there_again_when_their_requests_begin(
    client: GrammarClient, grammars: Grammars
) -> None:
    """Four have been checked, two are held: the others' requests wait, the engine's thread does not."""
    texts = ["kept", "dropped", "let go", "once more"]
    for text in texts:
        assert ask(client, regex(text)) is None
    eventually(lambda: len(languages(client)) == 2)
    requests = {text: request(client, text, text) for text in texts}
    attached = {name: grammars.prepare(each) for name, each in requests.items()}  # or nobody would leave
    time.sleep(0.5)
    assert not all(future.done() for future in attached.values()), "some wait until others have ended"
    while attached:
        eventually(lambda: any(future.done() for future in attached.values()))
        name = next(name for name, future in attached.items() if future.done())
        del attached[name]
        assert allowed(grammars, requests[name], "") == {ord(name[0])}
        assert allowed(grammars, requests[name], name[0]) == {ord(name[1])}
        grammars.leave(name)
    assert grammars._texts == {} and grammars._languages == {}


def test_who_waits_for_a_language_can_leave(client: GrammarClient, grammars: Grammars) -> None:
    texts = ["one", "two", "three"]
    for text in texts:
        assert ask(client, regex(text)) is None
    requests = [request(client, text, text) for text in texts]
    first = [grammars.prepare(each) for each in requests[:2]]
    eventually(lambda: all(future.done() for future in first))
    waiting = grammars.prepare(requests[2])
    time.sleep(0.1)
    assert not waiting.done()
    grammars.leave("three")
    assert isinstance(waiting.exception(5), ValueError)
    assert allowed(grammars, requests[0], "") == {ord("o")}


def test_a_language_that_nobody_knows_is_told(client: GrammarClient, grammars: Grammars) -> None:
    unknown = request(client, "x", "never checked")
    assert "not known any more" in str(grammars.prepare(unknown).exception(10))


def test_texts_whose_language_dies_end_and_the_next_request_attaches_anew(
    client: GrammarClient, grammars: Grammars
) -> None:
    assert ask(client, regex("mortal")) is None
    first, second = request(client, "1", "mortal"), request(client, "2", "mortal")
    grammars.prepare(first).result(10)
    before = allowed(grammars, first, "")
    for process in languages(client):
        process.kill()
    assert len(allowed(grammars, first, "m")) == 160 and before == {ord("m")}
    assert "process of its grammar has ended" in str(grammars.ended()["1"])
    grammars.leave("1")
    grammars.prepare(second).result(10)
    assert allowed(grammars, second, "mo") == {ord("r")}


def test_a_server_that_ends_is_replaced_and_its_end_is_that_of_its_languages(
    client: GrammarClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SHORTEST_LIFE", 0.0)
    old, waiting = server_of(client), asyncio.run(_killed_while_asked(client))
    assert "has ended; send it again" in str(waiting.error) and not waiting.is_final
    assert ask(client, regex("after+")) is None
    assert server_of(client) != old


def test_a_server_that_a_signal_stops_is_replaced_unless_it_goes_on(
    client: GrammarClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SHORTEST_LIFE", 0.0)
    monkeypatch.setattr(client_module, "MOST_STOPPED", 0.6)
    old = server_of(client)
    old.suspend()
    threading.Timer(0.1, old.resume).start()
    assert ask(client, regex("stopped for a moment")) is None and server_of(client) == old
    old.suspend()
    assert ask(client, regex("stopped for good")) is None, "the next one takes up who has not been heard"
    assert server_of(client) != old


async def _killed_while_asked(client: GrammarClient) -> Verdict:
    asked = [asyncio.create_task(ask_async(client, endless(salt))) for salt in (20, 21, 22)]
    while not any(process.status() == psutil.STATUS_STOPPED for process in languages(client)):
        await asyncio.sleep(0.02)  # which would stay for ever
    orphans = languages(client)
    os.kill(server_of(client).pid, signal.SIGKILL)
    verdicts = await asyncio.gather(*asked)
    psutil.wait_procs(orphans, timeout=10)
    assert not any(process.is_running() for process in orphans)
    return verdicts[0]
