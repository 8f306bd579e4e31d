"""Grammars as an engine sees them: the processes that hold the languages read texts and fill masks.

Whoever handed a request in has had its grammar checked; the engine attaches to the language's process, in a
thread, and from then on only sends it what has come home.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pellucid.resolve import Resolved
from pellucid.sample.grammars.base import ANY_TOKEN, GrammarRef, Spelling
from pellucid.sample.grammars.wire import (
    SHARED_BYTES,
    Attach,
    Filled,
    Forget,
    Read,
    Row,
    decode_filled,
    decode_verdict,
    frame,
    map_masks,
    read_frame,
)
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import Request

if TYPE_CHECKING:
    from pellucid.schedule.scheduler import HostBoundRow

logger = logging.getLogger(__name__)
NUM_THREADS = 32  # that attach; they only wait
MOST_SILENCE = 30.0  # seconds; a language's process ends itself long before, if it gets a processor
LOST = "the process of its grammar has ended: a mask took too long, or too much memory"


class Language:
    """A connection to the process that holds a language, for all requests of this engine."""

    def __init__(self, ref: GrammarRef, memory: int) -> None:
        """memory: a file descriptor of what it writes masks to."""
        self._ref, self._memory, self._socket = ref, memory, socket.socket(socket.AF_UNIX)
        self.request_ids: set[str] = set()

    def attach(self) -> None:
        """Wait until it can be read.  Raises ValueError, in words, if it never will."""
        try:
            self._socket.connect(self._ref.address)
            self._socket.sendall(frame(Attach(self._ref.digest)))
            verdict = decode_verdict(read_frame(self._socket))
            if verdict.error is None:
                socket.send_fds(self._socket, [b"+"], [self._memory])
            self._socket.settimeout(MOST_SILENCE)
        except (EOFError, OSError) as error:
            raise ValueError("the process that holds it has ended") from error
        if verdict.error is not None:
            raise ValueError(verdict.error)

    def send(self, order: Read | Forget) -> None:
        with suppress(OSError):  # `receive` tells
            self._socket.sendall(frame(order))

    def receive(self) -> Filled | None:
        """What it answers to `Read`; None if it has ended."""
        try:
            return decode_filled(read_frame(self._socket))
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Whoever waits in `attach` waits no longer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass(slots=True)
class Text:
    """A request's, as far as its language has read it."""

    language: Language
    key: tuple[str, str]  # of the language
    num_read: int
    thinking: tuple[int | None, int] | None
    attached: Future[None] = field(repr=False)


class Grammars:
    """The engine's `Grammar`.  vocab_size: the model's, V; a mask has W = ceil(V / 32) words."""

    def __init__(self, *, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._texts: dict[str, Text] = {}  # by request id
        self._languages: dict[tuple[str, str], tuple[Language, Future[None]]] = {}  # by address and digest
        self._ended: dict[str, str | None] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._memory, self._is_shut_down = shared_file(SHARED_BYTES), False
        self._masks = map_masks(self._memory, self._num_words)

    def attach(self, request: Request) -> Future[None]:
        """Begin, unless another request of this language has.  The result may be a ValueError."""
        assert request.grammar is not None
        ref = GrammarRef.decode(request.grammar)
        key = ref.address, ref.digest
        if key not in self._languages:
            language = Language(ref, self._memory)
            self._languages[key] = language, self._pool.submit(language.attach)
        language, attached = self._languages[key]
        language.request_ids.add(request.id)
        self._texts[request.id] = Text(language, key, len(request.prompt_token_ids), ref.thinking, attached)
        return attached

    def masks(self, rows: dict[int, HostBoundRow]) -> dict[int, np.ndarray]:
        """Of each row [1 + drafts, W] int32: what may come behind its text, and behind each of its drafts.

        They stay as they are until this is called again.
        """
        asked: dict[Language, list[int]] = {}
        for index, row in rows.items():
            asked.setdefault(self._texts[row.request.id].language, []).append(index)
        masks: dict[int, np.ndarray] = {}
        place = 0
        for language, indices in asked.items():  # each fills its masks while the others do
            language.send(Read([self._row_or_end(rows[index]) for index in indices], place))
            for index in indices:
                num_masks = 1 + len(rows[index].drafts)
                masks[index] = self._masks[place : place + num_masks]
                place += num_masks
        for language, indices in asked.items():
            filled = language.receive()
            if filled is None:
                self._lose(language, {rows[index].request.id: masks[index] for index in indices})
            else:
                self._ended = filled.ended | self._ended
        return masks

    def take_ended(self) -> dict[str, str | None]:
        """Requests behind whose text nothing may come, and of those that left their grammar why."""
        ended, self._ended = self._ended, {}
        return ended

    def forget(self, request_id: str) -> None:
        """A request has ended; with its last one an engine lets go of a language."""
        text = self._texts.pop(request_id, None)
        if text is None:
            return
        text.language.request_ids.discard(request_id)
        if text.language.request_ids:
            # Before it is attached nothing has been read, and a thread speaks on that connection.
            if text.attached.done() and text.attached.exception() is None:
                text.language.send(Forget(request_id))
            return
        if self._languages.get(text.key, (None,))[0] is text.language:
            del self._languages[text.key]
        text.attached.cancel()
        text.language.close()

    def shutdown(self) -> None:
        """May be called again."""
        for language, _ in self._languages.values():
            language.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._is_shut_down:
            os.close(self._memory)
        self._is_shut_down = True

    def _row_or_end(self, row: HostBoundRow) -> Row:
        """A row that cannot be asked for ends its own text and no other; its masks count no more."""
        try:
            return self._row(row)
        except Exception as error:
            logger.exception("the grammar of request %s has failed", row.request.id)
            self._ended[row.request.id] = f"its grammar has failed: {type(error).__name__}: {error}"
            return Row(row.request.id, [], row.drafts, may_stop=True, thinking=None)

    def _row(self, row: HostBoundRow) -> Row:
        request, text = row.request, self._texts[row.request.id]
        new_token_ids = [int(token) for token in row.token_ids[text.num_read :]]
        num_tokens = text.num_read + len(new_token_ids) - len(request.prompt_token_ids)
        text.num_read += len(new_token_ids)
        may_stop = num_tokens >= request.sampling.min_tokens
        return Row(request.id, new_token_ids, row.drafts, may_stop, text.thinking)

    def _lose(self, language: Language, masks: dict[str, np.ndarray]) -> None:
        """A language's process has ended, or says nothing: its texts end, and the next request attaches anew.

        masks: by request id.
        """
        self._languages = {key: value for key, value in self._languages.items() if value[0] is not language}
        language.close()  # an answer that comes late would be taken for the next one's
        self._ended |= dict.fromkeys(masks, LOST)
        for mask in masks.values():
            mask[:] = ANY_TOKEN


def shared_file(num_bytes: int) -> int:
    """A file descriptor of memory that processes may share; on systems that have no such, of a file."""
    if sys.platform == "linux":
        file = os.memfd_create("grammar masks")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.truncate(file, num_bytes)
    return file


def spelling_of(resolved: Resolved, tokenizer: Tokenizer) -> Spelling:
    """The model's tokens as bytes."""
    vocab_size = resolved.checkpoint.vocab_size
    return Spelling(
        token_bytes=tokenizer.spell_all()[:vocab_size],
        vocab_size=vocab_size,
        stop_token_ids=eos_token_ids(resolved, tokenizer),
    )


def eos_token_ids(resolved: Resolved, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends a text: config.json, generation_config.json and the tokenizer each may name tokens.

    Some name one that the model has no logit for, as -1, or a tokenizer's that was added later.
    """
    own, vocab_size = resolved.checkpoint.eos_token_ids, resolved.checkpoint.vocab_size
    named = None if tokenizer is None else tokenizer.eos_token_id
    all_named = own if named is None or named in own else (*own, named)
    return tuple(token for token in all_named if 0 <= token < vocab_size)
