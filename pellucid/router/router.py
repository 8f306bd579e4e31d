"""Which engine a request goes to, of several that hold the same model.  Pure: knows no processes or sockets.

The rule: *least loaded, then longest known prefix*.  An engine's load is the work that it has been handed and
not yet done.  Engines that idle are the candidates.  If none does, the least loaded one is, and so is every
other whose load is above the least by no more than an eighth of it and this one request.  Among candidates
the one that knows the longest beginning of the prompt wins; among those the least loaded; among those they
take turns.  So requests with a common beginning meet where its KV is, but never while another engine idles.

Requests end sooner than they might.  If an engine comes to idle while another one has a queue, the youngest
requests of that queue move over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pellucid.kv.hashes import BlockHasher, root_digest
from pellucid.types import Request, SeqUpdate

OUTPUT_WORK = 8  # a token that is generated costs about as much as this many of a prompt
MAX_OUTPUT = 1024  # tokens; a request that may generate more seldom does
SLACK = 8  # engines within 1/8 of the least load are as good as equal


@dataclass(slots=True)
class Handed:
    """A request that an engine has and has not answered, and the work left in it."""

    engine: int
    prompt_work: int  # until the first token has come
    output_work: int  # until it has ended

    @property
    def work(self) -> int:
        return self.prompt_work + self.output_work


class Move(NamedTuple):
    """A request that one engine is to forget and another one to take."""

    request: Request
    source: int
    target: int


class Router:
    """Chooses, and remembers what it chose: what each engine has to do, and which prefixes it has seen.

    block_size: tokens, the unit of prefix hits.  num_blocks: how many blocks an engine can remember, 0 if it
    caches no prefixes.
    """

    def __init__(self, num_engines: int, *, block_size: int, num_blocks: int) -> None:
        self.loads = [0] * num_engines  # in prompt tokens, or as much work as they are
        self._open = set(range(num_engines))
        self._known = [PrefixMemory(num_blocks) for _ in range(num_engines)]
        self._hasher = BlockHasher(block_size) if num_blocks else None
        self._handed: dict[str, Handed] = {}  # by request id
        # For each engine by id, oldest first: requests of which it has not said anything.
        self._untold: list[dict[str, Request]] = [{} for _ in range(num_engines)]
        self._left: set[tuple[int, str]] = (
            set()
        )  # engine and request that has moved, until the engine ends it
        self._next = 0  # whose turn it is among equals

    def choose(self, request: Request) -> int | None:
        """The engine that this request goes to; from now on it counts there.  None if none is left."""
        if not self._open:
            return None
        digests = self._digests(request)
        work = len(request.prompt_token_ids) + OUTPUT_WORK * most_output(request)
        least = min(self.loads[engine] for engine in self._open)
        most = least + least // SLACK + work if least else 0
        candidates = [engine for engine in self._open if self.loads[engine] <= most]
        known = {engine: self._known[engine].num_leading(digests) for engine in candidates}

        def rank(engine: int) -> tuple[int, int, int]:
            return -known[engine], self.loads[engine], (engine - self._next) % len(self.loads)

        chosen = min(candidates, key=rank)
        self._next = (chosen + 1) % len(self.loads)
        self._hand(request, chosen, digests)
        return chosen

    def _hand(self, request: Request, engine: int, digests: list[bytes]) -> None:
        prompt_work = len(request.prompt_token_ids)
        if self._hasher is not None:
            prompt_work -= self._known[engine].num_leading(digests) * self._hasher.block_size
        self._known[engine].add(digests)
        handed = Handed(engine, prompt_work, OUTPUT_WORK * most_output(request))
        self._handed[request.id] = handed
        self._untold[engine][request.id] = request
        self.loads[engine] += handed.work

    def note(self, engine: int, updates: Iterable[SeqUpdate]) -> list[SeqUpdate]:
        """Take in what an engine has done.  Returns what counts: nothing of requests that have left it."""
        counted: list[SeqUpdate] = []
        for update in updates:
            name, has_ended = update.request_id, update.finish_reason is not None
            if (engine, name) in self._left:
                if has_ended:
                    self._left.remove((engine, name))
                continue
            counted.append(update)
            handed = self._handed.get(name)
            if handed is None:
                continue
            self._untold[engine].pop(name, None)
            if handed.prompt_work and update.new_token_ids:
                self.loads[engine] -= handed.prompt_work
                handed.prompt_work = 0
            if has_ended:
                self.loads[engine] -= handed.work
                del self._handed[name]
        if engine not in self._open:  # these were its last words
            self._left = {(source, name) for source, name in self._left if source != engine}
        return counted

    def moves(self, num_waiting: Sequence[int]) -> list[Move]:
        """What is to move from engines that queue to such as idle; from now on it counts there.

        num_waiting: how many requests of each engine do not run, as it has said.
        """
        moves: list[Move] = []
        for target in [engine for engine in self._open if not self.loads[engine]]:
            sources = [engine for engine in self._open if num_waiting[engine] and self._untold[engine]]
            for source in sorted(sources, key=lambda engine: -self.loads[engine]):
                moves += self._move_some(source, target, num_waiting[source])
        return moves

    def _move_some(self, source: int, target: int, most: int) -> list[Move]:
        """Move the youngest, at most so many, until both have as much to do; one at least, not the last."""
        moves: list[Move] = []
        for request in reversed(list(self._untold[source].values())):
            handed = self._handed[request.id]
            left = self.loads[source] - handed.work
            if (
                len(moves) == most
                or not left
                or (self.loads[target] and self.loads[target] + handed.work > left)
            ):
                break
            if (target, request.id) in self._left:
                continue  # its end there would be taken for the new one's
            self.loads[source] -= handed.work
            del self._untold[source][request.id]
            self._left.add((source, request.id))
            self._hand(request, target, self._digests(request))
            moves.append(Move(request, source, target))
        return moves

    def engine_of(self, request_id: str) -> int | None:
        """Where a request is; None if it has ended."""
        handed = self._handed.get(request_id)
        return None if handed is None else handed.engine

    def close(self, engine: int) -> list[str]:
        """Send nothing to this engine any more; the ids of the requests that it has."""
        self._open.discard(engine)
        self._untold[engine].clear()
        return [request_id for request_id, handed in self._handed.items() if handed.engine == engine]

    def forget_prefixes(self) -> None:
        """The engines have forgotten theirs."""
        for memory in self._known:
            memory.clear()

    def _digests(self, request: Request) -> list[bytes]:
        digests: list[bytes] = []
        if self._hasher is not None:
            root = root_digest(request.lora, request.cache_salt)
            self._hasher.extend(digests, request.prompt_token_ids, root)
        return digests


def most_output(request: Request) -> int:
    """Tokens that a request is reckoned to generate."""
    max_tokens = request.sampling.max_tokens
    return MAX_OUTPUT if max_tokens is None else min(max_tokens, MAX_OUTPUT)


class PrefixMemory:
    """The blocks that an engine has been sent, by digest, as far as its KV cache may still hold them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._digests)

    def num_leading(self, digests: Sequence[bytes]) -> int:
        """How many blocks are known from the first on."""
        for index, digest in enumerate(digests):
            if digest not in self._digests:
                return index
        return len(digests)

    def add(self, digests: Sequence[bytes]) -> None:
        """Remember a prompt's blocks, the last ones forgotten first: without the first they are of no use."""
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self.num_blocks:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        self._digests.clear()
