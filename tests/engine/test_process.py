"""What goes between an engine's process and its owner, and the loop that answers; here in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import zmq

from pellucid.engine.process import (
    Abort,
    Add,
    ClearPrefixCache,
    Order,
    Packed,
    Stop,
    Turn,
    View,
    Watch,
    decode_message,
    decode_orders,
    decode_request,
    encode,
    pack,
    serve,
)
from pellucid.engine.xray import Frame
from pellucid.types import FinishReason, Request, SamplingParams, SeqUpdate, TokenLogprobs
from tests.engine.test_core import make_engine
from tests.schedule.device import make_request

RICH = SamplingParams(
    n=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=0.1, frequency_penalty=0.2,
    repetition_penalty=1.1, seed=-(2**63), stop=["a", "\n"], stop_token_ids=[3], ignore_eos=True,
    max_tokens=None, min_tokens=1, logprobs=2, prompt_logprobs=0, skip_special_tokens=False,
    include_stop_str_in_output=True, logit_bias={5: -1.5}, allowed_token_ids=[5, 6], bad_words=["x"],
)  # fmt: skip


def add(request: Request) -> Add:
    return Add(request.id, msgspec.Raw(encode(request)))


def test_a_request_arrives_as_it_was_sent() -> None:
    request = Request(
        id="1_0", prompt_token_ids=[1, 2], sampling=RICH, seed=2**63 - 1, eos_token_ids=(0, 7),
        bad_words_token_ids=((1, 2), (3,)), lora="l", cache_salt="s", grammar="g", is_quiet=True,
        is_streamed=True, priority=-2, arrival=1.5, kv_transfer="k",
    )  # fmt: skip
    same = [f.name for f in fields(Request) if getattr(request, f.name) == f.default]
    assert not same, f"this test says nothing about {same}"
    (order,) = decode_orders(encode([add(request)]))
    assert isinstance(order, Add) and order.request_id == "1_0"
    assert decode_request(order.request) == request


def test_numpys_numbers_arrive_as_pythons() -> None:
    sampling = SamplingParams(top_k=np.int64(3), logit_bias={np.int64(4): np.float32(0.5)})  # type: ignore[arg-type,dict-item]
    request = Request(id="a", prompt_token_ids=list(np.arange(3)), sampling=sampling)  # type: ignore[arg-type]
    assert decode_request(encode(request)) == Request(
        id="a", prompt_token_ids=[0, 1, 2], sampling=SamplingParams(top_k=3, logit_bias={4: 0.5})
    )


def test_an_update_arrives_as_it_was_sent() -> None:
    engine, _ = make_engine()
    logprobs = [TokenLogprobs([5, 6], [-0.5, -1.5], 1)]
    updates = [
        SeqUpdate("a", [5]),
        SeqUpdate("b", [5, 6], logprobs, logprobs, FinishReason.STOP, "stop", 16, 1.25, "error"),
        SeqUpdate("c", [], stop_reason=7),
    ]
    turn = Turn([pack(update) for update in updates], engine.stats(), 3, True, "dead")
    received = decode_message(encode(turn))
    assert isinstance(received, Turn)
    assert [SeqUpdate(*packed) for packed in received.updates] == updates
    assert (received.stats, received.num_heard, received.has_work, received.error) == (
        turn.stats,
        3,
        True,
        "dead",
    )


def test_the_packed_update_has_every_field() -> None:
    assert get_args(Packed) == tuple(get_type_hints(SeqUpdate).values())


@contextmanager
def serving(dies_in: str = "", **options: int) -> Iterator[zmq.Socket[bytes]]:
    """An engine's process, but for the process."""
    engine, executor = make_engine(**options)
    executor.dies_in = dies_in
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://engine")
        theirs.connect("inproc://engine")
        thread = threading.Thread(target=serve, args=(engine, theirs))
        thread.start()
        yield ours
        ours.send(encode([Stop()]))
        thread.join(10)
        assert not thread.is_alive()


def turns(socket: zmq.Socket[bytes], num_heard: int) -> Iterator[Turn]:
    """What the engine says until it has read so many messages and has nothing to do."""
    while socket.poll(10_000):
        turn = decode_message(socket.recv())
        assert isinstance(turn, Turn)
        yield turn
        if turn.num_heard == num_heard and not turn.has_work:
            return
    pytest.fail("the engine says nothing")


def ends(said: list[Turn]) -> dict[str, FinishReason]:
    updates = [SeqUpdate(*packed) for turn in said for packed in turn.updates]
    return {u.request_id: u.finish_reason for u in updates if u.finish_reason is not None}


def test_all_orders_of_a_message_are_followed_before_the_next_turn() -> None:
    with serving() as socket:
        names = "abc"
        socket.send(encode([add(make_request(name, max_tokens=4)) for name in names]))
        said = list(turns(socket, 1))
    tokens = [[packed[1] for packed in turn.updates] for turn in said]
    assert all(len(row) == 3 for row in tokens if row), "the three ran in the same steps"
    assert ends(said) == dict.fromkeys(names, FinishReason.LENGTH)
    assert said[-1].stats.num_sampled_tokens == 12 and said[-1].error is None


def test_aborts_are_answered_and_an_abort_of_nobody_is_acknowledged() -> None:
    with serving() as socket:
        socket.send(encode([add(make_request("a", max_tokens=40)), Abort("a")]))
        assert ends(list(turns(socket, 1))) == {"a": FinishReason.ABORT}
        socket.send(encode([Abort("nobody")]))
        (turn,) = turns(socket, 2)
        assert turn.updates == []


def test_a_cleared_prefix_cache_is_empty() -> None:
    prompt = list(range(12))
    with serving() as socket:
        for num_heard, extra in ((1, []), (2, []), (3, [ClearPrefixCache()])):
            orders: list[Order] = [*extra, add(make_request(str(num_heard), prompt, max_tokens=2))]
            socket.send(encode(orders))
            said = list(turns(socket, num_heard))
    assert said[-1].stats.num_prompt_tokens == 36
    assert said[-1].stats.num_cached_tokens == 8, "of the second request alone"


def test_a_watched_engine_shows_what_it_does_until_it_rests() -> None:
    with serving() as socket:
        socket.send(encode([Watch(True), add(make_request("a", max_tokens=40))]))
        frames: list[Frame] = []
        while socket.poll(500):
            message = decode_message(socket.recv())
            frames += [message.frame] if isinstance(message, View) else []
        socket.send(encode([Watch(False), add(make_request("b", max_tokens=40))]))
        list(turns(socket, 2))
    assert frames[0].is_first and not any(frame.is_first for frame in frames[1:])
    assert sum(sum(step.rows[3::4]) for frame in frames for step in frame.steps) == 40
    assert not frames[-1].running, "the last one is of the end"


def test_an_engine_that_has_nothing_to_do_notices_that_a_worker_has_died(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    monkeypatch.setattr("pellucid.engine.process.IDLE_SECONDS", 0.01)
    with serving() as socket:
        socket.send(encode([add(make_request("a", max_tokens=4))]))
        assert list(turns(socket, 1))[-1].error is None
        while socket.poll(100):  # an engine at rest says so once
            socket.recv()
    with serving(dies_in="idleness") as socket:
        (turn,) = turns(socket, 0)
        assert turn.error is not None and "worker 3 has died" in turn.error


def test_a_request_that_cannot_be_read_is_answered_and_harms_no_other() -> None:
    odd = make_request("odd")
    object.__setattr__(odd, "priority", "high")
    with serving() as socket:
        socket.send(encode([add(odd)]))
        said = list(turns(socket, 1))
        assert ends(said) == {"odd": FinishReason.ERROR}
        error = SeqUpdate(*said[-1].updates[0]).error
        assert error is not None and "cannot be read" in error and "priority" in error
        socket.send(encode([add(make_request("b", max_tokens=2))]))
        assert ends(list(turns(socket, 2))) == {"b": FinishReason.LENGTH}
