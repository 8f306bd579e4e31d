"""What commands write to the terminal: streamed answers with dimmed thinking, speeds, notes.

The only place that knows rich; it is imported when first used, so that `--help` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, cast

from pellucid.server.parsers.base import Content, Event, ParserSetting, Reasoning
from pellucid.server.parsers.think import END, START, ThinkParser
from pellucid.types import RequestOutput

if TYPE_CHECKING:
    from rich.console import Console

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
    """Writes an answer as it grows, its thinking dimmed between its tags, also if the prompt has the first.

    The end tag comes with what follows it.  A tail that may be the beginning of a tag waits until more text
    (or the end) decides what it is.
    """

    def __init__(self) -> None:
        self.output: RequestOutput | None = None  # the last state seen, also after an interruption
        self._parser = ThinkParser(ParserSetting())
        self._is_thinking = False
        self._length = 0  # characters of the answer taken so far

    def follow(self, stream: Iterator[RequestOutput]) -> RequestOutput:
        """Write what comes and return its last state; whatever ends this early aborts the request.

        Token ids are written where there is no text, because no tokenizer is loaded.
        """
        with closing(cast("Generator[RequestOutput]", stream)):
            for output in stream:
                if self.output is None:
                    self._parser = ThinkParser(ParserSetting(prompt=output.prompt or ""))
                self.output = output
                completion = output.outputs[0]
                self.show(completion.text or " ".join(map(str, completion.token_ids)))
        assert self.output is not None, "a stream holds at least its end"
        self.end()
        return self.output

    def show(self, text: str) -> None:
        """Write what is new in `text`, the whole answer so far."""
        new, self._length = text[self._length :], len(text)
        self._write(self._parser.feed(new))

    def end(self) -> None:
        """Write what was held back, and end the line."""
        self._write(self._parser.finish())
        write("\n")

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            assert isinstance(event, Content | Reasoning), event
            is_thought = isinstance(event, Reasoning)
            if is_thought and not self._is_thinking:
                write(f"{START}\n", style="dim")
            elif self._is_thinking and not is_thought:
                write(f"\n{END}", style="dim")
                write("\n\n")
            self._is_thinking = is_thought
            write(event.text, style="dim" if is_thought else None)


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
