"""`pellucid serve [MODEL]`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from pellucid.cli.agent import serve as serve_as_node
from pellucid.cli.console import complain
from pellucid.cli.options import add_engine_options, add_ignored, add_section, chosen, engine_options
from pellucid.config import EngineConfig
from pellucid.no_effect import ENGINE, SERVER, tell_ignored
from pellucid.progress import tell
from pellucid.registry import load_object
from pellucid.server.listener import bind, leaving_no_path, url_of
from pellucid.server.options import ServeOptions

if TYPE_CHECKING:
    import socket

    from pellucid.async_llm import AsyncLLM

# Options with several values.
LISTS = ("served_model_name", "lora_modules", "api_key", "allowed_origins", "allowed_hosts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `serve` understands."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="as --model; default sprout, the bundled one"
    )
    add_section(parser, "server", ServeOptions, several=LISTS)
    add_engine_options(parser)
    parser.add_argument(
        "--headless", action="store_true", help="be a node of another server, as `pellucid agent --once`"
    )
    add_ignored(parser, SERVER)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status is 1 if the engine died."""
    began = time.perf_counter()
    engine = engine_options(args)
    if args.model_tag is not None and engine.setdefault("model", args.model_tag) != args.model_tag:
        raise ValueError(f"the model is {args.model_tag!r} and --model is {engine['model']!r}; give one")
    parallel = EngineConfig.from_options(engine).parallel
    engine = {name: value for name, value in engine.items() if name not in ENGINE}  # which have been told
    if args.headless or parallel.own_node:
        serve_as_node(parallel, rank=parallel.own_node or None)
        return 0
    options = serve_options(args)
    tell_ignored(chosen(args, SERVER))
    tell(f"starting {engine.get('model', 'sprout')}")
    listener = bind(options)
    make_llm = load_object("pellucid.async_llm:AsyncLLM")
    preload = threading.Thread(target=load_object, args=("pellucid.server.lifecycle:serve",))
    preload.start()  # while the engine loads its weights
    with leaving_no_path(options):
        llm: AsyncLLM = make_llm(**engine)
        preload.join()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            cause = runner.run(_serve(llm, options, listener, began))
    if cause is not None:
        complain(f"pellucid serve: the engine has died: {cause}")
    return 0 if cause is None else 1


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """What was said of the server."""
    given = chosen(args, [field.name for field in fields(ServeOptions)])
    for name in LISTS:
        if name in given:
            given[name] = tuple(part for text in given[name] for part in _parts(text))  # type: ignore[union-attr]
    return ServeOptions(**given)  # type: ignore[arg-type]


def _parts(text: str) -> list[str]:
    """One value, or, as vLLM takes some of them, a JSON list."""
    if not text.startswith("["):
        return [text]
    try:
        return [str(part) for part in json.loads(text)]
    except ValueError as error:
        raise ValueError(f"{text!r} is no JSON list: {error}") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which takes half the time for a small write; Python's own where there is none."""
    try:
        return load_object("uvloop:new_event_loop")
    except ImportError:
        return None


async def _serve(llm: AsyncLLM, options: ServeOptions, listener: socket.socket, began: float) -> str | None:
    from pellucid.server.app import make_server
    from pellucid.server.lifecycle import serve

    server = make_server(llm, options)
    url, names = url_of(listener, options), ", ".join(server.names)

    def announce() -> None:
        seconds = time.perf_counter() - began
        sys.stdout.write(f"ready: {url} serves {names}, after {seconds:.1f} s\n")
        sys.stdout.flush()

    return await serve(server, listener, announce)
