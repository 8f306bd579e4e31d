"""Members on other nodes: their agents start them, over connections that become their lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from pellucid.cluster.line import Line
from pellucid.cluster.supervisor import Handle
from pellucid.nodes.connection import dial, hear, read_secret, say
from pellucid.nodes.local import LocalLauncher
from pellucid.nodes.messages import Ask, Launch, Told
from pellucid.nodes.place import Node

PASSED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_")  # variables that members inherit of their owner
PATIENCE = 1.0  # seconds in which an agent tells what it is asked
AT_LEAST = 0.5  # seconds in which an agent learns how a member has ended whose line has


class NodesLauncher:
    """On its own node it starts members itself."""

    def __init__(self, nodes: Sequence[Node], *, here: int) -> None:
        """here: the index of this process's own node."""
        self._nodes, self._here, self._local = nodes, here, LocalLauncher()

    def start(self, name: str, node: int = 0) -> tuple[Handle, Line]:
        """Start a member on a node.  Raises RuntimeError if its agent does not answer."""
        if node == self._here:
            return self._local.start(name)
        address, port = self._nodes[node]
        try:
            connection = dial(address, port, read_secret())
            say(connection, Launch(name, inherited()))
            told = hear(connection, Told)
        except (OSError, EOFError) as error:
            raise RuntimeError(f"node {node} ({address}:{port}) starts no {name}: {error}") from None
        connection.settimeout(None)
        return RemoteProcess(self._nodes[node], told.pid), Line.over(connection)


def inherited() -> dict[str, str]:
    """Of this process's environment, what members everywhere get, unless their node says otherwise."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}


class RemoteProcess:
    """A member's process, as its node's agent knows it."""

    def __init__(self, node: Node, pid: int) -> None:
        self._node, self._pid = node, pid
        self._last = Told(pid)
        self._is_lost = False

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_stopped(self) -> bool:
        return self._ask().is_stopped

    @property
    def is_lost(self) -> bool:
        """Did its agent not answer when it was asked last?"""
        return self._is_lost

    def reason(self) -> str:
        """What else is known of its end."""
        return ""

    def notes(self) -> bytes:
        """As they are, or as they were last if the agent does not answer, or did not when asked last."""
        return (self._last if self._is_lost else self._ask()).notes

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """How it ended.  Asked without time, only what is known: whose line has not ended lives."""
        if seconds and self._last.exit_code is None:
            self._ask(seconds=max(seconds, AT_LEAST))
        return self._last.exit_code

    def kill(self) -> None:
        """End it.  If its agent cannot be reached it ends with its line, or with its node."""
        if self._last.exit_code is None:
            self._ask(kill=True, seconds=AT_LEAST)

    def wait(self) -> None:
        """Whoever has been killed is gone, or out of reach."""

    def _ask(self, *, kill: bool = False, seconds: float = 0.0) -> Told:
        """What the agent says, or the last that it has said."""
        self._is_lost = True
        with suppress(OSError, EOFError), dial(*self._node, read_secret(), patience=PATIENCE) as connection:
            say(connection, Ask(self._pid, kill, seconds))
            told = hear(connection, Told)
            self._is_lost = not told.is_known
            self._last = told if told.is_known else self._last
        return self._last
