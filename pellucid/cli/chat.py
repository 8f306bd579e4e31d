"""`pellucid chat`: talk to a model in the terminal, over several turns.  Also reads a piped stdin."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from pellucid.cli.console import AnswerStream, Speed, complain, note, write
from pellucid.cli.options import add_engine_options, add_sampling_options, open_llm, sampling_params
from pellucid.cli.prompts import Message, add_think_argument, template_options
from pellucid.sampling_params import SamplingParams
from pellucid.types import RequestOutput

if TYPE_CHECKING:
    from pellucid.llm import LLM

PROMPT = "> "
HELP = """/clear         forget the conversation
/think on|off  ask for thinking, or for none
/help          this list
/exit          leave (so do Ctrl-D, and Ctrl-C twice)
Ctrl-C stops an answer."""

SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `chat` understands."""
    parser.usage = "%(prog)s [OPTION ...]"
    parser.epilog = (
        "In the chat: /clear, /think on|off, /help, /exit.  Ctrl-C stops an answer, Ctrl-D leaves."
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_think_argument(parser)
    add_sampling_options(parser, SAMPLING, max_tokens=None)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    with open_llm(args) as llm:
        llm.get_tokenizer()  # a chat without one is refused before the first question
        sampling = sampling_params(args, llm.get_default_sampling_params(), max_tokens=None)
        chat = Chat(llm, sampling, system=args.system, think=args.think)
        if sys.stdin.isatty():
            importlib.import_module("readline")  # gives input() its line editing and history
            note("/help lists the commands")
        chat.talk()
    return 0


class Chat:
    """A conversation: the messages so far, and what happens to each line that the user types."""

    def __init__(self, llm: LLM, sampling: SamplingParams, *, system: str | None, think: bool | None) -> None:
        self.think = think
        self.messages: list[Message] = []
        self._llm = llm
        self._sampling = sampling
        self._system = system
        self.clear()

    def clear(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def talk(self) -> None:
        """Read and answer lines until the input ends, /exit, or two interruptions in a row."""
        interrupted = False
        while True:
            try:
                line = _read_line()
            except KeyboardInterrupt:
                if interrupted:
                    return write("\n")
                interrupted = True
                note("\nCtrl-C again, or Ctrl-D, leaves")
                continue
            interrupted = False
            if line is None or line in ("/exit", "/quit"):
                return None
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.answer(line)

    def command(self, line: str) -> None:
        """Do what a line that begins with a slash says."""
        match line.split():
            case ["/clear"]:
                self.clear()
                note("the conversation begins anew")
            case ["/think", "on" | "off" as state]:
                self.think = state == "on"
                note(f"thinking is {state}")
            case ["/help"]:
                note(HELP)
            case _:
                note(f"{line} is no command\n{HELP}")

    def answer(self, text: str) -> None:
        """Stream the answer to `text`.  Both are remembered, unless nothing was answered."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        stream = AnswerStream()
        try:
            stream.follow(
                self._llm.stream(asked, self._sampling, chat_template_kwargs=template_options(self.think))
            )
        except KeyboardInterrupt:
            note("\n(stopped)")
        except ValueError as error:  # too long for the context, most likely
            return complain(f"{error}; /clear begins anew")
        if stream.output is None or stream.output.error:
            return complain(stream.output.error or "") if stream.output else None
        self.messages = [*asked, {"role": "assistant", "content": final_answer(stream.output)}]
        speed = Speed([stream.output])
        note(f"{speed.counts()} | {speed.line()}")
        return None


def final_answer(output: RequestOutput) -> str:
    """What was said after the thinking: chat templates leave out the thinking of earlier turns anyway."""
    from pellucid.server.parsers.whole import split_thinking

    return split_thinking(output.outputs[0].text, output.prompt)[1]


def _read_line() -> str | None:
    """The next line without the white space around it; None at the end of the input."""
    if sys.stdin.isatty():
        try:
            return input(PROMPT).strip()
        except EOFError:
            write("\n")
            return None
    line = sys.stdin.readline()
    write(f"{PROMPT}{line}")
    return line.strip() if line else None
