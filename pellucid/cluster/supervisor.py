"""Members, seen by their owner: started through a launcher, heard, named when they end, and ended.

One that dies is heard by the end of its line, or found when it is looked for.  Whatever happens to the owner,
members end with it: they hear the end of their line, too.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from pellucid.cluster.line import Line, wait
from pellucid.cluster.messages import Failed, Message, Ready, Start, Stop, decode, encode, tagged, untagged
from pellucid.nodes.local import LocalLauncher
from pellucid.registry import additions

GRACE = 2.0  # seconds in which others' complaints wait for the cause, and the end of a line for an exit code
BLINK = 0.05  # seconds, as a rule more than enough for that
FAREWELL = 10.0  # seconds that members have to leave by themselves
PATIENCE = 0.1  # seconds that are waited at a time


class Handle(Protocol):
    """A member's process, wherever it runs."""

    @property
    def pid(self) -> int: ...

    @property
    def is_stopped(self) -> bool: ...

    @property
    def is_lost(self) -> bool: ...

    def notes(self) -> bytes: ...

    def reason(self) -> str: ...

    def exit_code(self, seconds: float = 0.0) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> None: ...


class Launcher(Protocol):
    """Gets processes going."""

    def start(self, name: str, node: int = 0) -> tuple[Handle, Line]: ...


class Member:
    """One of them.  standing: what can be said of how far it has come, also when it has died."""

    def __init__(self, name: str, process: Handle, line: Line, standing: object) -> None:
        self.name, self.process, self.line, self.standing = name, process, line, standing
        self.failure: Failed | None = None  # why it says nothing any more
        self._gone_since: float | None = None  # when its line ended; its process is about to

    @property
    def may_speak(self) -> bool:
        return self.failure is None and self._gone_since is None

    def send(self, frame: bytes) -> None:
        """Never waits; what does not fit goes with later frames, or when it is listened to."""
        if self.failure is None:
            self.line.send(frame)

    def receive(self) -> list[Message]:
        """All that it has said, without waiting.  Its end is a `Failed`, after everything else."""
        if self.failure is not None:
            return []
        self.line.flush()
        has_ended = self.process.exit_code() is not None  # asked first: what it said before is heard
        messages: list[Message] = []
        try:
            messages += [decode(frame) for frame in self.line.receive()]
        except EOFError:
            has_ended = self._has_gone()
        if has_ended and not messages:
            messages.append(Failed(self._describe_death(), is_lost=True))
        if messages and isinstance(messages[-1], Failed):
            self.failure = messages[-1]
        return messages

    def _has_gone(self) -> bool:
        """Its line has ended: has its process, or has that had time to?"""
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            return self.process.exit_code(BLINK) is not None or self.process.is_lost
        return self.process.exit_code() is not None or time.monotonic() - self._gone_since > GRACE

    def _describe_death(self) -> str:
        code, standing = self.process.exit_code(), str(self.standing)
        how = f"has died (exit code {code})" if code is not None else "is lost (no exit code)"
        reason = self.process.reason()
        return f"{self.name} {how}{standing and ', '}{standing}{reason and '; '}{reason}"

    def has_left(self) -> bool:
        """Has it ended?  What it says now is not heard any more."""
        try:
            self.line.flush()
            self.line.receive()
        except EOFError:
            return self.process.exit_code(GRACE) is not None
        return self.process.exit_code() is not None


class Supervisor:
    """The members of one owner.  They are ended when it lets go of this, and when it ends."""

    def __init__(self, launcher: Launcher | None = None) -> None:
        self.members: list[Member] = []
        self.failures: list[Failed] = []  # in the order in which they came
        self._launcher = launcher or LocalLauncher()
        weakref.finalize(self, end, self.members, FAREWELL, owner=os.getpid())

    def start(self, name: str, life: str, work: object, *, node: int = 0, standing: object = "") -> Member:
        """Start a member.

        life: "module:function", which is given the member's desk and `work`.  node: where, by the launcher's
        numbers.
        """
        member = Member(name, *self._launcher.start(name, node), standing)
        self.members.append(member)
        level = logging.getLogger("pellucid").getEffectiveLevel()
        self.send(Start(life, tagged(work), level, additions()), to=[member])
        return member

    def send(self, message: Message, *, to: Sequence[Member] | None = None) -> None:
        """Tell all members, or these.  Never waits."""
        frame = encode(message)
        for member in self.members if to is None else to:
            member.send(frame)

    @property
    def lines(self) -> list[Line]:
        """Of those that may still say something."""
        return [member.line for member in self.members if member.may_speak]

    def poll(self, seconds: float = 0.0) -> list[tuple[int, Message]]:
        """What members have said, with their indices; wait for the first word up to `seconds`.

        The end of one is a `Failed`, its last word.
        """
        if seconds > 0:
            wait(self.lines, seconds)
        said = [(i, message) for i, member in enumerate(self.members) for message in member.receive()]
        self.failures += [message for _, message in said if isinstance(message, Failed)]
        return said

    def await_ready(
        self, hear: Callable[[int, Message], None], is_wanted: Callable[[], bool] = lambda: True
    ) -> list[object]:
        """Wait until every member is ready; the facts that each tells then, in order.

        hear: told what else they say meanwhile.  is_wanted: asked now and then.  Raises what the first member
        says that will never be ready.
        """
        ready: dict[int, object] = {}
        while len(ready) < len(self.members):
            if not is_wanted():
                raise RuntimeError("the engine is not wanted any more")
            for index, message in self.poll(PATIENCE):
                if isinstance(message, Ready):
                    ready[index] = untagged(message.facts)
                elif not isinstance(message, Failed):
                    hear(index, message)
            if self.failures:
                cause = self.cause()
                self.end()  # and then nobody writes behind what is raised
                raise ValueError(cause.message) if cause.is_users else RuntimeError(cause.message)
        return [ready[index] for index in range(len(self.members))]

    def cause(self) -> Failed:
        """Why members have failed.  Those that only miss another one wait a little for it to say that."""
        until = time.monotonic() + GRACE
        while all(failure.is_echo for failure in self.failures):
            left = until - time.monotonic()
            if left <= 0 or all(member.failure for member in self.members):
                break
            self.poll(min(left, PATIENCE))
        return min(self.failures, key=lambda failure: failure.is_echo)

    def end(self, seconds: float = 0.0, *, members: Sequence[Member] | None = None) -> None:
        """End all members, or these; for so long they may leave by themselves.

        Nothing happens to those that have ended.
        """
        end(self.members if members is None else members, seconds, owner=os.getpid())


def end(members: Sequence[Member], seconds: float, *, owner: int) -> None:
    """Ask members to leave, make those leave that have not after `seconds`, and see that all have."""
    if os.getpid() != owner:
        return  # a fork of the owner, which has nothing to end
    members = [member for member in members if not member.line.is_closed]
    if seconds > 0:
        _see_off(members, seconds)
    for member in members:
        member.process.kill()
    for member in members:
        member.process.wait()
        member.failure = member.failure or Failed(f"{member.name} was ended")
        member.line.close()


def _see_off(staying: Sequence[Member], seconds: float) -> None:
    until = time.monotonic() + seconds
    for member in staying:
        member.send(encode(Stop()))
    while (staying := [member for member in staying if not member.has_left()]) and time.monotonic() < until:
        wait([member.line for member in staying], PATIENCE)
