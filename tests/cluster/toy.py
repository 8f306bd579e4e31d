"""A member without work: it says what it is asked to, and things happen to it."""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from pellucid.cluster.desk import Desk
from pellucid.cluster.messages import Answer, Call, Ready, Stop, tagged, untagged
from pellucid.registry import Registry, load_object

LIFE = "tests.cluster.toy:live"


class PeerError(RuntimeError):
    """What a member raises that misses another one."""


class Toy(msgspec.Struct):
    """What happens in its start."""

    raises: str = ""  # "module:Exception"
    says: str = ""
    path: str = ""  # what to import
    after: float = 0.0  # seconds


def live(desk: Desk, toy: Toy) -> None:
    time.sleep(toy.after)
    if toy.path:
        load_object(toy.path)
    if toy.raises:
        raise load_object(toy.raises)(toy.says)
    desk.send(Ready(tagged("here I am")))
    while not isinstance(message := desk.next(), Stop):
        assert isinstance(message, Call), message
        desk.send(Answer(tagged(answer(message.name, [*map(untagged, message.args)]))))


def answer(name: str, args: list[object]) -> object:
    match name, args:
        case "echo", [value]:
            return value
        case "sleep", [float(seconds)]:
            time.sleep(seconds)
        case "stop", []:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "die", []:
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit", []:
            os._exit(3)
        case "hang up", []:
            for descriptor in sys.argv[1:3]:
                os.dup2(os.open(os.devnull, os.O_RDWR), int(descriptor))
            time.sleep(60)
        case "fork", []:  # a process that has a share in the line
            if not os.fork():
                time.sleep(60)
        case "path", []:
            return [sys.path, os.getcwd()]
        case _:
            raise ArithmeticError("a toy's")
    return None


def __getattr__(name: str) -> object:
    """`loads_mine` is there where the entry "mine" is known that the test's owner has registered."""
    if name == "loads_mine":
        return Registry("toy kind of a test", {}).load("mine")
    raise AttributeError(name)
