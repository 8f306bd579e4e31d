"""`pellucid route`: one address for servers that compute prompts and servers that go on from there."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `route` understands."""
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="servers for prompts")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="servers that go on")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default 127.0.0.1")
    parser.add_argument(
        "--server-timeout", type=float, default=30.0, metavar="S",
        help="seconds behind which a server that says nothing is lost, and another one is asked; and behind "
        "which this process ends if a signal has stopped it; default 30",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, help="port, default 8000; 0 is any that is free")


def run(args: argparse.Namespace) -> int:
    """Route until SIGTERM or Ctrl-C."""
    try:
        import uvicorn

        from pellucid.proxy.app import build_app
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'pellucid[serve]'") from error
    if not args.server_timeout > 0:
        raise ValueError(f"--server-timeout is {args.server_timeout:g}, must be above 0 seconds")
    from pellucid.proxy.servers import Fleet, Server
    from pellucid.proxy.warden import warden
    from pellucid.server.listener import bind
    from pellucid.server.options import ServeOptions

    prefill, decode = (
        [Server(url, args.server_timeout) for url in each] for each in (args.prefill, args.decode)
    )
    fleet = Fleet(prefill, decode)
    listener = bind(ServeOptions(host=args.host, port=args.port))
    listener.listen()  # who reads the next line may connect at once, and waits
    host, port = listener.getsockname()[:2]
    roles = f"{len(fleet.prefill)} for prompts and {len(fleet.decode)} that go on"
    sys.stdout.write(f"ready: http://{host}:{port} routes to {roles}\n")
    sys.stdout.flush()
    config = uvicorn.Config(build_app(fleet), log_level="warning", access_log=False)
    with warden(args.server_timeout):
        uvicorn.Server(config).run(sockets=[listener])
    return 0
