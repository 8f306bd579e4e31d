"""Who waits is woken by a ring from any thread, and by lines."""

from __future__ import annotations

import os
import threading
import time

from pellucid.bell import Bell


def test_a_ring_from_another_thread_wakes_who_waits() -> None:
    bell, began = Bell(), time.monotonic()
    threading.Timer(0.05, bell.ring).start()
    bell.wait([], 10.0, lambda: True)
    assert time.monotonic() - began < 5


def test_it_does_not_wait_if_there_is_something_to_do_and_a_ring_is_heard_once() -> None:
    bell, began = Bell(), time.monotonic()
    bell.wait([], 10.0, lambda: False)
    bell.ring()  # nobody waits, so nothing is written
    bell.wait([], 0.01, lambda: True)
    assert 0.01 <= time.monotonic() - began < 5


def test_lines_wake_too() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"!")
    with open(reads, "rb") as line, open(writes, "wb"):
        began = time.monotonic()
        Bell().wait([line], 10.0, lambda: True)
        assert time.monotonic() - began < 5
