"""How far the texts of one language have been read, and what may come next in each.

A constrained text is read token by token as it comes home, so its sequence is not planned while a step of it
is under way; nothing else in the batch waits.  Masks are filled while the step's forward runs.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Sequence

import numpy as np

from pellucid.sample.grammars.base import ANY_TOKEN, CompiledGrammar, Matcher, Spelling
from pellucid.sample.grammars.forced import forced_tokens
from pellucid.sample.grammars.wire import Filled, Forced, Row

logger = logging.getLogger(__name__)
# Of a processor's time, for the masks of one text: at all, and for each.  A grammar that reads a text in many
# ways may be compiled at once and then take ever longer, and all others wait for it.
FREE_SECONDS = 2.0
SECONDS_A_MASK = 0.02
LEFT = "the text has left its grammar, of which other parameters left nothing"


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
    def forced(self) -> bytes:
        return self._matcher.forced if self._phases[-1] is Phase.ANSWER else b""

    @property
    def is_done(self) -> bool:
        return self._phases[-1] is Phase.ANSWER and self._matcher.is_done


class Reading:
    """How the text of one request is read, and what that took."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.num_masks, self.seconds = 0, 0.0

    @property
    def is_slow(self) -> bool:
        """Has it kept others waiting for longer than any text may?"""
        return self.seconds > FREE_SECONDS + SECONDS_A_MASK * self.num_masks

    def read(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens; False if they leave the language."""
        for token in token_ids:
            if self.matcher.is_done:
                break
            if not self.matcher.accept(token):
                return False
        return True


class Readings:
    """The texts of whoever has attached to a language."""

    def __init__(self, compiled: CompiledGrammar, spelling: Spelling) -> None:
        self._compiled, self._spelling, self._num_words = compiled, spelling, spelling.num_words
        self._stops = np.zeros(self._num_words, dtype=np.int32)  # the mask of the stop tokens
        for token in spelling.stop_token_ids:
            self._stops[token // 32] |= bit(token)
        self._readings: dict[str, Reading] = {}  # by request id
        self._ended: dict[str, str | None] = {}

    def fill(self, rows: Sequence[Row], masks: np.ndarray) -> Filled:
        """What may come behind each text, and behind each of its drafts, into masks [rows + drafts, W]."""
        place = 0
        for row in rows:
            end = place + 1 + len(row.drafts)
            self._fill_or_end(row, masks[place:end])
            place = end
        ended, self._ended = self._ended, {}
        return Filled(ended)

    def force(self, rows: Sequence[Row], most: int) -> Forced:
        """Read on, and of each text tell up to so many tokens that must come next."""
        return Forced({row.request_id: tokens for row in rows if (tokens := self._force_row(row, most))})

    def forget(self, request_id: str) -> None:
        self._readings.pop(request_id, None)

    def _fill_or_end(self, row: Row, masks: np.ndarray) -> None:
        """A grammar that fails ends its own text and no other."""
        try:
            self._fill_row(row, masks)
        except Exception as error:
            logger.exception("the grammar of request %s has failed", row.request_id)
            self._ended[row.request_id] = f"its grammar has failed: {type(error).__name__}: {error}"
            masks[:] = ANY_TOKEN

    def _force_row(self, row: Row, most: int) -> list[int]:
        """What goes wrong is told with the next masks."""
        reading, began = self._reading(row), time.thread_time()
        try:
            if reading.read(row.new_token_ids):
                return forced_tokens(reading.matcher, self._spelling, most)
            self._ended[row.request_id] = LEFT
        except Exception as error:
            logger.exception("the grammar of request %s has failed", row.request_id)
            self._ended[row.request_id] = f"its grammar has failed: {type(error).__name__}: {error}"
        finally:
            reading.seconds += time.thread_time() - began
        return []

    def _fill_row(self, row: Row, masks: np.ndarray) -> None:
        request_id, reading = row.request_id, self._reading(row)
        masks[:] = ANY_TOKEN
        began, matcher = time.thread_time(), reading.matcher
        if not reading.read(row.new_token_ids):
            self._ended[request_id] = LEFT
        elif matcher.is_done:
            self._ended[request_id] = None
        else:
            self._fill(matcher, masks, row.drafts)
            if self._is_whole(masks[0], may_stop=row.may_stop):
                self._ended[request_id] = None
        reading.seconds += time.thread_time() - began
        reading.num_masks += len(masks)
        if reading.is_slow and request_id not in self._ended:
            self._ended[request_id] = (
                f"its grammar has taken {reading.seconds:.1f} s for {reading.num_masks} masks, in which all "
                "others waited; write it such that there are fewer ways to read a text"
            )

    def _reading(self, row: Row) -> Reading:
        reading = self._readings.get(row.request_id)
        if reading is None:
            matcher: Matcher = self._compiled.start()
            if row.thinking is not None:
                start, end = row.thinking
                matcher = Delayed(matcher, start=start, end=end, stops=self._stops)
            reading = self._readings[row.request_id] = Reading(matcher)
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

    def _is_whole(self, mask: np.ndarray, *, may_stop: bool) -> bool:
        """May only a stop token come, where there is none or min_tokens holds it back?"""
        return not (may_stop and self._stops.any()) and not (mask & ~self._stops).any()


def bit(token_id: int) -> np.int32:
    """A token's bit in its word of a mask."""
    return np.uint32(1 << token_id % 32).view(np.int32)
