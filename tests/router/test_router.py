"""Which engine gets a request: the least loaded, and of those the one that knows its beginning."""

from __future__ import annotations

import random
import zlib

import pytest

from pellucid.router.router import MAX_OUTPUT, MOST_LOST, OUTPUT_WORK, SLACK, PrefixMemory, Router
from pellucid.sampling_params import SamplingParams
from pellucid.types import FinishReason, Request, SeqUpdate, TokenLogprobs

BLOCK = 16


def make_router(num_engines: int, num_blocks: int = 1000) -> Router:
    return Router(num_engines, block_size=BLOCK, num_blocks=num_blocks)


def request(
    name: object,
    tokens: list[int] | None = None,
    *,
    max_tokens: int | None = 64,
    cache_salt: str | None = None,
) -> Request:
    """By default with a prompt that no other request begins with."""
    first = zlib.crc32(str(name).encode()) % (1 << 30)
    own = [*range(first, first + 40)]
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(id=str(name), prompt_token_ids=tokens or own, sampling=sampling, cache_salt=cache_salt)


def place(router: Router, *args: object, **options: object) -> int:
    engine = router.choose(request(*args, **options))  # type: ignore[arg-type]
    assert engine is not None
    return engine


def end(router: Router, *names: object) -> None:
    for name in map(str, names):
        if (engine := router.engine_of(name)) is not None:
            tell(router, SeqUpdate(name, [1], finish_reason=FinishReason.STOP), engine)


def tell(router: Router, update: SeqUpdate, engine: int) -> bool:
    """An engine says something; does it count?"""
    return router.note(engine, [update]) == [update]


@pytest.mark.parametrize("num_engines", [1, 2, 3, 8])
def test_equal_requests_take_turns(num_engines: int) -> None:
    router = make_router(num_engines)
    engines = [place(router, i) for i in range(5 * num_engines)]
    assert engines == [*range(num_engines)] * 5


def test_engines_that_idle_take_turns_too() -> None:
    router = make_router(3)
    engines = []
    for i in range(6):
        engines.append(place(router, i))
        end(router, i)
    assert engines == [0, 1, 2, 0, 1, 2]


def test_a_request_goes_where_least_is_to_do() -> None:
    router = make_router(2)
    assert place(router, "long answer", max_tokens=500) == 0
    assert [place(router, i, max_tokens=100) for i in range(4)] == [1, 1, 1, 1]
    end(router, "long answer")
    assert place(router, "next") == 0


def test_a_long_prompt_counts_until_its_first_token_has_come() -> None:
    router = make_router(2)
    assert place(router, "long", [*range(40_000)]) == 0
    assert [place(router, i) for i in range(3)] == [1, 1, 1]
    tell(router, SeqUpdate("long"), 0)  # another chunk of the prompt
    assert place(router, 3) == 1
    tell(router, SeqUpdate("long", [7]), 0)
    assert place(router, 4) == 0


def test_no_answer_is_reckoned_longer_than_answers_are() -> None:
    router = make_router(2)
    place(router, "no limit", max_tokens=None)
    place(router, "a high limit", max_tokens=100 * MAX_OUTPUT)
    assert router.loads == [40 + OUTPUT_WORK * MAX_OUTPUT] * 2


def test_random_requests_are_spread_fairly() -> None:
    rng = random.Random(0)
    router, handed, work = make_router(4), [0] * 4, [0] * 4
    for i in range(1500):
        length, output = rng.randint(1, 1000), rng.randint(1, 500)
        tokens = [rng.randrange(1 << 30) for _ in range(length)]
        engine = place(router, i, tokens, max_tokens=output)
        handed[engine] += 1
        work[engine] += length + OUTPUT_WORK * output
        if i >= 200:
            end(router, i - 200)
    assert max(handed) < 1.1 * min(handed)
    assert max(work) < 1.05 * min(work)


def test_conversations_stay_where_they_began() -> None:
    router = make_router(4)
    homes: dict[int, set[int]] = {}
    for turn in range(1, 6):
        for user in range(8):
            history = [user * 1000 + i for i in range(turn * 50)]
            homes.setdefault(user, set()).add(place(router, (user, turn), history))
            end(router, (user, turn))
    assert all(len(engines) == 1 for engines in homes.values())
    assert [min(homes[user]) for user in range(8)] == [0, 1, 2, 3] * 2


def test_the_longest_known_beginning_wins() -> None:
    router = make_router(2)
    prompt = [*range(200)]
    assert place(router, "short", prompt[:64]) == 0
    assert place(router, "other") == 1
    end(router, "short", "other")
    assert place(router, "busy", max_tokens=1000) == 0
    assert place(router, "long", prompt) == 1  # 0 knows some of it, but has too much to do
    end(router, "busy", "long")
    assert place(router, "again", prompt[:100]) == 1


def test_a_common_system_prompt_does_not_unbalance_engines() -> None:
    router = make_router(4)
    system = [*range(2000)]
    for i in range(400):
        place(router, i, [*system, 5000 + i], max_tokens=100)
    work = 2001 + OUTPUT_WORK * 100
    assert max(router.loads) <= min(router.loads) * (1 + 1 / SLACK) + work


def hit_rate(num_groups: int, num_engines: int, num_blocks: int) -> float:
    """How often an engine still has the system prompt of the request that it gets."""
    rng = random.Random(1)
    router = make_router(num_engines, num_blocks)
    caches = [PrefixMemory(num_blocks) for _ in range(num_engines)]
    running, num_hits = [], 0
    for i in range(1000):
        group = rng.randrange(num_groups)
        blocks = [f"{group}-{block}".encode() for block in range(64)]
        tokens = [group * 10_000 + token for token in range(64 * BLOCK)]
        engine = place(router, i, [*tokens, 1_000_000 + i], max_tokens=64)
        num_hits += caches[engine].num_leading(blocks) == len(blocks)
        caches[engine].add(blocks)
        running.append(i)
        if len(running) > 10 * num_engines:
            end(router, running.pop(rng.randrange(len(running))))
    return num_hits / 1000


def test_groups_of_requests_find_homes_when_no_engine_can_remember_all() -> None:
    by_chance = 4 / 12  # an engine remembers four of the twelve
    assert hit_rate(num_groups=12, num_engines=4, num_blocks=4 * 64) > 0.85 > 2 * by_chance


def test_a_salt_keeps_prefixes_apart() -> None:
    router = make_router(3)
    prompt = [*range(100)]
    engines = []
    for name, salt in [("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", None)]:
        engines.append(place(router, name, prompt, cache_salt=salt))
        end(router, name)
    assert engines == [0, 1, 2, 1, 0]


def test_forgotten_prefixes_attract_nobody() -> None:
    router = make_router(2)
    prompt = [*range(100)]
    engines = []
    for name in "abc":
        engines.append(place(router, name, prompt))
        end(router, name)
        router.forget_prefixes()
    assert engines == [0, 1, 0]


def test_without_a_prefix_cache_nothing_is_remembered() -> None:
    router = make_router(2, num_blocks=0)
    engines = []
    for name in "abcd":
        engines.append(place(router, name, [*range(100)]))
        end(router, name)
    assert engines == [0, 1, 0, 1]


def test_a_closed_engine_gets_nothing_and_its_requests_are_named() -> None:
    router = make_router(2)
    for name in "abcd":
        place(router, name)
    assert router.close(0) == ["a", "c"]
    assert {place(router, i) for i in range(20)} == {1}
    assert router.engine_of("a") == 0 and router.engine_of("b") == 1
    end(router, "a")
    assert router.engine_of("a") is None
    router.close(1)
    assert router.choose(request("last")) is None


def test_of_two_equal_prompts_the_second_goes_where_nobody_is() -> None:
    router = make_router(2)
    assert [place(router, name, [*range(100)]) for name in "ab"] == [0, 1]


class Machine:
    """Engines that run some requests each and queue the others, as their router sees them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num = rng, rng.randint(2, 4)
        self.num_slots = rng.randint(1, 3)
        self.router = make_router(self.num, num_blocks=rng.choice([0, 50]))
        self.queues: list[list[Request]] = [[] for _ in range(self.num)]  # the first ones run
        self.unheard: list[list[str]] = [[] for _ in range(self.num)]  # aborts that they have not read
        self.is_open, self.ended = [True] * self.num, list[str]()
        self.num_moves = 0

    def num_waiting(self) -> list[int]:
        return [max(0, len(queue) - self.num_slots) for queue in self.queues]

    def add(self, new: Request) -> None:
        engine = self.router.choose(new)
        assert engine is not None
        idle = [e for e in range(self.num) if self.is_open[e] and not self.queues[e]]
        assert not idle or engine in idle, "another one idles"
        self.queues[engine].append(new)

    def say(self, engine: int) -> None:
        """One of those that run has its next token, or its last one."""
        queue = self.queues[engine]
        if not queue:
            return
        chosen = self.rng.choice(queue[: self.num_slots])
        reason = self.rng.choice([None, FinishReason.STOP])
        counts = tell(self.router, SeqUpdate(chosen.id, [1], finish_reason=reason), engine)
        if reason is not None:
            queue.remove(chosen)
            self.ended += [chosen.id] * counts

    def hear(self, engine: int) -> None:
        """It reads the first abort."""
        if self.unheard[engine]:
            name = self.unheard[engine].pop(0)
            found = [r for r in self.queues[engine] if r.id == name]
            for old in found:
                self.queues[engine].remove(old)
                gone = SeqUpdate(name, finish_reason=FinishReason.ABORT)
                assert not tell(self.router, gone, engine), "it has moved"

    def move(self) -> None:
        for request, source, target in self.router.moves(self.num_waiting()):
            assert self.is_open[source] and self.is_open[target] and source != target
            self.unheard[source].append(request.id)
            self.queues[target].append(request)
            self.num_moves += 1

    def check(self) -> None:
        """Nobody idles while a request waits elsewhere, unless it was here and its end has not come."""
        idle = [e for e in range(self.num) if self.is_open[e] and not self.queues[e]]
        for engine, queue in enumerate(self.queues):
            here = [r.id for r in queue if self.router.engine_of(r.id) == engine]
            assert not idle or len(here) <= self.num_slots


@pytest.mark.parametrize("seed", range(40))
def test_no_engine_idles_while_another_one_has_a_queue(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(rng)
    shared = [rng.randrange(100) for _ in range(400)]
    for i in range(400):
        engine, action = rng.randrange(machine.num), rng.random()
        if action < 0.4 and i < 300:
            tokens = shared[: rng.randrange(400)] + [rng.randrange(100)]
            machine.add(request(i, tokens, max_tokens=rng.choice([None, 1, 50, 5000])))
        elif action < 0.7:
            machine.say(engine)
        else:
            machine.hear(engine)
        machine.move()
        machine.check()
    while any(machine.queues):
        for engine in range(machine.num):
            machine.hear(engine)
            machine.say(engine)
            machine.move()
            machine.check()
    assert len(machine.ended) == len(set(machine.ended)) and machine.router.loads == [0] * machine.num


def test_what_moves_is_the_youngest_half_of_the_work() -> None:
    router = make_router(2)
    for name in ("a", "b"):
        place(router, name, max_tokens=100)
    for i in range(6):
        place(router, i, max_tokens=100)
    assert router.moves([2, 2]) == [], "none idles"
    end(router, "b", 1, 3, 5)
    moves = router.moves([2, 0])
    assert [(move.request.id, move.source, move.target) for move in moves] == [("4", 0, 1), ("2", 0, 1)]
    assert router.engine_of("4") == 1 and router.loads[0] == router.loads[1]
    assert not tell(router, SeqUpdate("4", [1]), 0) and tell(router, SeqUpdate("4", [1]), 1)


def test_what_nobody_wants_moves_nowhere() -> None:
    router = make_router(2)
    for i in range(8):
        place(router, i, max_tokens=100)
    assert tell(router, SeqUpdate("0", [1]), 0)
    for i in (2, 4, 6):
        router.abort(f"{i}")
    end(router, 1, 3, 5, 7)
    assert router.moves([3, 0]) == [], "its engine has not said yet that these have ended"
    end(router, 2, 4, 6)
    assert router.loads[0] > 0 == router.loads[1]


def test_nothing_is_remembered_of_what_has_left_an_engine_that_is_closed() -> None:
    router = make_router(3)
    for i in range(9):
        place(router, i, max_tokens=100)
    end(router, 1, 4, 7)
    moved = [move.request.id for move in router.moves([2, 0, 0])]
    assert moved == ["6"] and router.engine_of("6") == 1
    router.close(0)
    assert not tell(router, SeqUpdate("6", [1]), 0), "its last words do not count"
    assert not router._left, "there will be no others"


def test_what_has_begun_stays_and_so_does_a_lonely_one() -> None:
    router = make_router(2)
    for name in "abcd":
        place(router, name)
    end(router, "b", "d")
    tell(router, SeqUpdate("c", [1]), 0)
    tell(router, SeqUpdate("a", [1]), 0)
    assert router.moves([1, 0]) == []
    end(router, "a", "c")
    place(router, "e")
    assert router.moves([1, 1]) == [], "it would be as lonely there"


def test_a_request_goes_on_from_what_its_user_has_been_told() -> None:
    router = make_router(2)
    for name in "ab":
        place(router, name)
    scored = [TokenLogprobs([i], [0.0], 1) for i in range(5)]
    tell(router, SeqUpdate("a", [5, 6], prompt_logprobs=scored[:4]), 0)
    tell(router, SeqUpdate("a", [7]), 0)
    assert router.close(0) == ["a"]
    move = router.go_on("a", is_suspect=False)
    assert move is not None and move.target == 1 and move.request.prior_token_ids == [5, 6, 7]
    assert router.loads[0] == 0 and router.engine_of("a") == 1
    tell(router, SeqUpdate("a", [8], finish_reason=FinishReason.STOP), 1)
    assert router.close(1) == ["b"] and router.go_on("b", is_suspect=False) is None, "nobody is left"


def test_what_has_been_told_of_a_prompt_is_not_told_again() -> None:
    router = make_router(2)
    place(router, "a")
    scored = [TokenLogprobs([i], [0.0], 1) for i in range(5)]
    tell(router, SeqUpdate("a", prompt_logprobs=scored[:3]), 0)
    router.close(0)
    move = router.go_on("a", is_suspect=False)
    assert move is not None and not move.request.prior_token_ids
    again = [SeqUpdate("a", prompt_logprobs=scored[:2]), SeqUpdate("a", prompt_logprobs=scored[2:])]
    router.note(1, again)
    assert [update.prompt_logprobs for update in again] == [[], scored[3:]]


def test_what_may_have_ended_an_engine_ends_one_more_and_never_the_last() -> None:
    router = make_router(4)
    place(router, "fatal")
    for index, goes_on in enumerate([True, False]):
        assert router.close(index) == ["fatal"]
        assert (router.go_on("fatal", is_suspect=True) is not None) == goes_on
    router = make_router(2)
    place(router, "fatal")
    router.close(0)
    assert router.go_on("fatal", is_suspect=True) is None


def test_a_request_outlives_a_few_engines_and_not_any_number() -> None:
    router = make_router(9)
    place(router, "a")
    num_lost = 0
    while True:
        router.close(router.engine_of("a") or 0)
        num_lost += 1
        if router.go_on("a", is_suspect=False) is None:
            break
    assert num_lost == MOST_LOST + 1


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_loads_are_the_work_that_is_left(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 5)
    router = make_router(num, num_blocks=rng.choice([0, 3, 50]))
    running: list[str] = []
    is_open = set(range(num))
    shared = [rng.randrange(100) for _ in range(400)]
    for i in range(300):
        action = rng.random()
        if action < 0.5:
            tokens = shared[: rng.randrange(400)] + [rng.randrange(100)]
            new = request(i, tokens, max_tokens=rng.choice([None, 1, 50, 5000]))
            before = list(router.loads)
            engine = router.choose(new)
            assert (engine is None) == (not is_open)
            if engine is not None:
                least = min(before[e] for e in is_open)
                output = min(new.sampling.max_tokens or MAX_OUTPUT, MAX_OUTPUT)
                assert engine in is_open
                work = len(tokens) + OUTPUT_WORK * output
                assert before[engine] <= (least * (1 + 1 / SLACK) + work if least else 0)
                assert (
                    before[engine]
                    < router.loads[engine]
                    <= before[engine] + len(tokens) + (OUTPUT_WORK * output)
                )
                running.append(new.id)
        elif action < 0.7 and running:
            name = rng.choice(running)
            tell(router, SeqUpdate(name, [1]), router.engine_of(name) or 0)
        elif action < 0.95 and running:
            end(router, running.pop(rng.randrange(len(running))))
        elif action > 0.995 and is_open:
            router.close(is_open.pop())
        assert all(load >= 0 for load in router.loads)
    end(router, *running, "never seen")
    assert router.loads == [0] * num
    assert all(len(memory) <= memory.num_blocks for memory in router._known)


def test_the_memory_forgets_what_was_longest_unused_and_ends_before_beginnings() -> None:
    memory = PrefixMemory(4)
    a, b, c = ([f"{name}{i}".encode() for i in range(3)] for name in "abc")
    memory.add(a)
    memory.add(b)
    assert (memory.num_leading(a), memory.num_leading(b)) == (1, 3)
    memory.add(a[:1])
    memory.add(c)
    assert [memory.num_leading(digests) for digests in (a, b, c)] == [1, 0, 3]
    memory.add([f"d{i}".encode() for i in range(9)])
    assert memory.num_leading([f"d{i}".encode() for i in range(9)]) == 4
