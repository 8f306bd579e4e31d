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
        raise ValueError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror or error}; "
            "choose another --port"
        ) from error
    return listener


def url_of(listener: socket.socket, options: ServeOptions) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
