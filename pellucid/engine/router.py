"""Which engine a request goes to, of several that hold the same model.  Pure: knows no processes or sockets.

The rule: *least loaded, then longest known prefix*.  An engine's load is the work that it has been handed and
not yet done.  The least loaded engine is a candidate, and so is every other whose load is above the least by
no more than an eighth of it and this one request.  Among candidates the one that knows the longest beginning
of the prompt wins; among those the least loaded; among those they take turns.  So requests with a common
beginning meet where its KV is, but never while another engine idles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        self._next = 0  # whose turn it is among equals

    def choose(self, request: Request) -> int | None:
        """The engine that this request goes to; from now on it counts there.  None if none is left."""
        if not self._open:
            return None
        digests = self._digests(request)
        prompt_work, output_work = len(request.prompt_token_ids), OUTPUT_WORK * most_output(request)
        least = min(self.loads[engine] for engine in self._open)
        most = least + least // SLACK + prompt_work + output_work
        candidates = [engine for engine in self._open if self.loads[engine] <= most]
        known = {engine: self._known[engine].num_leading(digests) for engine in candidates}

        def rank(engine: int) -> tuple[int, int, int]:
            return -known[engine], self.loads[engine], (engine - self._next) % len(self.loads)

        chosen = min(candidates, key=rank)
        self._next = (chosen + 1) % len(self.loads)
        self._known[chosen].add(digests)
        if self._hasher is not None:
            prompt_work -= known[chosen] * self._hasher.block_size
        self._handed[request.id] = Handed(chosen, prompt_work, output_work)
        self.loads[chosen] += prompt_work + output_work
        return chosen

    def note(self, updates: Iterable[SeqUpdate]) -> None:
        """Take in what engines have done."""
        for update in updates:
            handed = self._handed.get(update.request_id)
            if handed is None:
                continue
            if handed.prompt_work and update.new_token_ids:
                self.loads[handed.engine] -= handed.prompt_work
                handed.prompt_work = 0
            if update.finish_reason is not None:
                self.loads[handed.engine] -= handed.prompt_work + handed.output_work
                del self._handed[update.request_id]

    def engine_of(self, request_id: str) -> int | None:
        """Where a request is; None if it has ended."""
        handed = self._handed.get(request_id)
        return None if handed is None else handed.engine

    def close(self, engine: int) -> list[str]:
        """Send nothing to this engine any more; the ids of the requests that it has."""
        self._open.discard(engine)
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
