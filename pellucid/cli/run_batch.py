"""`pellucid run-batch -i FILE -o FILE`: answers a file of requests, in OpenAI's batch form."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from pellucid.cli.options import add_engine_options, add_ignored, add_section, chosen, engine_options
from pellucid.cli.serve import serve_options
from pellucid.no_effect import SERVER, tell_ignored
from pellucid.registry import load_object
from pellucid.server.options import ServeOptions

if TYPE_CHECKING:
    from pellucid.async_llm import AsyncLLM

OPTIONS = (  # of a server's, those that have to do with answers
    *("served_model_name", "max_logprobs", "max_n", "max_output_tokens", "max_stop_strings"),
    *("max_grammar_seconds", "chat_template", "default_chat_template_kwargs", "reasoning_parser"),
    *("tool_call_parser", "enable_auto_tool_choice"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run-batch` understands."""
    parser.add_argument("-i", "--input-file", required=True, help="one request a line; - is standard input")
    parser.add_argument("-o", "--output-file", required=True, help="one answer a line; - is standard output")
    add_section(parser, "answer", ServeOptions, several=("served_model_name",), only=OPTIONS)
    add_engine_options(parser)
    add_ignored(parser, SERVER)


def run(args: argparse.Namespace) -> int:
    """Answer all; the exit status is 1 if a request was refused or has failed."""
    tell_ignored(chosen(args, SERVER))
    options = serve_options(args)
    if args.input_file != "-" and not Path(args.input_file).is_file():
        raise ValueError(f"input_file is {args.input_file!r}, which is no file")
    if Path(args.output_file).resolve() == Path(args.input_file).resolve() and args.input_file != "-":
        raise ValueError(f"output_file is {args.output_file!r}, the input_file; its requests would be lost")
    llm: AsyncLLM = load_object("pellucid.async_llm:AsyncLLM")(**engine_options(args))
    with ExitStack() as files:
        files.callback(llm.shutdown)
        lines, output = sys.stdin.buffer, sys.stdout
        if args.input_file != "-":
            lines = files.enter_context(open(args.input_file, "rb"))
        if args.output_file != "-":
            output = files.enter_context(open(args.output_file, "w", encoding="utf-8"))
        return asyncio.run(_run(llm, options, lines, output))


async def _run(llm: AsyncLLM, options: ServeOptions, lines: BinaryIO, output: TextIO) -> int:
    from pellucid.server.app import make_app, make_server
    from pellucid.server.batch import run_batch

    server = make_server(llm, options)
    num, num_failed, first = 0, 0, ""
    at_once = llm.resolved.max_num_seqs * 4
    async for line in run_batch(make_app(server), lines, at_once=min(at_once, options.max_waiting)):
        output.write(line + "\n")
        num += 1
        if not line.endswith('"error": null}'):
            num_failed, first = num_failed + 1, first or line
    await server.preprocessor.shutdown()
    if num_failed:
        sys.stderr.write(f"{num_failed} of {num} requests failed, the first with {first:.500}\n")
    return int(num_failed > 0)
