"""The host's side of constrained decoding: a matcher for every text, masks for every place that is sampled.

A constrained text is read token by token as it comes home, so its sequence is not planned while a step of it
is under way; nothing else in the batch waits.  Masks are filled while the step's forward runs.
"""

from __future__ import annotations

import enum
import importlib.util
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from pellucid.sample.grammars.base import (
    ANY_TOKEN,
    BACKEND,
    GRAMMARS,
    CompiledGrammar,
    GrammarBackend,
    GrammarSpec,
    Matcher,
    Spelling,
)

if TYPE_CHECKING:
    from pellucid.schedule.plan import Ints
    from pellucid.schedule.scheduler import HostBoundRow

# Of compiled grammars that are kept for the next request with the same text.
MOST_BYTES = 512 << 20
MOST_LANGUAGES = 1024
# Of a processor's time, for the masks of one text: at all, and for each.  A grammar that reads a text in many
# ways may be compiled at once and then take ever longer, and all others wait for it.
FREE_SECONDS = 2.0
SECONDS_A_MASK = 0.02


class Phase(enum.Enum):
    """Where a text stands in its thinking."""

    START = "nothing has been said"
    THINKING = "anything may come but the text's end"
    ANSWER = "the grammar holds"


class Delayed:
    """A matcher that holds behind the thinking, up to the token `end`.

    start: the token that thinking begins with; a text that begins otherwise does not think.  None: it thinks.
    stops: the mask of the tokens that end a text, which none that thinks may do: its answer is still to come.
    """

    def __init__(self, matcher: Matcher, *, start: int | None, end: int, stops: np.ndarray) -> None:
        self._matcher, self._start, self._end, self._stops = matcher, start, end, stops
        self._phases = [Phase.THINKING if start is None else Phase.START]  # before every token, and now
        self._is_fed: list[bool] = []  # which tokens the matcher has accepted

    def accept(self, token_id: int) -> bool:
        phase = self._phases[-1]
        is_thought = phase is Phase.THINKING or (phase is Phase.START and token_id == self._start)
        if not is_thought and not self._matcher.accept(token_id):
            return False
        is_over = not is_thought or (phase is Phase.THINKING and token_id == self._end)
        self._phases.append(Phase.ANSWER if is_over else Phase.THINKING)
        self._is_fed.append(not is_thought)
        return True

    def fill(self, masks: np.ndarray, place: int) -> None:
        phase = self._phases[-1]
        if phase is Phase.THINKING:
            masks[place] = ~self._stops
            return
        self._matcher.fill(masks, place)
        if phase is Phase.START and self._start is not None:
            masks[place, self._start // 32] |= bit(self._start)

    def rollback(self, num_tokens: int) -> None:
        num_left = len(self._is_fed) - num_tokens
        num_fed = sum(self._is_fed[num_left:])
        del self._is_fed[num_left:], self._phases[num_left + 1 :]
        if num_fed:
            self._matcher.rollback(num_fed)

    @property
    def is_done(self) -> bool:
        return self._phases[-1] is Phase.ANSWER and self._matcher.is_done


class Reading:
    """How far the text of one request has been read, and what that took."""

    def __init__(self, matcher: Matcher, num_read: int) -> None:
        self.matcher, self.num_read = matcher, num_read
        self.num_masks, self.seconds = 0, 0.0

    @property
    def is_slow(self) -> bool:
        """Has it kept others waiting for longer than any text may?"""
        return self.seconds > FREE_SECONDS + SECONDS_A_MASK * self.num_masks

    def read(self, token_ids: Ints) -> bool:
        """Go on to the end of the text; False if it has left the language."""
        for token in token_ids[self.num_read :]:
            if self.matcher.is_done:
                break
            if not self.matcher.accept(token):
                return False
        self.num_read = len(token_ids)
        return True


class Grammars:
    """Compiles grammars in a thread, reads texts, and fills masks; the engine's `Grammar`.

    make_spelling: the model's tokens, asked for once, in that thread.
    """

    def __init__(self, make_spelling: Callable[[], Spelling], *, vocab_size: int) -> None:
        self._make_spelling, self._num_words = make_spelling, -(-vocab_size // 32)
        self._backend: GrammarBackend | None = None
        self._stops = np.zeros(self._num_words, dtype=np.int32)  # the mask of the stop tokens
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._readings: dict[str, Reading] = {}  # by request id
        self._ended: dict[str, str | None] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def warm_up(self) -> None:
        if importlib.util.find_spec(BACKEND) is not None:
            self._pool.submit(self._load)

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """Begin, unless it is known.  The result may be a ValueError."""
        spec = GrammarSpec.decode(grammar).language
        if spec not in self._compiled:
            self._make_room()
            self._compiled[spec] = self._pool.submit(self._compile, spec)
        self._compiled.move_to_end(spec)
        return self._compiled[spec]

    def masks(self, rows: dict[int, HostBoundRow]) -> dict[int, np.ndarray]:
        """Of each row [1 + drafts, W] int32: what may come behind its text, and behind each of its drafts."""
        return {index: self._masks_of(row) for index, row in rows.items()}

    def take_ended(self) -> dict[str, str | None]:
        """Requests behind whose text nothing may come, and of those that left their grammar why."""
        ended, self._ended = self._ended, {}
        return ended

    def forget(self, request_id: str) -> None:
        self._readings.pop(request_id, None)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._load().compile(spec)

    def _load(self) -> GrammarBackend:
        if self._backend is None:
            spelling = self._make_spelling()
            for token in spelling.stop_token_ids:
                self._stops[token // 32] |= bit(token)
            self._backend = GRAMMARS.load(BACKEND)(spelling)
        return self._backend

    def _make_room(self) -> None:
        """Let go of the grammars not asked for the longest; texts under way keep theirs."""
        sizes = {spec: _size(future) for spec, future in self._compiled.items() if future.done()}
        total = sum(sizes.values())
        for spec, size in sizes.items():
            if total <= MOST_BYTES and len(self._compiled) < MOST_LANGUAGES:
                break
            del self._compiled[spec]
            total -= size

    def _masks_of(self, row: HostBoundRow) -> np.ndarray:
        request_id, reading = row.request.id, self._reading(row)
        masks = np.full((1 + len(row.drafts), self._num_words), ANY_TOKEN, dtype=np.int32)
        began, matcher = time.thread_time(), reading.matcher
        if not reading.read(row.token_ids):
            self._ended[request_id] = "the text has left its grammar, of which other parameters left nothing"
        elif matcher.is_done:
            self._ended[request_id] = None
        else:
            self._fill(matcher, masks, row.drafts)
            if self._is_whole(row, masks[0]):
                self._ended[request_id] = None
        reading.seconds += time.thread_time() - began
        reading.num_masks += len(masks)
        if reading.is_slow and request_id not in self._ended:
            self._ended[request_id] = (
                f"its grammar has taken {reading.seconds:.1f} s for {reading.num_masks} masks, in which all "
                "others waited; write it such that there are fewer ways to read a text"
            )
        return masks

    def _reading(self, row: HostBoundRow) -> Reading:
        request = row.request
        reading = self._readings.get(request.id)
        if reading is None:
            assert request.grammar is not None
            spec = GrammarSpec.decode(request.grammar)
            matcher = self.compile(request.grammar).result().start()
            if spec.thinking is not None:
                start, end = spec.thinking
                matcher = Delayed(matcher, start=start, end=end, stops=self._stops)
            reading = Reading(matcher, len(request.prompt_token_ids))
            self._readings[request.id] = reading
        return reading

    def _fill(self, matcher: Matcher, masks: np.ndarray, drafts: list[int]) -> None:
        """Masks of the text's end and behind each draft that may come; behind one that may not all falls."""
        matcher.fill(masks, 0)
        num_accepted = 0
        for place, draft in enumerate(drafts, start=1):
            may_come = masks[place - 1, draft // 32] & bit(draft)  # libraries complain of others
            if not may_come or not matcher.accept(draft):
                break
            num_accepted += 1
            if matcher.is_done:
                masks[place:] = self._stops
                break
            matcher.fill(masks, place)
        if num_accepted:
            matcher.rollback(num_accepted)

    def _is_whole(self, row: HostBoundRow, mask: np.ndarray) -> bool:
        """May only a stop token come, where there is none or min_tokens holds it back?"""
        request = row.request
        num_tokens = len(row.token_ids) - len(request.prompt_token_ids)
        may_stop = num_tokens >= request.sampling.min_tokens and self._stops.any()
        return not may_stop and not (mask & ~self._stops).any()


def _size(compiled: Future[CompiledGrammar]) -> int:
    return 0 if compiled.exception() is not None else compiled.result().num_bytes


def bit(token_id: int) -> np.int32:
    """A token's bit in its word of a mask."""
    return np.uint32(1 << token_id % 32).view(np.int32)
