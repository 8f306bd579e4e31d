"""A process that serves another one: `python -m pellucid.member IN OUT NOTES NAME`.

IN and OUT are its end of the line to its owner, whose first word says what it is to do; NOTES is memory that
its owner can read.  It ends when its owner does, however that ends, and whatever it is doing then itself.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import threading
from contextlib import suppress

from tqdm import tqdm

from pellucid import registry
from pellucid.cluster.desk import Desk, OwnerGone
from pellucid.cluster.line import Line
from pellucid.cluster.messages import Start, untagged
from pellucid.nodes.local import NOTES, TITLE

LOOK_EVERY = 1.0  # seconds


def main() -> None:
    """The process's life."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its owner's to answer; this process ends with it
    reads, writes, notes, title = sys.argv[1:]
    line = Line(int(reads), int(writes))
    live(line, title.removeprefix(TITLE), memoryview(mmap.mmap(int(notes), NOTES)))


def live(line: Line, name: str, notes: memoryview) -> None:
    """Do what the other end of the line says, and end this process."""
    threading.Thread(target=_leave_with_owner, args=(line,), daemon=True).start()
    desk = Desk(line, name, notes)
    try:
        start = desk.next()
        assert isinstance(start, Start), start
        logging.basicConfig(level=start.log_level, format=f"%(levelname)s {desk.name}: %(message)s")
        tqdm.set_lock(
            threading.RLock()
        )  # its own is one of the system's, which a killed process leaves behind
        registry.adopt(start.additions)
        registry.load_object(start.life)(desk, untagged(start.work))
    except OwnerGone:
        _leave(1)
    except Exception as error:
        desk.fail(error)
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End this process at once, when all is said and given back.

    The interpreter would wait for threads, and take seconds to take itself apart.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # its caller has closed it, or nobody reads it
            stream.flush()
    os._exit(code)


def _leave_with_owner(line: Line) -> None:
    owner = os.getppid()
    while not line.wait_for_end(LOOK_EVERY) and os.getppid() == owner:
        pass  # looks, too: a fork of the owner may hold the line and live on
    os._exit(1)


if __name__ == "__main__":
    main()
