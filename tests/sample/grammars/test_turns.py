"""Who compiles when, and what an engine is told, in rare orders of events: on a library that sleeps."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from pellucid.features.base import AskingRow
from pellucid.features.grammar import host as engine_side
from pellucid.sample.grammars import server as server_side
from pellucid.sample.grammars.base import GrammarRef, GrammarSpec, Matcher, Spelling
from pellucid.sample.grammars.server import GrammarServer, Language
from pellucid.sample.grammars.wire import Compile, Filled, Verdict, decode_verdict, frame, read_frame
from pellucid.sampling_params import SamplingParams
from pellucid.types import Request
from tests.patience import PATIENCE, eventually
from tests.sample.grammars.engine import grammars_of

SPELLING = Spelling(token_bytes=[b"a"] * 64, vocab_size=64, stop_token_ids=(0,))


class Anything:
    """The language of all texts, and a matcher of it."""

    num_bytes, is_done = 0, False

    def start(self) -> Matcher:
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def fill(self, masks: np.ndarray, place: int) -> None:
        masks[place] = -1

    def rollback(self, num_tokens: int) -> None:
        pass


class Sleeper:
    """A library whose compiles take as many seconds as their text says."""

    def __init__(self, spelling: Spelling) -> None:
        pass

    def compile(self, spec: GrammarSpec) -> Anything:
        time.sleep(float(spec.text))
        return Anything()


@dataclass
class Setting:
    """A grammar server in a thread, and connections to it."""

    address: str
    server: GrammarServer
    connections: list[socket.socket] = field(default_factory=list)

    def ask(self, seconds: str, *, name: str = "", client: str = "") -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(self.address)
        connection.sendall(frame(Compile(name or seconds, "regex", seconds, 60.0, client)))
        self.connections.append(connection)
        return connection

    def request(self, name: str, digest: str) -> Request:
        ref = GrammarRef(address=self.address, digest=digest)
        return Request(id=name, prompt_token_ids=[1], sampling=SamplingParams(), grammar=ref.encode())


def told(connection: socket.socket) -> Verdict:
    return decode_verdict(read_frame(connection))


@pytest.fixture
def setting(tmp_path: Path) -> Generator[Setting, None, None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := str(tmp_path / "s"))
        listener.listen(100)
        server = GrammarServer(listener, Sleeper(SPELLING), SPELLING, most_held=4)
        owner, until = os.pipe()
        thread = threading.Thread(target=server.run, args=(owner,))
        thread.start()
        setting = Setting(address, server)
        yield setting
        os.write(until, b"-")  # to close it would not do: the forked processes have it, too
        thread.join()
        for file in (owner, until):
            os.close(file)
        for language in [*server._held.values(), *server._compiling()]:
            psutil.Process(language.pid).kill()
            os.waitpid(language.pid, 0)
        for connection in setting.connections:
            connection.close()


def test_a_process_that_is_stopped_when_it_has_just_answered_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, stop = setting.server, setting.server._stop

    def stop_late(language: Language, now: float) -> None:
        if language.question.text == "0.3":  # its turn is over, but meanwhile it answers
            assert language.control is not None
            select.select([language.control], [], [])
        stop(language, now)

    monkeypatch.setattr(server, "_stop", stop_late)
    setting.ask("60")
    eventually(lambda: bool(server._slow))
    assert told(setting.ask("0.3")).error is None
    process = psutil.Process(server._held["0.3"].pid)
    eventually(lambda: process.status() != psutil.STATUS_STOPPED)


def test_a_client_with_many_compiles_makes_room_for_another(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "MOST_COMPILING", 4)
    bombs = [setting.ask("60", name=f"bomb {i}", client="a") for i in range(6)]
    eventually(lambda: len([*setting.server._compiling()]) == 4 and len(setting.server._queued) == 2)
    assert told(setting.ask("0", client="b")).error is None
    ready, _, _ = select.select(bombs, [], [], 0)
    assert [told(bomb) for bomb in ready] == [
        Verdict("is one of too many at once; send it again", is_final=False)
    ]


def test_who_leaves_while_a_language_is_attached_to_takes_nobody_along(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(setting.ask("0")).error is None
    heard, accept = threading.Event(), setting.server._accept

    def accept_late() -> None:
        accept()
        heard.wait()

    monkeypatch.setattr(setting.server, "_accept", accept_late)
    setting.server._selector.modify(setting.server._listener, select.EPOLLIN, accept_late)
    grammars = grammars_of(64)
    attached = [grammars.prepare(setting.request(name, "0")) for name in "AB"]
    time.sleep(0.05)
    grammars.leave("A")
    heard.set()
    attached[1].result(30)
    grammars.shutdown()


def test_an_answer_that_comes_late_is_not_taken_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = grammars_of(64)
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    done = engine_side.Future[None]()
    done.set_result(None)
    language = engine_side.Language(GrammarRef(address="x", digest="d"), grammars._memory)
    language._socket.close()
    language._socket = ours
    key = ("x", "d")
    grammars._languages[key] = (language, done)
    rows = {}
    for name in "AB":
        language.request_ids.add(name)
        request = Request(id=name, prompt_token_ids=[1], sampling=SamplingParams())
        grammars._texts[name] = engine_side.Text(language, key, 1, None, done)
        rows[name] = AskingRow(0, request, np.array([1], dtype=np.int32), 0, samples=True)
    grammars.late([rows["A"]])
    assert "its grammar has ended" in str(grammars.ended()["A"])
    with suppress(BrokenPipeError):
        theirs.sendall(frame(Filled({})))
    grammars.late([rows["B"]])
    assert "its grammar has ended" in str(grammars.ended()["B"])
    theirs.close()
    grammars.shutdown()
