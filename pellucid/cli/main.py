"""`pellucid COMMAND`: one file a command, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from pellucid import __version__
from pellucid.registry import load_object

COMMANDS = {
    "generate": "complete prompts and print the text",
    "chat": "talk to a model in the terminal",
    "bench": "measure throughput or latency, as a share of what the machine can do",
    "eval": "measure a model on the bundled held-out tasks",
    "demo": "show the bundled model: thinking, a tool call, a completion",
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="pellucid", description="An LLM inference engine that can be read.")
    parser.add_argument("--version", action="version", version=f"pellucid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("-v", "--verbose", action="store_true", help="log what the engine decides")
        load_object(f"pellucid.cli.{name}:add_arguments")(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Errors of the user's making are one line; the exit status is 2 for them."""
    args = build_parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return load_object(f"pellucid.cli.{args.command}:run")(args)
    except ValueError as error:
        sys.stderr.write(f"pellucid {args.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
