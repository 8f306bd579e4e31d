"""One request's answer as its client sees it: when how many tokens came, and how it ended.

Tokens are counted by the ids that chunks carry, or by the usage so far in every chunk.  Without these,
the usage at the end is spread evenly over the chunks that brought something; the record says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

MOST_ERROR = 200  # characters of an error that are kept


class Delta(msgspec.Struct):
    """What a chat's chunk adds."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """What is read of a chunk; the rest is skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


decode = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True, kw_only=True)
class Record:
    """One request, measured.  Times are seconds of the monotonic clock, which all processes share."""

    lane: str
    due: float | None  # when it should have been sent, if its time was set
    sent: float
    ended: float = 0.0  # the last byte
    times: list[float] = field(default_factory=list[float])  # of arrivals of tokens
    counts: list[float] = field(
        default_factory=list[float]
    )  # tokens of each; fractions where they are spread
    is_spread: bool = False
    num_prompt: int = 0  # tokens, as the server says
    num_usage: int | None = None  # output tokens, as the server says at the end
    error: str | None = None

    @property
    def num_output(self) -> float:
        """Tokens that came."""
        return sum(self.counts)


class StreamAnswer:
    """Reads server-sent events.  The sink of one request; `finish` gives what it has found."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._status = 200
        self._rest = b""
        self._arrivals: list[tuple[float, int | None]] = []  # (when, tokens), the number if it is known
        self._running = 0  # tokens so far, as the usage in chunks has it
        self._has_counts = self._is_done = self._has_ended = False

    def take(self, status: int, data: bytes, now: float) -> None:
        self._status = status
        buffer = self._rest + data if self._rest else data
        if status != 200:
            self._rest = buffer
            return
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        for event in events:
            self._event(event, now)

    def fail(self, error: str) -> None:
        """Note why the answer is none; the first reason counts."""
        if self._record.error is None:
            self._record.error = " ".join(error.split())[:MOST_ERROR]

    def finish(self, now: float) -> Record:
        """Nothing comes any more."""
        record = self._record
        record.ended = now
        if self._status != 200:
            self.fail(f"HTTP {self._status}: {_message(self._rest)}")
        elif not self._is_done and not self._has_ended:
            self.fail("the stream ended without an end")
        arrivals = [arrival for arrival in self._arrivals if arrival[1] != 0]
        if self._has_counts:
            arrivals = [arrival for arrival in arrivals if arrival[1] is not None]
        for when, num in arrivals:
            if record.times and record.times[-1] == when:
                record.counts[-1] += num or 1
            else:
                record.times.append(when)
                record.counts.append(num or 1)
        if not self._has_counts and record.num_usage is not None and arrivals:
            record.is_spread = record.num_usage != len(arrivals)
            share = record.num_usage / len(arrivals)
            record.counts = [count * share for count in record.counts]
        return record

    def _event(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:"):
            event = next((line for line in event.split(b"\n") if line.startswith(b"data:")), b"")
            if not event:
                return  # a comment, which keeps the connection alive
        data = event[5:]
        if data.strip() == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = decode(data)
        except msgspec.MsgspecError as error:
            self.fail(f"a chunk cannot be read: {error}")
            return
        if chunk.error is not None:
            self.fail(f"in the stream: {_text(chunk.error)}")
        if chunk.usage is not None:
            self._record.num_prompt = chunk.usage.prompt_tokens
            self._record.num_usage = chunk.usage.completion_tokens
        for choice in chunk.choices:
            self._choice(choice, chunk.usage, now)

    def _choice(self, choice: Choice, usage: Usage | None, now: float) -> None:
        if choice.finish_reason is not None:
            self._has_ended = True
        if choice.token_ids is not None:
            self._has_counts = True
            self._arrivals.append((now, len(choice.token_ids)))
        elif usage is not None:
            self._has_counts = True
            self._arrivals.append((now, usage.completion_tokens - self._running))
            self._running = usage.completion_tokens
        elif choice.text or (choice.delta is not None and _says(choice.delta)):
            self._arrivals.append((now, None))


def _says(delta: Delta) -> bool:
    return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


def _message(body: bytes) -> str:
    try:
        error = decode(body).error
    except msgspec.MsgspecError:
        error = None
    return body.decode("utf-8", "replace") if error is None else _text(error)


def _text(error: object) -> str:
    """OpenAI's errors have a message; others may be anything."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
