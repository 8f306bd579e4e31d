"""The ring: every reader gets every message, whole and in order; a full one is told, an idle one sleeps."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
import time
from pathlib import Path

import pytest

from pellucid.executor.ring import RingReader, RingWriter

CONTEXT = multiprocessing.get_context("spawn")


def make_ring(num_readers: int, **sizes: int) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter(CONTEXT, num_readers, **sizes)
    return writer, [RingReader(end) for end in writer.ends]


def no_room() -> None:
    raise TimeoutError


def test_all_readers_get_all_messages_however_long() -> None:
    rng = random.Random(0)
    lengths = [1, 63, 64, 65, 128, 1000, 5000, *(rng.randrange(1, 700) for _ in range(300))]
    messages = [rng.randbytes(length) for length in lengths]
    writer, readers = make_ring(3, num_slots=4, slot_bytes=64)
    got: list[list[bytes]] = [[] for _ in readers]

    def read_all(index: int) -> None:
        for _ in messages:
            got[index].append(readers[index].read())

    threads = [threading.Thread(target=read_all, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message, lambda: time.sleep(0))
    for thread in threads:
        thread.join(10)
    assert got == [messages] * 3


def test_a_reader_that_stops_fills_the_ring_and_loses_nothing() -> None:
    writer, (quick, slow) = make_ring(2, num_slots=4, slot_bytes=8)
    for i in range(4):
        writer.write(b"%d" % i, no_room)
        assert quick.read() == b"%d" % i
    assert writer.is_full
    with pytest.raises(TimeoutError):
        writer.write(b"one too many", no_room)
    assert [slow.read() for _ in range(4)] == [b"0", b"1", b"2", b"3"]


def test_a_reader_learns_that_the_writer_has_gone() -> None:
    writer, (reader,) = make_ring(1)
    writer.write(b"the last words", no_room)
    del writer
    assert reader.read() == b"the last words"
    with pytest.raises(EOFError):
        reader.read()


def test_a_reader_that_has_gone_does_not_harm_the_others() -> None:
    writer, (gone, reader) = make_ring(2)
    writer.ends[0].bell.close()
    del gone
    writer.write(b"still here", no_room)
    assert reader.read() == b"still here"


def test_who_waits_sleeps() -> None:
    writer, (reader,) = make_ring(1)
    threading.Timer(0.3, writer.write, (b"at last", no_room)).start()
    began = time.thread_time()
    assert reader.read() == b"at last"
    assert time.thread_time() - began < 0.03


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_has_no_name_to_collide_with_or_to_be_left_behind() -> None:
    writer, _ = make_ring(1)
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if " rw-s " in line and f"/pym-{os.getpid()}-" in line]
    assert writer and shared and all(line.endswith("(deleted)") for line in shared)
