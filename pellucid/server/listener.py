"""The server's address, taken before anything slow is imported or loaded."""

from __future__ import annotations

import socket

from pellucid.server.options import ServeOptions


def bind(options: ServeOptions) -> socket.socket:
    """Take the address, before anything slow begins.  Raises ValueError if it cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise _taken(error, options) from error
    return listener


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
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
