"""Which engine a request goes to, of several that hold the same model.  Pure: knows no processes or sockets.

The rule: *least loaded, then longest known prefix*.  An engine's load is the work that it has been handed and
not yet done.  Engines that idle are the candidates.  If none does, the least loaded one is, and so is every
other whose load is above the least by no more than an eighth of it and this one request.  Among candidates
the one that knows the longest beginning of the prompt wins; among those the least loaded; among those they
take turns.  So requests with a common beginning meet where its KV is, but never while another engine idles.

A request may move (law 12): one whose engine is lost goes on at another, from the tokens told so far.

Engines may have roles.  Then those for prompts, the first `num_prefill`, take a request to its first token,
for one token's worth of work, and it is handed over to one of the others.  While no engine of a role is left,
those of the other one do its work, too.

Requests end sooner than they might.  If an engine comes to idle while another one has a queue, the youngest
requests of that queue move over.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pellucid.kv.hashes import Prefix, root_digest
from pellucid.types import FinishReason, Request, SeqUpdate

OUTPUT_WORK = 8  # a token that is generated costs about as much as this many of a prompt
MAX_OUTPUT = 1024  # tokens; a request that may generate more seldom does
MOST_LOST = 2  # engines under a request, before it may be what ends them
KEEP_KV = '{"do_remote_decode": true}'  # of a request's `kv_transfer`: another engine will ask for it
SLACK = 8  # engines within 1/8 of the least load are as good as equal


@dataclass(slots=True)
class Handed:
    """A request that an engine has and has not answered, and the work left in it."""

    request: Request  # as its user handed it in
    engine: int = -1
    prompt_work: int = 0  # until the first token has come
    output_work: int = 0  # until it has ended
    told: list[int] = field(default_factory=list[int])  # of its answer
    num_scored: int = 0  # positions of its prompt of which log-probabilities have been told
    num_repeated: int = 0  # of these, such as its engine is going to tell again
    num_lost: int = 0  # engines that it has had before
    is_aborted: bool = False  # its user wants no more
    is_prefill: bool = False  # its engine computes the prompt and the first token, and no more

    @property
    def work(self) -> int:
        return self.prompt_work + self.output_work

    @property
    def left(self) -> Request:
        """What goes on at another engine."""
        prior = [*self.request.prior_token_ids, *self.told]
        return replace(self.request, prior_token_ids=prior)

    @property
    def part(self) -> Request:
        """What its engine is to do."""
        if not self.is_prefill:
            return self.left
        sampling = self.request.sampling
        sampling = sampling.clone(max_tokens=1, min_tokens=min(1, sampling.min_tokens))
        return replace(self.request, sampling=sampling, kv_transfer=KEEP_KV)

    def has_room(self, max_len: int) -> bool:
        """May another token follow what has been told?"""
        most, num_told = self.request.sampling.max_tokens, len(self.told)
        return (most is None or num_told < most) and len(self.request.prompt_token_ids) + num_told < max_len

    def hear(self, update: SeqUpdate) -> None:
        """Remember what its user is told, and take out what was told before."""
        if self.told:  # with the first token was told what was cached
            update.num_cached_tokens = 0
        self.told += update.new_token_ids
        if update.prompt_logprobs:
            num_old = min(self.num_repeated, len(update.prompt_logprobs))
            self.num_repeated -= num_old
            update.prompt_logprobs = update.prompt_logprobs[num_old:]
            self.num_scored += len(update.prompt_logprobs)


class Move(NamedTuple):
    """A request that leaves one engine for another one; what that is to do."""

    request: Request
    source: int
    target: int


class Router:
    """Chooses, and remembers what it chose: what each engine has to do, and which prefixes it has seen.

    block_size: tokens, the unit of prefix hits.  num_blocks: how many blocks an engine can remember, 0 if it
    caches no prefixes.  num_prefill: engines for prompts; 0: all do all.  max_len: tokens of a request.
    """

    def __init__(
        self,
        num_engines: int,
        *,
        block_size: int,
        num_blocks: int,
        num_prefill: int = 0,
        max_len: int = sys.maxsize,
    ) -> None:
        self._prefill = frozenset(range(num_prefill))
        self._max_len = max_len
        self._due: dict[str, None] = {}  # requests that have their first token, and are to be handed over
        self.loads = [0] * num_engines  # in prompt tokens, or as much work as they are
        self._open = set(range(num_engines))
        self._known = [PrefixMemory(num_blocks) for _ in range(num_engines)]
        self._block_size, self._caches = block_size, num_blocks > 0
        self._handed: dict[str, Handed] = {}  # by request id
        # For each engine by id, oldest first: requests of which it has not said anything.
        self._untold: list[dict[str, Request]] = [{} for _ in range(num_engines)]
        # Engines and requests that have moved away: how often, until the engine has ended them.
        self._left = Counter[tuple[int, str]]()
        self._next = 0  # whose turn it is among equals

    def choose(self, request: Request) -> int | None:
        """The engine that this request goes to; from now on it counts there.  None if none is left."""
        if not self._open:
            return None
        digests = self._digests(request)
        is_prefill = self._is_prefill(request)
        engines = self._engines_for(is_prefill=is_prefill)
        work = request.num_known + OUTPUT_WORK * (1 if is_prefill else most_output(request))
        least = min(self.loads[engine] for engine in engines)
        most = least + least // SLACK + work if least else 0
        candidates = [engine for engine in engines if self.loads[engine] <= most]
        known = {engine: self._known[engine].num_leading(digests) for engine in candidates}

        def rank(engine: int) -> tuple[int, int, int]:
            return -known[engine], self.loads[engine], (engine - self._next) % len(self.loads)

        chosen = min(candidates, key=rank)
        self._next = (chosen + 1) % len(self.loads)
        self._hand(request, chosen, digests)
        return chosen

    def part_of(self, request_id: str) -> Request:
        """What its engine is to do of a request."""
        return self._handed[request_id].part

    def _is_prefill(self, request: Request) -> bool:
        """Is it for an engine of prompts, while there are others to go on?"""
        max_tokens = request.sampling.max_tokens
        is_long = max_tokens is None or max_tokens > 1
        has_both = bool(self._prefill & self._open) and bool(self._open - self._prefill)
        return has_both and is_long and not request.prior_token_ids

    def _engines_for(self, *, is_prefill: bool) -> set[int]:
        wanted = self._open & self._prefill if is_prefill else self._open - self._prefill
        return wanted or self._open

    def handovers(self) -> list[Move]:
        """Requests whose prompts are computed, to engines that go on; from now on they count there."""
        due, self._due = self._due, {}
        moves: list[Move] = []
        for name in due:
            handed = self._handed.get(name)
            if handed is None or not handed.is_prefill:
                continue
            source = handed.engine
            target = self.choose(handed.left)
            if target is not None:
                moves.append(Move(handed.part, source, target))
        return moves

    def go_on(self, request_id: str, *, is_suspect: bool) -> Move | None:
        """The engine of a request is closed: which one goes on with it, and from where.  None: nobody.

        is_suspect: it may be what has ended the engine.  Then it may end one more, but not the last.
        """
        handed = self._handed[request_id]
        handed.num_lost += 1
        most, others = (1, 2) if is_suspect else (MOST_LOST, 1)
        if handed.num_lost > most or len(self._open) < others:
            return None
        source, left = handed.engine, handed.left
        self.loads[source] -= handed.work
        if not left.prior_token_ids:  # with the first token all of the prompt has been told
            handed.num_repeated = handed.num_scored
        target = self.choose(left)
        assert target is not None, "some are open"
        return Move(handed.part, source, target)

    def _hand(self, request: Request, engine: int, digests: list[bytes]) -> None:
        prompt_work = request.num_known
        prompt_work -= self._known[engine].num_leading(digests) * self._block_size
        self._known[engine].add(digests)
        handed = self._handed.setdefault(request.id, Handed(request))
        handed.engine, handed.prompt_work = engine, prompt_work
        handed.is_prefill = self._is_prefill(request) and engine in self._prefill
        handed.output_work = OUTPUT_WORK * (1 if handed.is_prefill else most_output(request))
        self._untold[engine][request.id] = request
        self.loads[engine] += handed.work

    def note(self, engine: int, updates: Iterable[SeqUpdate]) -> list[SeqUpdate]:
        """Take in what an engine has done.  Returns what counts: nothing of requests that have left it."""
        counted: list[SeqUpdate] = []
        for update in updates:
            name, has_ended = update.request_id, update.finish_reason is not None
            if (engine, name) in self._left:
                if has_ended:
                    self._left -= Counter([(engine, name)])
                continue
            counted.append(update)
            handed = self._handed.get(name)
            if handed is None:
                continue
            handed.hear(update)
            self._untold[engine].pop(name, None)
            if handed.prompt_work and update.new_token_ids:
                self.loads[engine] -= handed.prompt_work
                handed.prompt_work = 0
            if has_ended:
                self.loads[engine] -= handed.work
                if handed.is_prefill and self._goes_over(handed, update):
                    handed.prompt_work = handed.output_work = 0
                else:
                    del self._handed[name]
        if engine not in self._open:  # these were its last words
            self._left = Counter({left: num for left, num in self._left.items() if left[0] != engine})
        return counted

    def _goes_over(self, handed: Handed, update: SeqUpdate) -> bool:
        """Has it ended because it has its first token alone?  Then nobody is told of that end."""
        if update.finish_reason is not FinishReason.LENGTH or not handed.has_room(self._max_len):
            return False
        update.finish_reason = FinishReason.ABORT if handed.is_aborted else None
        if not handed.is_aborted:
            self._due[update.request_id] = None
        return not handed.is_aborted

    def moves(self, num_waiting: Sequence[int]) -> list[Move]:
        """What is to move from engines that queue to such as idle; from now on it counts there.

        num_waiting: how many requests of each engine do not run, as it has said.
        """
        moves: list[Move] = []
        for target in [engine for engine in self._open if not self.loads[engine]]:
            alike = self._open & self._prefill if target in self._prefill else self._open - self._prefill
            sources = [engine for engine in alike if num_waiting[engine] and self._untold[engine]]
            for source in sorted(sources, key=lambda engine: -self.loads[engine]):
                moves += self._move_some(source, target, num_waiting[source])
        return moves

    def _move_some(self, source: int, target: int, most: int) -> list[Move]:
        """Move the youngest, at most so many, until both have as much to do; one at least, not the last."""
        moves: list[Move] = []
        for request in reversed(list(self._untold[source].values())):
            handed = self._handed[request.id]
            if handed.is_aborted:
                continue  # it would begin anew there, for nobody
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
            self._left[source, request.id] += 1
            self._hand(request, target, self._digests(request))
            moves.append(Move(handed.part, source, target))
        return moves

    def engine_of(self, request_id: str) -> int | None:
        """Where a request is; None if it has ended."""
        handed = self._handed.get(request_id)
        return None if handed is None else handed.engine

    def abort(self, request_id: str) -> int | None:
        """The same; its user wants no more of it."""
        handed = self._handed.get(request_id)
        if handed is None:
            return None
        handed.is_aborted = True
        return handed.engine

    def is_aborted(self, request_id: str) -> bool:
        return self._handed[request_id].is_aborted

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
        """The names of its prompt's blocks; none if nobody caches any."""
        prefix = Prefix(root_digest(*request.cache_key), self._block_size)
        if self._caches:
            prefix.extend(request.prompt_token_ids)
        return prefix.digests


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
