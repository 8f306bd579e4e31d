"""`pellucid COMMAND`: one file a command, each with `add_arguments` and `run`.

Command modules are imported to build the parser, so they import nothing heavy before they run.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from pellucid import __version__
from pellucid.cli.config_file import with_file
from pellucid.cli.options import Parser
from pellucid.registry import load_object

COMMANDS = {
    "generate": "complete prompts and print the text",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model over HTTP, to clients of OpenAI's API",
    "agent": "be one of several machines that serve a model together",
    "demo": "show the bundled model: thinking, a tool call, a completion",
    "route": "one address for servers that compute prompts and servers that go on from there",
    "run-batch": "answer a file of requests, in OpenAI's batch form",
    "replay": "run a recorded engine's scheduler again, with other limits, in virtual time",
    "doctor": "look at this machine: GPUs, links, limits, versions, and what to do about them",
    "bench": "measure throughput, latency, or a server under load",
    "inspect": "show how a model's weights are stored, and what multiplies them here",
    "quantize": "make a quantized checkpoint of a plain one",
    "merge": "put a LoRA adapter into a model's weights",
    "eval": "measure a model on the bundled held-out tasks",
}

ALIASES = {"proxy": "route"}
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="pellucid", description="An LLM inference engine that can be read.")
    parser.add_argument("--version", action="version", version=f"pellucid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        aliases = [alias for alias, meant in ALIASES.items() if meant == name]
        described = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(name, aliases=aliases, help=text, description=described)
        command.add_argument("-v", "--verbose", action="store_true", help="log what the engine decides")
        load_object(f"{_module(name)}:add_arguments")(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2, with one line, for errors of the user's making."""
    _open_standard_files()
    try:
        argv = with_file(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        sys.stderr.write(f"pellucid: {error}\n")
        return EXIT_USAGE
    args = build_parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return _run(args)
    except ValueError as error:
        sys.stderr.write(f"pellucid {args.command}: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # what was being written ends here
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, say) has gone.  Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _run(args: argparse.Namespace) -> int:
    status: int = load_object(f"{_module(args.command)}:run")(args)
    sys.stdout.flush()
    return status


def _module(command: str) -> str:
    return "pellucid.cli." + ALIASES.get(command, command).replace("-", "_")


def _open_standard_files() -> None:
    """Those that the caller has closed lead nowhere; else what is opened next, a socket, has their places."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    sys.exit(main())
