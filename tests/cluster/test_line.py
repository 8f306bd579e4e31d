"""A line: frames whole and in order, nobody who waits for a slow reader, and the end of either side."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from pellucid.cluster import line
from pellucid.cluster.line import Line, wait


def pair() -> tuple[Line, Line]:
    ours, theirs = Line.pair()
    return ours, Line(*theirs)


def received(end: Line, number: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < number:
        wait([end], 10)
        frames += end.receive()
    return frames


def test_frames_come_whole_and_in_order_however_long() -> None:
    rng = random.Random(0)
    lengths = [0, 1, 65528, 65536, 65537, 5_000_000, *(rng.randrange(200_000) for _ in range(100))]
    frames = [rng.randbytes(length) for length in lengths]
    ours, theirs = pair()
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(received(theirs, len(frames))))
    reader.start()
    for frame in frames:
        ours.send(frame)
    while ours.has_unsent:
        wait([ours], 10)
        ours.flush()
    reader.join(20)
    assert got == frames


def test_who_sends_never_waits_and_what_does_not_fit_goes_later() -> None:
    ours, theirs = pair()
    for number in range(100):
        ours.send(b"%d" % number * 100_000)
    assert ours.has_unsent
    frames: list[bytes] = []
    while len(frames) < 100:
        frames += theirs.receive()
        ours.flush()
    assert [int(frame[: len(frame) // 100_000]) for frame in frames] == list(range(100))
    assert not ours.has_unsent


def test_words_may_cross() -> None:
    ours, theirs = pair()
    for _ in range(20):
        ours.send(b"a" * 200_000)
        theirs.send(b"b" * 200_000)
    here: list[bytes] = []
    there: list[bytes] = []
    while len(here) + len(there) < 40:
        wait([ours], 10)
        ours.flush()
        here += ours.receive()
        theirs.flush()
        there += theirs.receive()
    assert {*here} == {b"b" * 200_000} and {*there} == {b"a" * 200_000}


def test_last_words_are_heard_before_the_end() -> None:
    ours, theirs = pair()
    ours.send(b"unread by the other side when it goes")
    theirs.send(b"the last words")
    theirs.close()
    assert ours.receive() == [b"the last words"]
    with pytest.raises(EOFError):
        ours.receive()
    ours.send(b"to nobody")
    assert not ours.has_unsent


def test_a_frame_that_was_cut_off_is_none() -> None:
    ours, theirs = Line.pair()
    os.write(theirs[1], b"\x09\0\0\0\0\0\0\0half")
    for descriptor in theirs:
        os.close(descriptor)
    assert ours.receive() == []
    with pytest.raises(EOFError):
        ours.receive()


def test_many_frames_that_come_at_once_are_received_at_once() -> None:
    ours, theirs = pair()
    for number in range(1000):
        ours.send(b"%d" % number)
    assert theirs.receive() == [b"%d" % number for number in range(1000)]
    assert theirs.receive() == []


def test_who_waits_sleeps_until_there_is_something() -> None:
    ours, theirs = pair()
    threading.Timer(0.3, ours.send, (b"at last",)).start()
    began = time.thread_time()
    wait([theirs], None)
    assert theirs.receive() == [b"at last"]
    assert time.thread_time() - began < 0.03


def test_who_waits_for_the_end_takes_nothing_and_is_not_woken_by_words() -> None:
    ours, theirs = pair()
    ours.send(b"hello")
    assert not theirs.wait_for_end(0.1)
    threading.Timer(0.2, ours.close).start()
    assert theirs.wait_for_end(10)
    assert theirs.receive() == [b"hello"]


def test_who_waits_for_room_is_not_woken_by_words() -> None:
    ours, theirs = pair()
    theirs.send(b"hello")
    while not ours.has_unsent:
        ours.send(b"a" * 100_000)
    waiting = threading.Thread(target=ours.wait_for_room)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    theirs.close()
    waiting.join(10)
    ours.flush()
    assert not waiting.is_alive() and not ours.has_unsent


def test_to_wait_on_several_is_to_wait_for_any() -> None:
    pairs = [pair() for _ in range(3)]
    pairs[1][0].send(b"it is me")
    wait([theirs for _, theirs in pairs], 10)
    assert [theirs.receive() for _, theirs in pairs] == [[], [b"it is me"], []]


def test_nothing_is_lost_where_the_system_holds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "BUFFER", 1)
    ours, theirs = pair()
    frames = [bytes([number]) * 9_999 for number in range(50)]
    got: list[bytes] = []
    for frame in frames:
        ours.send(frame)
    while len(got) < 50:
        ours.flush()
        got += theirs.receive()
    assert got == frames
