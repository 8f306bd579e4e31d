"""Ctrl-C, held back while the state of an engine is not whole.

Python runs a signal's handler in the main thread, at almost any place.  KeyboardInterrupt would then cut a
step in half: blocks without their KV, tokens that nobody has been told of.  Knows nothing of engines.
"""

from __future__ import annotations

# signal.signal turns handlers into enums and back, which takes it ten times as long as the rest.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from signal import SIGINT
from threading import get_ident
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class HeldBack:
    """`with held_back:` keeps SIGINT's handler from running until the block is done; blocks may be nested.

    A second Ctrl-C is not held back, and ends the block's effect, for what takes so long may never end.  In
    threads other than the main one, where Python runs no handler, a block does nothing.
    """

    def __init__(self) -> None:
        self._main_thread = threading.main_thread().ident
        self._depth = 0  # of nested blocks
        self._handler: Handler | None = (
            None  # the one that waits; None if there is none that Python would run
        )
        self._has_come = False

    def __enter__(self) -> None:
        if get_ident() != self._main_thread:
            return
        if not self._depth:
            handler = _signal.getsignal(SIGINT)
            self._handler, self._has_come = handler if callable(handler) else None, False
            if self._handler is not None:
                _signal.signal(SIGINT, self._note)  # from here on nothing is interrupted
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() != self._main_thread or not self._depth:  # 0: a second Ctrl-C has ended the block
            return
        self._depth -= 1
        if not self._depth and self._handler is not None:
            _signal.signal(SIGINT, self._handler)
            if self._has_come:
                self._deliver(self._handler)

    def let_through(self) -> None:
        """Interrupt now, if a Ctrl-C has come: for places within a block at which all is whole."""
        if self._has_come and self._handler is not None and get_ident() == self._main_thread:
            self._deliver(self._handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        assert self._handler is not None, "nobody is to be told"
        if not self._has_come:
            self._has_come = True
            return
        # What the handler raises may leave this block before its end: nothing of it may remain.
        self._depth, self._has_come = 0, False
        _signal.signal(SIGINT, self._handler)
        self._handler(number, frame)

    def _deliver(self, handler: Handler) -> None:
        self._has_come = False
        handler(SIGINT, None)


held_back = HeldBack()  # the one of this process, as its signal handlers are
