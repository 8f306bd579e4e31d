"""The kernels of latent attention against their references."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels import latent_decode as decode_module
from pellucid.kernels.decode_attention import Cut
from pellucid.kernels.latent_decode import heads_per_program, latent_decode, latent_decode_ref
from pellucid.kernels.latent_prefill import (
    latent_gather,
    latent_gather_ref,
    latent_prefill,
    latent_prefill_ref,
    queries_per_tile,
)
from pellucid.kernels.latent_rope import latent_rope, latent_rope_ref
from pellucid.kernels.paged_attention import PagedRows
from pellucid.kernels.prefill_attention import prefill_tiles
from pellucid.layers.rope import RopeConfig
from pellucid.layers.rotary import rotary_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cannot multiply bfloat16"),
    ],
)
DTYPES = [torch.float32, BFLOAT16]
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


def latents(lens: list[tuple[int, int]], width: int, dtype: torch.dtype = torch.float32) -> Latents:
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
    return Latents(cache.to(DEVICE), rows, query_lens, seq_lens)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(4, 32, 8), (3, 24, 12), (20, 16, 16)])
def test_what_turns_is_turned_and_rows_are_written(
    interleaved: bool, heads: int, rank: int, rotary: int
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
    results = []
    for operation in (latent_rope, latent_rope_ref):
        q, latent = packed.clone().split((heads * (nope + rotary), rank + rotary), dim=1)
        cache = torch.zeros(3, BLOCK, rank + rotary, device=DEVICE)
        operation(q.unflatten(1, (heads, -1)), latent, cache, positions, slots, **how)
        results.append((q, cache))
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected)
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


@pytest.mark.parametrize("num_query", [1, 3])
def test_chunks_of_a_row_are_merged(monkeypatch: pytest.MonkeyPatch, num_query: int) -> None:
    monkeypatch.setattr(decode_module, "cut", lambda *_: Cut(16, 16, 3, 3))
    monkeypatch.setattr(decode_module, "MERGED", 2)
    case = latents([(num_query, n) for n in (5, 16, 40, 70)], 48)
    q = random(case.num_tokens, 16, 32)
    q_turned = random(case.num_tokens, 16, 16)
    out = torch.full_like(q, torch.nan)
    latent_decode(q, q_turned, case.cache, case.rows, scale=0.2, out=out)
    assert_close(out, latent_decode_ref(q, q_turned, case.cache, case.rows, scale=0.2))


def test_heads_of_a_program_divide_all_and_have_room() -> None:
    assert heads_per_program(16, 1) == 16
    assert heads_per_program(128, 1) == 64
    assert heads_per_program(20, 8) == 5
    assert heads_per_program(128, 8) == 8
    assert heads_per_program(7, 8) == 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nope", "rotary", "value"), [(16, 16, 16), (12, 8, 20), (32, 16, 24)])
def test_prefill(nope: int, rotary: int, value: int, dtype: torch.dtype) -> None:
    heads, rank = 3, 24
    case = latents(CHUNKS, rank + rotary, dtype)
    starts = torch.tensor([0, *(n + 3 for n in case.seq_lens)]).cumsum(0)  # with room between rows
    cu_keys, num_keys = starts[:-1].to(DEVICE), int(starts[-1])
    gathered = torch.full((num_keys, rank + rotary), torch.nan, device=DEVICE, dtype=dtype)
    latent_gather(case.cache, case.rows, cu_keys, max(case.seq_lens), gathered)
    for first, expected in zip(starts.tolist(), latent_gather_ref(case.cache, case.rows), strict=False):
        assert torch.equal(gathered[first : first + len(expected)], expected)
        assert gathered[first + len(expected) :][:3].isnan().all()
    up = random(heads * (nope + value), rank, dtype=dtype) / rank**0.5
    expanded = (gathered[:, :rank] @ up.T).unflatten(1, (heads, -1))
    q = random(case.num_tokens, heads, nope + rotary, dtype=dtype)
    out = torch.full((case.num_tokens, heads, value), torch.nan, device=DEVICE, dtype=dtype)
    tiles = torch.from_numpy(prefill_tiles(case.query_lens, queries_per_tile(dtype))).to(DEVICE)
    how = {"cu_keys": cu_keys, "scale": 0.2}
    latent_prefill(q, expanded, gathered[:, rank:], case.rows, tiles=tiles, **how, out=out)
    expected = latent_prefill_ref(q, expanded, gathered[:, rank:], case.rows, value_dim=value, **how)
    assert_close(out, expected)
