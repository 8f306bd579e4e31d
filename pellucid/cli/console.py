"""What commands write to the terminal: streamed answers with dimmed thinking, speeds, notes.

The only place that knows rich; it is imported when first used, so that `--help` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, cast

from pellucid.types import RequestOutput

if TYPE_CHECKING:
    from rich.console import Console

THINK_START, THINK_END = "<think>", "</think>"
HARMLESS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


@cache
def terminal(*, error: bool = False) -> Console:
    """The terminal behind stdout (or stderr); colours vanish by themselves where there is none."""
    from rich.console import Console

    return Console(stderr=error, highlight=False, emoji=False, markup=False)


def write(text: str, style: str | None = None) -> None:
    """Write text to stdout at once, without wrapping or markup.

    A terminal gets no control characters from a model: escape sequences could rewrite what was shown before.
    """
    if not sys.stdout.isatty():
        sys.stdout.write(text)
    elif style is None:
        sys.stdout.write(text.translate(HARMLESS))
    else:
        terminal().out(text.translate(HARMLESS), style=style, end="", highlight=False)
    sys.stdout.flush()


def note(text: str) -> None:
    """One dim line."""
    write(f"{text}\n", style="dim")


def complain(text: str) -> None:
    """One line to stderr."""
    sys.stderr.write(f"{text}\n")


def rule(title: str) -> None:
    """A title that parts what came before from what follows."""
    write(f"\n--- {title} ---\n", style="bold")


class AnswerStream:
    """Writes an answer as it grows, its thinking dimmed.

    A tail that may be the beginning of a think tag waits until more text (or the end) decides what it is.
    """

    def __init__(self) -> None:
        self.output: RequestOutput | None = None  # the last state seen, also after an interruption
        self._thinking = False
        self._pending = ""
        self._length = 0  # characters of the answer taken so far

    def follow(self, stream: Iterator[RequestOutput]) -> RequestOutput:
        """Write what comes and return its last state; whatever ends this early aborts the request.

        Token ids are written where there is no text, because no tokenizer is loaded.
        """
        with closing(cast("Generator[RequestOutput]", stream)):
            for output in stream:
                if self.output is None:
                    self._thinking = opens_thinking(output.prompt)
                self.output = output
                completion = output.outputs[0]
                self.show(completion.text or " ".join(map(str, completion.token_ids)))
        assert self.output is not None, "a stream holds at least its end"
        self.end()
        return self.output

    def show(self, text: str) -> None:
        """Write what is new in `text`, the whole answer so far."""
        self._pending += text[self._length :]
        self._length = len(text)
        while True:
            tag = THINK_END if self._thinking else THINK_START
            before, found, after = self._pending.partition(tag)
            if not found:
                break
            self._write(before)
            write(found, style="dim")
            self._thinking = not self._thinking
            self._pending = after
        ready = len(self._pending) - _overlap(self._pending, tag)
        self._write(self._pending[:ready])
        self._pending = self._pending[ready:]

    def end(self) -> None:
        """Write what was held back, and end the line."""
        self._write(self._pending)
        self._pending = ""
        write("\n")

    def _write(self, text: str) -> None:
        if text:
            write(text, style="dim" if self._thinking else None)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def opens_thinking(prompt: str | None) -> bool:
    """Whether the chat template already wrote <think>, so that the answer begins with thinking."""
    return prompt is not None and prompt.rstrip().endswith(THINK_START)


class Speed:
    """Tokens and seconds of some finished requests that ran one after another."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self.num_prompt = self.num_cached = self.num_output = 0
        self._prompt_seconds = self._output_seconds = 0.0
        self._decoded = 0  # tokens after each request's first
        self._first: list[float] = []
        for output in outputs:
            self._add(output)

    def _add(self, output: RequestOutput) -> None:
        num_output = sum(len(completion.token_ids) for completion in output.outputs)
        self.num_prompt += len(output.prompt_token_ids)
        self.num_cached += output.num_cached_tokens
        self.num_output += num_output
        times = output.metrics
        if times.first_token_time is None:
            return
        wait = times.first_token_time - times.arrival_time
        self._first.append(wait)
        self._prompt_seconds += wait
        if times.finished_time is not None:
            self._output_seconds += times.finished_time - times.first_token_time
            self._decoded += num_output - len(output.outputs)

    def line(self) -> str:
        """`prompt N tok/s | output N tok/s | time to first token N ms`."""
        prompt = _rate(self.num_prompt - self.num_cached, self._prompt_seconds)
        output = _rate(self._decoded, self._output_seconds)
        first = f"{1000 * sum(self._first) / len(self._first):,.0f}" if self._first else "-"
        return f"prompt {prompt} tok/s | output {output} tok/s | time to first token {first} ms"

    def counts(self) -> str:
        """`24 prompt tokens (16 cached), 85 output tokens`."""
        cached = f" ({self.num_cached:,} cached)" if self.num_cached else ""
        return f"{self.num_prompt:,} prompt tokens{cached}, {self.num_output:,} output tokens"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if tokens and seconds > 0 else "-"
