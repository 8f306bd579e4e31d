"""The server's address, taken before anything slow is imported or loaded."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress

from pellucid.server.options import ServeOptions


def bind(options: ServeOptions) -> socket.socket:
    """Take the address, before anything slow begins.  Raises ValueError if it cannot be had."""
    if options.uds is not None:
        return _bind_path(options.uds)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise _taken(error, options) from error
    return listener


def _bind_path(path: str) -> socket.socket:
    """A socket that an earlier server has left behind is in nobody's use."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ValueError(f"uds is {path!r}, which is there and no socket; choose another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ValueError(f"uds is {path!r}, where another server listens; choose another path")
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {path!r}: {error.strerror or error}") from error
    except ValueError:
        listener.close()
        raise
    return listener


@contextmanager
def leaving_no_path(options: ServeOptions) -> Generator[None, None, None]:
    """At the end the path that `bind` has taken is removed, unless another server has it by then."""
    own = None if options.uds is None else os.stat(options.uds)
    try:
        yield
    finally:
        with suppress(OSError):
            if own is not None and options.uds is not None and os.path.samestat(own, os.stat(options.uds)):
                os.unlink(options.uds)


def listen(listener: socket.socket, options: ServeOptions, backlog: int) -> None:
    """Let clients in.  Raises ValueError if another server, bound in the meantime too, was first.

    uvloop's own call would say nothing of it.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _taken(error, options) from error


def _taken(error: OSError, options: ServeOptions) -> ValueError:
    reason = error.strerror or error
    return ValueError(f"cannot listen on {options.host} port {options.port}: {reason}; choose another --port")


def url_of(listener: socket.socket, options: ServeOptions) -> str:
    """Where clients find it."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
