"""Grammars as an engine sees them: the processes that hold the languages read texts and fill masks.

Whoever handed a request in has had its grammar checked; `prepare` attaches to the language's process, in a
thread, and from then on only what has come home is sent there.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pellucid.features.base import AskingRow, HostFeature, RowKind
from pellucid.resolve import Resolved
from pellucid.sample.grammars.base import ANY_TOKEN, GrammarRef
from pellucid.sample.grammars.wire import (
    SHARED_BYTES,
    Attach,
    Force,
    Forget,
    Read,
    Row,
    decode_filled,
    decode_forced,
    decode_verdict,
    frame,
    map_masks,
    read_frame,
)
from pellucid.schedule.news import News
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.sequence import Sequence as Seq
from pellucid.types import Request

logger = logging.getLogger(__name__)
A = TypeVar("A")
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

    def send(self, order: Read | Force | Forget) -> None:
        with suppress(OSError):  # `receive` tells
            self._socket.sendall(frame(order))

    def receive(self, decode: Callable[[bytearray], A]) -> A | None:
        """What it answers to `Read` or `Force`; None if it has ended."""
        try:
            return decode(read_frame(self._socket))
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
    drafts: list[int] = field(default_factory=list[int])  # that its next row may verify
    are_forced: bool = False  # the drafts are the grammar's own, which workers have not seen


@dataclass(frozen=True, slots=True)
class Masks:
    """Bits [n, W] int32 of each row's n logits, by the row's index in the plan; W = ceil(V / 32).

    Bit t % 32 of word t // 32 says whether token t may come (xgrammar's form).
    """

    rows: dict[int, memoryview]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a proposer has drafted for rows with a grammar, by index in the plan."""

    rows: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class ForcedDrafts:
    """What grammars force, by the row's index in the plan: the drafts that the row verifies."""

    rows: dict[int, list[int]]
    places: dict[int, int]  # of each row's first one in its text


class Grammars(HostFeature):
    """Constrained decoding, beside the scheduler."""

    rows = RowKind.SAMPLING
    is_watched = is_host_bound = True

    def __init__(self, resolved: Resolved) -> None:
        self._num_words = -(-resolved.checkpoint.vocab_size // 32)
        self._most_forced, self._num_forced = most_forced(resolved), 0
        self._texts: dict[str, Text] = {}  # by request id
        self._languages: dict[tuple[str, str], tuple[Language, Future[None]]] = {}  # by address and digest
        self._ended: dict[str, str | None] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._memory, self._is_shut_down = shared_file(SHARED_BYTES), False
        self._masks = map_masks(self._memory, self._num_words)

    def asks(self, request: Request) -> bool:
        return request.grammar is not None

    def prepare(self, request: Request) -> Future[None]:
        """Attach to its language, unless another request has.  The result may be a ValueError."""
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

    def ride(self, rows: Sequence[AskingRow]) -> ForcedDrafts | None:
        """The drafts that no worker has seen."""
        forced = {row.index: self._drafts(row) for row in rows if self._texts[row.request.id].are_forced}
        if not any(forced.values()):
            return None
        return ForcedDrafts(forced, {row.index: len(row.token_ids) for row in rows if row.index in forced})

    def late(self, rows: Sequence[AskingRow]) -> Masks:
        """What may come behind each row's text, and behind each of its drafts."""
        asked: dict[Language, list[AskingRow]] = {}
        for row in rows:
            asked.setdefault(self._texts[row.request.id].language, []).append(row)
        masks: dict[int, np.ndarray] = {}
        place = 0
        for language, its_rows in asked.items():  # each fills its masks while the others do
            language.send(Read([self._row_or_end(row) for row in its_rows], place))
            for row in its_rows:
                masks[row.index] = self._masks[place : place + 1 + row.num_draft]
                place += 1 + row.num_draft
        for language, its_rows in asked.items():
            filled = language.receive(decode_filled)
            if filled is None:
                self._lose(language, {row.request.id: masks[row.index] for row in its_rows})
            else:
                self._ended = filled.ended | self._ended
        return Masks({index: mask.data for index, mask in masks.items()})

    def ended(self) -> dict[str, str | None]:
        """Those behind whose text nothing may come, and of those that left their grammar why."""
        ended, self._ended = self._ended, {}
        return ended

    def land(self, told: Drafts, news: News, scheduler: Scheduler) -> None:
        """A row's drafts may be verified now: what its grammar forces, else its proposer's.

        Not where no token may end the text: there the grammar ends it, which it cannot do behind a draft.
        """
        drafting: list[tuple[Seq, list[int]]] = []
        for index, drafts in told.rows.items():
            landed = news.landed.get(index)
            if landed is None or landed.seq.is_finished or not landed.seq.request.eos_token_ids:
                continue
            if scheduler.num_tokens(landed.seq) >= landed.seq.min_len:
                drafting.append((landed.seq, drafts))
        forced = self._forced([seq for seq, _ in drafting], scheduler) if self._most_forced else {}
        for seq, drafts in drafting:
            text, own = self._texts[seq.request.id], forced.get(seq.request.id, [])
            text.drafts, text.are_forced = own or drafts, bool(own)
            self._num_forced += len(own)
            scheduler.expect_drafts(seq, len(text.drafts), are_forced=text.are_forced)

    def counters(self) -> dict[str, int]:
        return {"grammar_forced_drafts": self._num_forced}

    def leave(self, request_id: str) -> None:
        """With its last request an engine lets go of a language."""
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

    def _forced(self, seqs: list[Seq], scheduler: Scheduler) -> dict[str, list[int]]:
        """What must come next in these texts, by request."""
        asked: dict[Language, list[Row]] = {}
        for seq in seqs:
            language = self._texts[seq.request.id].language
            asked.setdefault(language, []).append(
                self._row(seq.request, scheduler.table.tokens(seq.slot), [])
            )
        for language, rows in asked.items():
            language.send(Force(rows, self._most_forced))
        forced: dict[str, list[int]] = {}
        for language, rows in asked.items():
            answer = language.receive(decode_forced)
            if answer is None:
                self._lose(language, {row.request_id: np.zeros(0, dtype=np.int32) for row in rows})
            else:
                forced |= answer.token_ids
        return forced

    def _row_or_end(self, row: AskingRow) -> Row:
        """A row that cannot be asked for ends its own text and no other; its masks count no more."""
        try:
            return self._row(row.request, row.token_ids, self._drafts(row))
        except Exception as error:
            logger.exception("the grammar of request %s has failed", row.request.id)
            self._ended[row.request.id] = f"its grammar has failed: {type(error).__name__}: {error}"
            return Row(row.request.id, [], self._drafts(row), may_stop=True, thinking=None)

    def _drafts(self, row: AskingRow) -> list[int]:
        return self._texts[row.request.id].drafts[: row.num_draft]

    def _row(self, request: Request, token_ids: NDArray[np.int32], drafts: list[int]) -> Row:
        text = self._texts[request.id]
        new_token_ids = [int(token) for token in token_ids[text.num_read :]]
        num_tokens = text.num_read + len(new_token_ids) - len(request.prompt_token_ids)
        text.num_read += len(new_token_ids)
        may_stop = num_tokens >= request.sampling.min_tokens
        return Row(request.id, new_token_ids, drafts, may_stop, text.thinking)

    def _lose(self, language: Language, masks: dict[str, np.ndarray]) -> None:
        """A language's process has ended, or says nothing: its texts end, and the next request attaches anew.

        masks: by request id.
        """
        self._languages = {key: value for key, value in self._languages.items() if value[0] is not language}
        language.close()  # an answer that comes late would be taken for the next one's
        self._ended |= dict.fromkeys(masks, LOST)
        for mask in masks.values():
            mask[:] = ANY_TOKEN


def most_forced(resolved: Resolved) -> int:
    """Most drafts of a row that its grammar may force.

    Beside trees no more than these are deep.  None where the test of drafts asks what each was drawn from:
    that is kept of the proposer's own.
    """
    config = resolved.speculative
    is_told = config.rejection_sample_method == "standard" and not config.are_certain
    return 0 if is_told else config.tree_depth or resolved.num_spec


def shared_file(num_bytes: int) -> int:
    """A file descriptor of memory that processes may share; on systems that have no such, of a file."""
    if sys.platform == "linux":
        file = os.memfd_create("grammar masks")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.truncate(file, num_bytes)
    return file
