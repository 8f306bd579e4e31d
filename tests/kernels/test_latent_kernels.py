"""The kernels of latent attention against their references."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.attention import latent_decode as decode_module
from pellucid.kernels.attention import latent_expand as expand_module
from pellucid.kernels.attention.decode_attention import Cut
from pellucid.kernels.attention.latent_decode import heads_per_program, latent_decode, latent_decode_ref
from pellucid.kernels.attention.latent_expand import latent_expand, latent_expand_ref
from pellucid.kernels.attention.latent_prefill import latent_prefill, latent_prefill_ref, queries_per_tile
from pellucid.kernels.attention.latent_rope import latent_rope, latent_rope_ref
from pellucid.kernels.attention.paged_attention import PagedRows, TreeRows
from pellucid.kernels.attention.prefill_attention import prefill_tiles
from pellucid.kernels.products.heads_matmul import heads_matmul, heads_matmul_ref
from pellucid.layers.rope import RopeConfig
from pellucid.layers.rotary import rotary_table
from tests.diagonal import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cannot multiply bfloat16"),
    ],
)
DTYPES = [torch.float32, BFLOAT16]
FP8 = [
    pytest.param(
        dtype,
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not round to FP8 as GPUs do"),
        ],
    )
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
]
BLOCK = 16
LENS = [(1, 1), (1, 16), (1, 40), (1, 77), (3, 3), (4, 50), (8, 65)]  # queries, tokens
CHUNKS = [(20, 20), (70, 70), (9, 60), (33, 100)]


@dataclass
class Latents:
    """Rows over a shuffled paged cache, in which what nobody wrote is NaN."""

    cache: Tensor
    rows: PagedRows
    query_lens: list[int]
    seq_lens: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def latents(
    lens: list[tuple[int, int]],
    width: int,
    dtype: torch.dtype = torch.float32,
    kept: torch.dtype | None = None,
) -> Latents:
    """kept: of the cache."""
    torch.manual_seed(0)
    query_lens, seq_lens = [q for q, _ in lens], [s for _, s in lens]
    widths = [-(-s // BLOCK) for s in seq_lens]
    shuffled = torch.randperm(sum(widths)) + 1
    cache = torch.full((sum(widths) + 1, BLOCK, width), torch.nan, dtype=dtype)
    table = torch.zeros(len(lens), max(widths) + 1, dtype=torch.int32)
    for row, (num, length) in enumerate(zip(widths, seq_lens, strict=True)):
        table[row, :num] = shuffled[sum(widths[:row]) :][:num]
        at = torch.arange(length)
        cache[table[row, at // BLOCK].long(), at % BLOCK] = torch.randn(length, width).to(dtype)
    rows = PagedRows(
        block_table=table.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int(),
        max_query=8 if max(query_lens) > 1 else 1,
    )
    return Latents(cache.to(DEVICE, kept or dtype), rows, query_lens, seq_lens)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kept", [None, *FP8])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(4, 32, 8), (3, 24, 12), (20, 16, 16)])
def test_what_turns_is_turned_and_rows_are_written(
    interleaved: bool, heads: int, rank: int, rotary: int, kept: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    num_tokens, nope = 5, 10
    table = rotary_table(
        RopeConfig(kind="default", theta=100.0, rotary_dim=rotary, max_position_embeddings=64), 64
    ).to(DEVICE)
    packed = random(num_tokens, heads * (nope + rotary) + rank + rotary)
    positions = torch.tensor([0, 1, 7, 33, 63], device=DEVICE)
    slots = torch.tensor([17, 40, 18, 33, 16], device=DEVICE)
    how = {"norm": (1 + 0.1 * random(rank), 1e-6), "rope": table, "interleaved": interleaved}
    if kept is not None:
        how |= {"row_scale": 2 / torch.finfo(kept).max}  # so that some saturate
    results = []
    for operation in (latent_rope, latent_rope_ref):
        q, latent = packed.clone().split((heads * (nope + rotary), rank + rotary), dim=1)
        cache = torch.zeros(3, BLOCK, rank + rotary, device=DEVICE, dtype=kept)
        operation(q.unflatten(1, (heads, -1)), latent, cache, positions, slots, **how)
        results.append((q, cache.float()))
    assert_close(results[0][0], results[1][0])
    # Of FP8 one, where what is rounded differs by float32's rounding.
    step = torch.finfo(kept).eps if kept else 2e-5
    torch.testing.assert_close(results[0][1], results[1][1], atol=step, rtol=step)
    assert not torch.equal(results[0][0], packed[:, : heads * (nope + rotary)])


def test_turned_pairs_have_the_scores_of_halves() -> None:
    torch.manual_seed(0)
    table = rotary_table(
        RopeConfig(kind="default", theta=100.0, rotary_dim=8, max_position_embeddings=64), 64
    )
    x, positions = torch.randn(6, 2, 8), torch.arange(6)
    cache, norm, latent = torch.zeros(1, BLOCK, 12), (torch.ones(4), 1e-6), torch.randn(6, 12)

    def turned(q: Tensor, interleaved: bool) -> Tensor:
        q = q.clone()
        latent_rope_ref(
            *(q, latent, cache, positions, positions), norm=norm, rope=table, interleaved=interleaved
        )
        return q

    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    pairs, halves = turned(x, True), turned(halves, False)
    torch.testing.assert_close(pairs @ pairs.transpose(1, 2), halves @ halves.transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(16, 32, 16), (5, 48, 8), (24, 16, 16)])
@pytest.mark.parametrize("lens", [LENS[:4], LENS], ids=["decodes", "verifications"])
def test_decode(lens: list[tuple[int, int]], heads: int, rank: int, rotary: int, dtype: torch.dtype) -> None:
    case = latents(lens, rank + rotary, dtype)
    q = random(case.num_tokens, heads, rank, dtype=dtype)
    q_turned = random(case.num_tokens, heads, rank + rotary, dtype=dtype)[..., rank:]
    out = torch.full_like(q, torch.nan)
    latent_decode(q, q_turned, case.cache, case.rows, scale=0.2, out=out)
    assert_close(out, latent_decode_ref(q, q_turned, case.cache, case.rows, scale=0.2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), [(20, 48), (512, 24), (16, 700)])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_each_head_is_multiplied_by_its_own_matrix(
    num_tokens: int, num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    """Of queries, which are a part of what lies beside them, and of matrices that lie either way."""
    torch.manual_seed(0)
    x = random(num_tokens, 5, num_in + 3, dtype=dtype)[..., :num_in]
    for weight in (random(5, num_in, num_out), random(5, num_out, num_in).transpose(1, 2)):
        matrix = (weight / num_in**0.5).to(dtype)
        out, expected = (torch.full((num_tokens, 5, num_out), torch.nan).to(x) for _ in range(2))
        assert_close(heads_matmul(x, matrix, out), heads_matmul_ref(x, matrix, expected))


@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("num_query", [1, 3])
def test_chunks_of_a_row_are_merged(
    monkeypatch: pytest.MonkeyPatch, num_query: int, kept: torch.dtype | None
) -> None:
    monkeypatch.setattr(decode_module, "cut", lambda *_: Cut(16, 16, 3, 3))
    monkeypatch.setattr(decode_module, "MERGED", 2)
    case = latents([(num_query, n) for n in (5, 16, 40, 70)], 48, kept=kept)
    q = random(case.num_tokens, 16, 32)
    q_turned = random(case.num_tokens, 16, 16)
    out, how = torch.full_like(q, torch.nan), {"scale": 0.2, "row_scale": 1.0 if kept is None else 0.5}
    latent_decode(q, q_turned, case.cache, case.rows, **how, out=out)
    assert_close(out, latent_decode_ref(q, q_turned, case.cache, case.rows, **how))


def test_heads_of_a_program_divide_all_and_have_room() -> None:
    assert heads_per_program(16, 1) == 16
    assert heads_per_program(128, 1) == 64
    assert heads_per_program(20, 8) == 5
    assert heads_per_program(128, 8) == 8
    assert heads_per_program(7, 8) == 7


@diagonal(
    {
        "kept": [None, torch.float8_e4m3fn, torch.float8_e5m2],
        "dtype": DTYPES,
        "nope,rotary,value": [(16, 16, 16), (12, 8, 20), (32, 16, 24)],
    }
)
def test_prefill(nope: int, rotary: int, value: int, dtype: torch.dtype, kept: torch.dtype | None) -> None:
    heads, rank, scale = 3, 24, 1.0 if kept is None else 0.5
    case = latents(CHUNKS, rank + rotary, dtype, kept)
    starts = torch.tensor([0, *(n + 3 for n in case.seq_lens)]).cumsum(0)  # with room between rows
    cu_keys, num_keys = starts[:-1].to(DEVICE), int(starts[-1]) + 300
    up = random(heads, nope + value, rank, dtype=dtype) / rank**0.5
    expanded = torch.full((num_keys, *up.shape[:2]), torch.nan, device=DEVICE, dtype=dtype)
    turned = torch.full((num_keys, rotary), torch.nan, device=DEVICE, dtype=dtype)
    where = {"cu_keys": cu_keys, "row_scale": scale}
    latent_expand(case.cache, up, case.rows, **where, turned=turned, out=expanded)
    made = latent_expand_ref(case.cache, up, case.rows, row_scale=scale)
    for first, (keys, turning) in zip(starts.tolist(), made, strict=False):
        assert_close(expanded[first : first + len(keys)], keys)
        assert torch.equal(turned[first : first + len(keys)], turning)
        assert (
            expanded[first + len(keys) :][:3].isnan().all() and turned[first + len(keys) :][:3].isnan().all()
        )
    assert expanded[int(starts[-1]) :].isnan().all()
    q = random(case.num_tokens, heads, nope + rotary, dtype=dtype)
    out = torch.full((case.num_tokens, heads, value), torch.nan, device=DEVICE, dtype=dtype)
    tiles = torch.from_numpy(prefill_tiles(case.query_lens, queries_per_tile(dtype))).to(DEVICE)
    how = {"cu_keys": cu_keys, "scale": 0.2}
    latent_prefill(q, expanded, turned, case.rows, tiles=tiles, **how, out=out)
    assert_close(out, latent_prefill_ref(q, expanded, turned, case.rows, value_dim=value, **how))


def test_rows_are_found_wherever_keys_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a program looks through at a time, of which the last ones are padding."""
    monkeypatch.setattr(expand_module, "ROWS_AT_ONCE", 4)
    lens = [(1, n) for n in (3, 16, 1, 5, 2, 40, 7, 17, 1, 30)]
    case = latents(lens, 32)
    case.rows.seq_lens[-2:] = 0
    begins = (case.rows.seq_lens.cumsum(0) - case.rows.seq_lens).long()
    up, total = random(4, 5, 24), sum(n for _, n in lens[:-2])
    turned, out = (torch.full((total + 70, *n), torch.nan, device=DEVICE) for n in ((8,), (4, 5)))
    latent_expand(case.cache, up, case.rows, cu_keys=begins, turned=turned, out=out)
    keys, turning = (torch.cat(x) for x in zip(*latent_expand_ref(case.cache, up, case.rows), strict=True))
    assert_close(out[:total], keys)
    assert torch.equal(turned[:total], turning) and out[total:].isnan().all()


def random_tree(case: Latents, num_drafts: list[int]) -> TreeRows:
    """Of each row its last queries: each draft's parent is the row's token or a draft before it."""
    torch.manual_seed(1)
    starts, ancestors, positions = case.rows.cu_seqlens_q.tolist(), [0] * case.num_tokens, []
    for row, (num_query, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        places, first = list(range(length - num_query, length)), num_query - num_drafts[row]
        for i in range(num_drafts[row]):
            parent = int(torch.randint(-1, i, ())) if i else -1
            above = ancestors[starts[row] + first + parent] if parent >= 0 else 0
            ancestors[starts[row] + first + i] = above | 1 << i
            places[first + i] = places[first + parent] + 1
        positions += places
    return TreeRows(
        positions=torch.tensor(positions, device=DEVICE),
        ancestors=torch.tensor(ancestors, device=DEVICE),
        first_drafts=torch.tensor(
            [length - num for length, num in zip(case.seq_lens, num_drafts, strict=True)],
            dtype=torch.int32,
            device=DEVICE,
        ),
    )


def test_drafts_of_a_tree_see_their_own_line() -> None:
    case = latents([(4, 30), (8, 65), (8, 8), (1, 20)], 48)
    case = replace(case, rows=replace(case.rows, tree=random_tree(case, [3, 7, 7, 0])))
    q, q_turned = random(case.num_tokens, 4, 32), random(case.num_tokens, 4, 16)
    out, plain = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    latent_decode(q, q_turned, case.cache, case.rows, scale=0.2, out=out)
    assert_close(out, latent_decode_ref(q, q_turned, case.cache, case.rows, scale=0.2))
    latent_decode(q, q_turned, case.cache, replace(case.rows, tree=None), scale=0.2, out=plain)
    assert not torch.allclose(out, plain)


@pytest.mark.parametrize("both_ways", [False, True])
def test_so_do_those_of_a_large_one(both_ways: bool) -> None:
    case = latents([(20, 70), (40, 131), (12, 12)], 40)
    num_drafts = [19, 39, 11]
    tree = random_tree(case, num_drafts)
    if both_ways:  # each draft sees all others of its row, those of later tiles, too
        everybody = torch.tensor([(1 << num) - 1 for num in num_drafts], device=DEVICE)
        everybody = everybody.repeat_interleave(torch.tensor(case.query_lens, device=DEVICE))
        tree = replace(tree, ancestors=everybody.where(tree.ancestors > 0, 0))
    case = replace(case, rows=replace(case.rows, tree=tree))
    ends = case.rows.seq_lens.cumsum(0)
    cu_keys, made, turned = ends - case.rows.seq_lens, random(int(ends[-1]), 2, 28), random(int(ends[-1]), 8)
    q = random(case.num_tokens, 2, 20)
    out = torch.full((case.num_tokens, 2, 16), torch.nan, device=DEVICE)
    tiles = torch.from_numpy(prefill_tiles(case.query_lens, queries_per_tile(q.dtype))).to(DEVICE)
    how = {"cu_keys": cu_keys, "scale": 0.2}
    latent_prefill(q, made, turned, case.rows, tiles=tiles, **how, out=out)
    assert_close(out, latent_prefill_ref(q, made, turned, case.rows, value_dim=16, **how))
