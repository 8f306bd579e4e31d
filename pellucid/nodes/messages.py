"""What agents and those who need them say to each other.  What members say is in cluster/messages.py."""

from __future__ import annotations

import platform
from importlib.metadata import version

import msgspec

from pellucid import __version__


class Software(msgspec.Struct, frozen=True):
    """What must be the same on all nodes."""

    pellucid: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> Software:
        return cls(__version__, ".".join(platform.python_version_tuple()[:2]), version("torch"))


class Join(msgspec.Struct):
    """From an agent to the node of rank 0: here is a node."""

    rank: int | None  # None is any that is free
    address: str  # at which its agent listens
    port: int
    num_gpus: int
    software: Software


class Welcome(msgspec.Struct):
    """To that."""

    rank: int = 0
    refusal: str | None = None


class Launch(msgspec.Struct, tag=True):
    """To an agent: this connection is to be a member's line."""

    name: str
    environment: dict[str, str]  # what is not set on its node


class Ask(msgspec.Struct, tag=True):
    """To an agent, about a member that it has started; first `kill` it, or wait for its end."""

    pid: int
    kill: bool = False
    seconds: float = 0.0


class Told(msgspec.Struct):
    """The answer to either."""

    pid: int
    is_known: bool = True
    exit_code: int | None = None
    is_stopped: bool = False
    notes: bytes = b""


Request = Launch | Ask
