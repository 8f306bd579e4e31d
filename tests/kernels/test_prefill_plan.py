"""Plans of prompt attention: who attends to what; and attention by a plan, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.attention import prefill_plan
from pellucid.kernels.attention.paged_attention import PagedRows, paged_attention_ref
from pellucid.kernels.attention.prefill_attention import prefill_tiles
from pellucid.kernels.attention.prefill_plan import (
    KEYS,
    MAX_ROUNDS,
    MIN_ROUNDS,
    PROGRAM_FIELDS,
    SEGMENT_FIELDS,
    PromptTiles,
    heads_at_once,
    longest_first,
)
from tests.attention.paged import make_rows
from tests.diagonal import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = KEYS.value


@dataclass(frozen=True)
class Segment:
    """As a plan has it."""

    row: int
    kv_head: int
    first_token: int
    queries: int
    position: int
    seq_len: int
    begin: int
    end: int
    parts: int

    @property
    def item(self) -> tuple[int, int]:
        return self.first_token, self.kv_head

    @property
    def steps(self) -> int:
        """Of the item."""
        return -(-(self.position + self.queries) // STEP)


def rows_of(lens: list[tuple[int, int]]) -> PagedRows:
    """Rows of (queries, tokens) without a cache."""
    query_lens, seq_lens = ([each[i] for each in lens] for i in range(2))
    return PagedRows(
        block_table=torch.zeros(len(lens), 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int(),
        max_query=max(query_lens, default=1),
    )


def tiles_of(
    lens: list[tuple[int, int]], tile_queries: int, rows: PagedRows | None = None, num_padding: int = 0
) -> PromptTiles:
    """Of the rows; num_padding: tiles that are all the first of the last row, which has no others."""
    queries = [q for q, _ in lens]
    tiles = torch.from_numpy(prefill_tiles(queries[:-1] if num_padding else queries, tile_queries))
    padding = torch.tensor([[len(lens) - 1, 0]] * num_padding, dtype=torch.int32).reshape(-1, 2)
    return PromptTiles(torch.cat((tiles, padding)).to(DEVICE), rows or rows_of(lens), tile_queries)


def programs_of(plan: Tensor, num_programs: int) -> list[list[Segment]]:
    """What each program does."""
    numbers = plan.tolist()
    programs = []
    for program in range(num_programs):
        first, num, *flags = numbers[program * PROGRAM_FIELDS.value :][: PROGRAM_FIELDS.value]
        assert flags == [0, 0]
        assert num_programs * PROGRAM_FIELDS.value <= first <= len(numbers) - SEGMENT_FIELDS.value
        places = [first + i * SEGMENT_FIELDS.value for i in range(num)]
        programs.append([Segment(*numbers[at : at + SEGMENT_FIELDS.value]) for at in places])
        if not num:  # what it reads all the same
            assert not any(numbers[first : first + SEGMENT_FIELDS.value])
    return programs


def is_cut(programs: list[list[Segment]]) -> bool:
    return any(segment.parts for program in programs for segment in program)


def check(
    programs: list[list[Segment]],
    lens: list[tuple[int, int]],
    num_kv_heads: int,
    tile: int,
    window: int = 1 << 30,
) -> None:
    """Every step of every item is somebody's, and parts find together."""
    wanted = set()

    def oldest(position: int) -> int:
        return max(0, position - window + 1) // STEP

    first_token = 0
    for row, (num_query, seq_len) in enumerate(lens):
        for start in range(0, num_query, tile):
            queries = min(tile, num_query - start)
            position = seq_len - num_query + start
            facts = row, first_token + start, queries, position, seq_len
            steps = range(oldest(position), -(-(position + queries) // STEP))
            wanted |= {(head, *facts, step) for head in range(num_kv_heads) for step in steps}
        first_token += num_query
    found = [
        (s.kv_head, s.row, s.first_token, s.queries, s.position, s.seq_len, step)
        for program in programs
        for s in program
        for step in range(s.begin, s.end)
    ]
    assert len(found) == len(set(found)), "a step is taken twice"
    assert set(found) == wanted
    given = set()
    for number, program in enumerate(programs):
        for place, segment in enumerate(program):
            assert segment.begin < segment.end <= segment.steps
            if segment.parts < 0:
                assert place == 0, "what is given is first"
                assert segment.parts == -1 - number and segment.end < segment.steps
                given.add(number)
            elif segment.parts == 0:
                whole = oldest(segment.position), segment.steps
                assert (segment.begin, segment.end) == whole, "a part that nobody asks for"
            else:
                assert place == len(program) - 1, "who takes has ended"
                assert segment.begin > oldest(segment.position) and segment.end == segment.steps
                end = segment.begin
                for other in range(number - 1, number - 1 - segment.parts, -1):
                    part = programs[other][0]
                    assert part.item == segment.item and part.end == end and part.parts < 0
                    end = part.begin
                    given.remove(other)
                assert end == oldest(segment.position), "older keys are missing"
    assert not given, "a part is given that nobody takes"


def loads_of(programs: list[list[Segment]]) -> list[int]:
    return [sum(s.end - s.begin for s in program) for program in programs]


def random_lens(random: Random) -> list[tuple[int, int]]:
    shapes = (
        lambda: [(random.randint(1, 700), random.randint(0, 5000)) for _ in range(random.randint(1, 3))],
        lambda: [(random.randint(9, 60), random.choice((0, 0, 300))) for _ in range(random.randint(1, 32))],
        lambda: [(random.choice((256, 512, 1024)), random.choice((0, 2000, 4000, 8000)))],
        lambda: [(64 * random.randint(1, 12), 0), (random.randint(1, 64), 9000)],
    )
    return [(q, q + before) for q, before in random.choice(shapes)()]


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_taken_once_and_every_part_is_taken_by_who_has_the_rest(seed: int) -> None:
    random = Random(seed)
    lens = random_lens(random)
    num_kv_heads, tile = random.choice((1, 2, 8)), random.choice((16, 32, 64, 128))
    num_programs = random.choice((1, 5, 16, 33))
    plan = tiles_of(lens, tile).plan(num_kv_heads, num_programs)
    check(programs_of(plan, num_programs), lens, num_kv_heads, tile)


@pytest.mark.parametrize("seed", range(8))
def test_keys_that_no_window_shows_are_in_no_plan(seed: int) -> None:
    random = Random(300 + seed)
    lens, window = random_lens(random), random.choice((1, 100, 128, 700))
    num_kv_heads, tile, num_programs = random.choice((1, 8)), random.choice((16, 64)), random.choice((5, 33))
    tiles = tiles_of(lens, tile)
    plan = tiles.plan(num_kv_heads, num_programs, window)
    check(programs_of(plan, num_programs), lens, num_kv_heads, tile, window)
    check(programs_of(tiles.plan(num_kv_heads, num_programs), num_programs), lens, num_kv_heads, tile)


@pytest.mark.parametrize("seed", range(10))
def test_few_tiles_are_taken_as_they_come(seed: int) -> None:
    """Each row's last queries, and behind them a tile of padding again and again, which has no queries."""
    random = Random(200 + seed)
    lens = random_lens(random)
    wanted = [random.choice((0, 1, min(11, num_query))) for num_query, _ in lens]
    tile, num_programs = random.choice((4, 16)), random.choice((1, 5, 33))
    made = prefill_tiles([*(q for q, _ in lens), 0], tile, [*wanted, 0])
    padding = torch.tensor([[len(lens), 0]] * random.choice((0, 3)), dtype=torch.int32).reshape(-1, 2)
    tiles = torch.cat((torch.from_numpy(made), padding)).to(DEVICE)
    few = PromptTiles(tiles, rows_of([*lens, (0, 1)]), tile, are_few=True)
    assert few.longest_first() is tiles
    if not len(tiles):
        return
    programs = programs_of(few.plan(2, num_programs), num_programs)
    # The same as of texts whose only queries are these, but for where their tokens lie.
    before = {0: 0}
    for row, (num_query, _) in enumerate(lens):
        before[row + 1] = before[row] + num_query - wanted[row]
    moved = [
        [replace(s, first_token=s.first_token - before[s.row + 1]) for s in program] for program in programs
    ]
    check(moved, [(num, seq_len) for num, (_, seq_len) in zip(wanted, lens, strict=True)], 2, tile)


def test_the_longest_of_few_items_is_cut_wherever_it_comes() -> None:
    lens = [(1, 200), (1, 300), (1, 9000), (1, 100)]
    few = PromptTiles(
        torch.from_numpy(prefill_tiles([1] * 4, 64)).to(DEVICE), rows_of(lens), 64, are_few=True
    )
    programs = programs_of(few.plan(2, 33), 33)
    check(programs, lens, 2, 64)
    loads = loads_of(programs)
    assert is_cut(programs) and max(loads) <= sum(loads) / 33 + 4, loads


@pytest.mark.parametrize("cut", [0, 1000], ids=["cut", "whole"])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_whatever_a_cut_costs(seed: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_plan, "CUT", cut)
    random = Random(100 + seed)
    lens = random_lens(random)
    programs = programs_of(tiles_of(lens, 64).plan(2, 16), 16)
    check(programs, lens, 2, 64)
    assert cut == 0 or not is_cut(programs)


@pytest.mark.parametrize("num_padding_tokens", [0, 5, 300])
def test_padding_is_taken_once_if_at_all(num_padding_tokens: int) -> None:
    """It stands for itself alone, so only its first tile is looked at."""
    lens = [(100, 3000), (40, 40), (num_padding_tokens, max(1, num_padding_tokens))]
    programs = programs_of(tiles_of(lens, 64, num_padding=9).plan(2, 16), 16)
    first = min(num_padding_tokens, 64)
    padded = [segment for program in programs for segment in program if segment.row == 2]
    assert [s.queries for s in padded] == [first] * (2 if first else 0)
    kept = [[segment for segment in program if segment.row < 2] for program in programs]
    check(kept, lens[:2], 2, 64)


def test_with_nothing_to_do_programs_end() -> None:
    programs = programs_of(tiles_of([(0, 1)], 64, num_padding=4).plan(8, 16), 16)
    assert programs == [[]] * 16


def test_few_items_behind_many_keys_are_cut_into_equal_shares() -> None:
    """A chunk of 512 tokens behind 4,000, as streams leave room for, on a quarter of a large GPU."""
    programs = programs_of(tiles_of([(512, 4512)], 64).plan(2, 33), 33)
    check(programs, [(512, 4512)], 2, 64)
    loads = loads_of(programs)
    assert is_cut(programs)
    assert max(loads) <= sum(loads) / 33 + 3, loads
    assert max(s.parts for program in programs for s in program) <= 3


@pytest.mark.parametrize("tokens,before", [(1152, 4000), (1280, 8000), (1536, 6000)])
def test_a_few_items_more_than_programs_do_not_cost_a_round(tokens: int, before: int) -> None:
    lens = [(tokens, tokens + before)]
    programs = programs_of(tiles_of(lens, 64).plan(2, 33), 33)
    check(programs, lens, 2, 64)
    loads = loads_of(programs)
    assert is_cut(programs) and max(loads) <= sum(loads) / 33 + 4, loads


@pytest.mark.parametrize("lens", [[(64, 64)], [(1024, 3024)], [(2048, 2048)], [(130, 130)] * 8])
def test_what_is_even_anyway_stays_whole(lens: list[tuple[int, int]]) -> None:
    programs = programs_of(tiles_of(lens, 64).plan(2, 33), 33)
    check(programs, lens, 2, 64)
    assert not is_cut(programs)


def test_many_items_are_whole_and_go_back_and_forth() -> None:
    lens, num_kv_heads, width = [(1000, 1000), (777, 3000)], 4, 9
    tiles = tiles_of(lens, 64)
    order = longest_first(tiles.tiles, tiles.rows).tolist()
    programs = programs_of(tiles.plan(num_kv_heads, width), width)
    check(programs, lens, num_kv_heads, 64)
    num_items = len(order) * num_kv_heads
    assert num_items >= MAX_ROUNDS.value * width
    heads = heads_at_once(num_items, num_kv_heads, width)
    expected: list[list[tuple[int, int, int]]] = [[] for _ in range(width)]
    for item in range(num_items):
        turn = item % width if item // width % 2 == 0 else width - 1 - item % width
        section, rest = divmod(item, len(order) * heads)
        descends = (num_kv_heads // heads - section) % 2 == 1
        row, first = order[rest // heads if descends else len(order) - 1 - rest // heads]
        expected[turn].append((row, (0, 1000)[row] + first, section * heads + rest % heads))
    assert [[(s.row, s.first_token, s.kv_head) for s in program] for program in programs] == expected


def test_a_plan_is_made_once_a_step() -> None:
    tiles = tiles_of([(100, 100)], 64)
    assert tiles.plan(2, 4) is tiles.plan(2, 4)
    assert tiles.longest_first() is tiles.longest_first()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6, 8])
def test_few_heads_are_taken_at_once_where_there_is_much_to_do(num_kv_heads: int) -> None:
    heads = [heads_at_once(rounds * 132, num_kv_heads, 132) for rounds in range(1, 100)]
    assert heads[0] == num_kv_heads
    assert heads == sorted(heads, reverse=True)
    assert all(num_kv_heads % n == 0 for n in heads)
    assert all(
        n == num_kv_heads or rounds * n / num_kv_heads >= MIN_ROUNDS
        for rounds, n in enumerate(heads, start=1)
    )
    assert heads[-1] == num_kv_heads // (num_kv_heads & -num_kv_heads)


def attend(q: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> tuple[Tensor, ...]:
    """A segment's queries over keys [K, H], from the newest: sum of values, maximum, sum of weights."""
    maximum = torch.full(q.shape[:1], -1.0e30)
    total = torch.zeros_like(maximum)
    result = torch.zeros_like(q)
    group_size = len(q) // segment.queries
    position = segment.position + torch.arange(len(q)) // group_size
    for step in range(segment.end - 1, segment.begin - 1, -1):
        seen = slice(step * STEP, min((step + 1) * STEP, segment.seq_len))
        scores = q @ keys[seen].T
        scores[torch.arange(step * STEP, seen.stop) > position[:, None]] = -torch.inf
        higher = torch.maximum(maximum, scores.amax(1))
        weights, shrink = ((scores - higher[:, None]) * scale).exp2(), ((maximum - higher) * scale).exp2()
        total = total * shrink + weights.sum(1)
        result = result * shrink[:, None] + weights @ values[seen]
        maximum = higher
    return result, maximum, total


def attention_by_plan(
    q: Tensor, kv_cache: Tensor, rows: PagedRows, programs: list[list[Segment]], scale: float
) -> Tensor:
    """What the kernel does, with each program's parts in its room and taken from there."""
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    group_size = q.shape[1] // num_kv_heads
    out = torch.full_like(q, torch.nan)
    room: dict[int, tuple[Tensor, ...]] = {}
    for number, program in enumerate(programs):
        for segment in program:
            s = segment
            at = (
                slice(s.first_token, s.first_token + s.queries),
                slice(s.kv_head * group_size, (s.kv_head + 1) * group_size),
            )
            pages = kv_cache[rows.block_table[s.row].long(), :, s.kv_head]
            keys, values = (pages[:, i].reshape(-1, head_dim).float() for i in range(2))
            result, maximum, total = attend(q[at].reshape(-1, head_dim).float(), keys, values, s, scale)
            if s.parts < 0:
                room[-1 - s.parts] = result, maximum, total
                continue
            for other in range(s.parts):
                others, their_maximum, their_total = room.pop(number - 1 - other)
                higher = torch.maximum(maximum, their_maximum)
                mine, theirs = ((each - higher) * scale for each in (maximum, their_maximum))
                result = result * mine.exp2()[:, None] + others * theirs.exp2()[:, None]
                total = total * mine.exp2() + their_total * theirs.exp2()
                maximum = higher
            out[at] = (result / total[:, None]).to(q.dtype).view(s.queries, group_size, head_dim)
    assert not room
    return out


def batches() -> Iterator[list[tuple[int, int]]]:
    yield [(70, 2100)]
    yield [(256, 4256)]
    yield [(130, 130), (33, 1700), (1, 900)]
    yield [(20 + 7 * i, 20 + 7 * i + 301 * (i % 3)) for i in range(9)]


@diagonal({"cut": [0, prefill_plan.CUT], "heads": [(4, 2), (8, 1)], "lens": list(batches())})
def test_attention_by_a_plan_is_attention(
    lens: list[tuple[int, int]], heads: tuple[int, int], cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_plan, "CUT", cut)
    made = make_rows(lens, heads=heads, head_dim=64, block_size=64, stale=7.0)
    slots = made.fwd.slot_mappings[0]
    made.kv_cache[slots // 64, :, :, slots % 64] = torch.stack((made.k, made.v), 1)
    rows = PagedRows(
        block_table=made.fwd.block_tables[0],
        seq_lens=made.fwd.seq_lens,
        cu_seqlens_q=made.fwd.cu_seqlens_q,
        max_query=made.fwd.max_query,
    )
    tile = 128 // (heads[0] // heads[1])
    programs = programs_of(tiles_of(lens, tile, rows).plan(heads[1], 24), 24)
    check(programs, lens, heads[1], tile)
    assert cut or is_cut(programs)
    out = attention_by_plan(made.q, made.kv_cache, rows, programs, made.scale * 1.4426950408889634)
    expected = paged_attention_ref(made.q, made.kv_cache, rows, scale=made.scale)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=0)
