"""A node's agent: it joins the node of rank 0, starts members for whoever knows the secret, and ends them.

A member's line is the connection over which it was asked for, so no word of a step passes the agent.  When
the head has gone, what its members have not ended by themselves is ended here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress

import msgspec

from pellucid.nodes.connection import Refused, admit, dial, hear, listen, read_secret, receive, say
from pellucid.nodes.local import LocalProcess, spawn
from pellucid.nodes.messages import Ask, Join, Launch, Request, Software, Told, Welcome
from pellucid.platform import has_gpu

logger = logging.getLogger(__name__)
AGAIN = 0.5  # seconds between two attempts to reach the head
GRACE = 2.0  # seconds in which members leave by themselves when the head has gone


class Agent:
    """One node, for one head."""

    def __init__(self, host: str, secret: bytes) -> None:
        """host: this node's address.  Raises ValueError if it is not one."""
        self._secret = secret
        self._listener = listen(host)
        self.port: int = self._listener.getsockname()[1]
        self._members: dict[int, LocalProcess] = {}  # by pid
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Answer everyone, each in a thread, until closed."""
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                admit(connection, self._secret)
                told = self._follow(hear(connection, Request), connection)  # type: ignore[arg-type]
                say(connection, told)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                logger.warning("a connection was closed: %s", error)

    def _follow(self, request: Request, connection: socket.socket) -> Told:
        if isinstance(request, Launch):
            return self._launch(request, connection)
        return self._look(request)

    def _launch(self, launch: Launch, connection: socket.socket) -> Told:
        reads, writes = os.dup(connection.fileno()), os.dup(connection.fileno())
        try:
            process = spawn(launch.name, (reads, writes), {**launch.environment, **os.environ})
        finally:
            os.close(reads)
            os.close(writes)
        self._members[process.pid] = process
        return Told(process.pid)

    def _look(self, ask: Ask) -> Told:
        process = self._members.get(ask.pid)
        if process is None:
            return Told(ask.pid, is_known=False)
        if ask.kill:
            process.kill()
        code = process.exit_code(ask.seconds)
        return Told(ask.pid, exit_code=code, is_stopped=process.is_stopped, notes=process.notes())

    def close(self) -> None:
        """Start no more, and end those that have not ended after `GRACE` seconds."""
        self._listener.close()
        until = time.monotonic() + GRACE
        for process in self._members.values():
            if process.exit_code(max(until - time.monotonic(), 0)) is None:
                process.kill()
                process.wait()


def serve_head(address: str, port: int, *, rank: int | None, host: str | None) -> None:
    """Join the node of rank 0, which may not have started yet, and serve until it has gone.

    address, port: of that node.  host: this node's address; default the one from which it reaches the other.
    Raises ValueError if this node is refused, with the reason.
    """
    secret = read_secret()
    head = _reach(address, port, secret, host)
    own: str = head.getsockname()[0]
    agent = Agent(own, secret)
    try:
        say(head, Join(rank, own, agent.port, _num_gpus(), Software.here()))
        head.settimeout(None)
        welcome = hear(head, Welcome)
        if welcome.refusal is not None:
            raise ValueError(welcome.refusal)
        logger.info("this is node %d (%s), of the head at %s:%d", welcome.rank, own, address, port)
        receive(head, 1)  # it says nothing more
    except (OSError, EOFError) as error:
        logger.info("the head has gone: %s", error)
    finally:
        head.close()
        agent.close()


def _reach(address: str, port: int, secret: bytes, host: str | None) -> socket.socket:
    """A connection to the head, however long that takes.  Raises ValueError if the secret is another one."""
    told = 0.0
    while True:
        try:
            return dial(address, port, secret, source=host)
        except Refused as error:
            raise ValueError(str(error)) from None
        except OSError as error:
            if host is not None and not _is_own(host):
                raise ValueError(f"node_addr is {host}, which is no address of this machine") from None
            if time.monotonic() - told > 30:
                logger.warning("waiting for the node of rank 0 at %s:%d (%s)", address, port, error)
                told = time.monotonic()
            time.sleep(AGAIN)


def _is_own(host: str) -> bool:
    with suppress(ValueError):
        listen(host).close()
        return True
    return False


def _num_gpus() -> int:
    if not has_gpu():
        return 0
    import torch

    return torch.cuda.device_count()
