"""Responses that are kept, so that requests can ask for them or go on from them: the last ones, in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pellucid.server.errors import ApiError
from pellucid.server.protocol.openai import JsonObject
from pellucid.server.protocol.responses_output import ResponseBody

MOST_BYTES = 2**26  # of all that is kept, as JSON


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """One response, and the conversation that it ends.

    owner: who may ask for it.  messages: the conversation's, the earlier ones those of the response that it
    goes on from.  own: those that its request brought.  task: that makes it, in the background.  num_bytes:
    of the response alone.
    """

    body: ResponseBody
    owner: str
    messages: Sequence[JsonObject]
    own: Sequence[JsonObject]
    close: Callable[[], None] | None = None
    task: asyncio.Task[None] | None = None
    num_bytes: int = field(default=0)


class StoredResponses:
    """The last ones, by id; each use of one makes it the last.

    Those that are being made in the background are kept besides, until they end.
    """

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # that have ended
        self._begun: dict[str, StoredResponse] = {}
        self._num_bytes = 0
        # Of each message its bytes and in how many conversations it is, by identity: one that goes on shares
        # those of the response before, and holds them when that is no longer kept.
        self._messages: dict[int, tuple[int, int]] = {}

    def put(self, stored: StoredResponse) -> None:
        """Keep one, in place of an earlier state of it, and let the oldest go."""
        self._drop(stored.body.id)
        stored.num_bytes = len(msgspec.json.encode(stored.body))
        kept = self._begun if stored.body.status == "in_progress" else self._stored
        kept[stored.body.id] = stored
        self._num_bytes += stored.num_bytes
        for message in stored.messages:
            num_bytes, num = self._messages.get(id(message)) or (len(msgspec.json.encode(message)), 0)
            self._messages[id(message)] = num_bytes, num + 1
            self._num_bytes += 0 if num else num_bytes
        while len(self._stored) > self._most or self._has_too_much:
            self._drop(next(iter(self._stored)))

    def end(self, stored: StoredResponse) -> None:
        """One that was being made has ended; nothing happens if it has been deleted meanwhile."""
        if stored.body.id in self._begun:
            self.put(stored)

    def get(self, id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """Raises a 404 for one that is not kept, or is somebody else's."""
        stored = self._begun.get(id) or self._stored.get(id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"the response {id!r} is not stored here: the last {self._most:,} are, of requests with "
                "store: true (--max-stored-responses)",
                param=param,
            )
        if id in self._stored:
            self._stored.move_to_end(id)
        return stored

    def delete(self, id: str, owner: str) -> None:
        """As `get`; what makes it is ended."""
        self.get(id, owner)
        self._drop(id, ends=True)

    @property
    def _has_too_much(self) -> bool:
        """The last one is kept, however large it is."""
        return self._num_bytes > self._most_bytes and len(self._stored) > 1

    def _drop(self, response_id: str, *, ends: bool = False) -> None:
        stored = self._begun.pop(response_id, None) or self._stored.pop(response_id, None)
        if stored is None:
            return
        self._num_bytes -= stored.num_bytes
        for message in stored.messages:
            num_bytes, num = self._messages.pop(id(message))
            if num > 1:
                self._messages[id(message)] = num_bytes, num - 1
            else:
                self._num_bytes -= num_bytes
        if ends and stored.close is not None:
            stored.close()
