"""Stop strings: where a text ends, though the string may be spread over many tokens.

Text that may be the beginning of a stop string is held back, so nothing is shown that must be taken back.
Knows text alone; which token completed it, and how many tokens there must be before, is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text as it grows; `matched` is the stop string that ended it, or None.

    The stop string that is complete first wins; among those complete at once, the first in the list.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self.matched: str | None = None
        self._stops = list(stops)
        self._include = include_in_output
        self._longest = max(len(stop) for stop in stops)
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take in the next piece of text and return what may be shown.

        armed: False while stop strings do not count yet (min_tokens); they count when they end in armed text.
        """
        assert self.matched is None, f"text {text!r} after the stop string {self.matched!r}"
        num_old = len(self._held)
        text = self._held + text
        if armed and (end := self._find(text, num_old)):
            self._held = ""
            assert self.matched is not None
            return text[: end if self._include else end - len(self.matched)]
        held = self._possible_beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> int:
        """Set `matched` to the stop string that ends first, behind the old text; its end, or 0."""
        first_end = 0
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            end = start + len(stop)
            if start >= 0 and (not first_end or end < first_end):
                self.matched, first_end = stop, end
        return first_end

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
