"""By which names a server may be called.

A page of another host can have its own name point at this machine (DNS rebinding) and then speaks to a server
here as if it were its own.  What it cannot change is the name that its requests carry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address
from socket import gethostname
from urllib.parse import urlsplit

from pellucid.server.options import ServeOptions

ANY = "*"
MOST_HEADERS = 256  # whose answer is remembered
OWN_ENDINGS = (".localhost", ".internal")  # no public name has them; containers know their host by the second


def make_host_check(options: ServeOptions) -> Callable[[str | None], bool]:
    """Whether a request with this header Host is welcome.

    Only a server that other machines cannot reach asks by itself: its users trust whoever can connect.  An
    address is always welcome, for it is nobody's name, and so is a request without the header, for no browser
    sends one.
    """
    given = {host_name(host) for host in options.allowed_hosts}
    if not given and not _is_here(host_name(options.host)):
        return lambda header: True
    origins = {urlsplit(origin).hostname or ANY for origin in options.allowed_origins}
    allowed = given | origins
    if ANY in allowed:
        return lambda header: True

    @lru_cache(MOST_HEADERS)
    def is_welcome(header: str | None) -> bool:
        if not header:
            return True
        name = host_name(header)
        return name in allowed or _is_here(name) or _is_address(name)

    return is_welcome


def host_name(header: str) -> str:
    """A name or an address, without the port."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    if header.count(":") == 1:
        header = header.partition(":")[0]
    return header.rstrip(".")


def _is_here(name: str) -> bool:
    """Is it this machine's, for itself?"""
    own = gethostname().lower()
    if name in ("localhost", own, f"{own}.local") or name.endswith(OWN_ENDINGS):
        return True
    return _is_address(name) and ip_address(name).is_loopback


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
