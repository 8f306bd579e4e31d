"""The attention kernels against their reference, and the reference against naive attention."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.forward import TreeMask
from pellucid.kernels.attention import cache_lines, decode_merge
from pellucid.kernels.attention import decode_attention as decode_module
from pellucid.kernels.attention.decode_attention import (
    Cut,
    cut,
    decode_attention,
    decode_attention_ref,
    padded_queries,
    tile_for,
)
from pellucid.kernels.attention.decode_merge import MAX_CHUNKS, missing_numbers
from pellucid.kernels.attention.hopper_prefill import hopper_takes
from pellucid.kernels.attention.paged_attention import SHARED_MEMORY, PagedRows, TreeRows
from pellucid.kernels.attention.prefill_attention import (
    prefill_attention,
    prefill_attention_ref,
    prefill_tiles,
    queries_per_tile,
)
from pellucid.kernels.attention.prefill_plan import PromptTiles, longest_first
from tests.attention.paged import Rows, make_rows
from tests.diagonal import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECODES = [(1, 1), (1, 16), (1, 40), (1, 300), (1, 513)]
VERIFICATIONS = [(4, 4), (1, 17), (3, 40), (4, 258), (2, 600)]
CHUNKS = [(20, 20), (70, 70), (9, 130), (65, 100)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cannot multiply bfloat16"),
    ],
)


def paged(rows: Rows, max_query: int) -> PagedRows:
    """The rows as kernels see them, this step's keys and values written."""
    block_size = rows.kv_cache.shape[3]
    slots = rows.fwd.slot_mappings[0]
    rows.kv_cache[slots // block_size, :, :, slots % block_size] = torch.stack((rows.k, rows.v), 1)
    mask, tree = rows.fwd.tree, None
    if mask is not None:
        tree = TreeRows(
            positions=rows.fwd.positions, ancestors=mask.ancestors, first_drafts=mask.first_drafts
        )
    return PagedRows(
        tree=tree,
        block_table=rows.fwd.block_tables[0],
        seq_lens=rows.fwd.seq_lens,
        cu_seqlens_q=rows.fwd.cu_seqlens_q,
        max_query=max_query,
    )


def decode(rows: Rows, max_query: int) -> Tensor:
    view = paged(rows, max_query)
    out = torch.full_like(rows.q, torch.nan)
    return decode_attention(rows.q, rows.kv_cache, view, scale=rows.scale, **sight(rows), out=out)


def prefill(rows: Rows) -> Tensor:
    view = paged(rows, rows.fwd.max_query)
    out = torch.full_like(rows.q, torch.nan)
    how = {"scale": rows.scale, **sight(rows)}
    return prefill_attention(rows.q, rows.kv_cache, view, tiles=tiles_of(rows, view), **how, out=out)


def tiles_of(rows: Rows, view: PagedRows) -> PromptTiles:
    by_hopper = rows.chunk is None and hopper_takes(rows.q, rows.kv_cache, view)
    tile_queries = queries_per_tile(rows.num_heads // rows.k.shape[1], by_hopper=by_hopper)
    tiles = torch.from_numpy(prefill_tiles(rows.fwd.query_lens, tile_queries)).to(DEVICE)
    return PromptTiles(tiles, view, tile_queries)


def sight(rows: Rows) -> dict[str, Any]:
    return {"window": rows.window, "chunk": rows.chunk}


def reference(rows: Rows) -> Tensor:
    view = paged(rows, rows.fwd.max_query)
    return decode_attention_ref(rows.q, rows.kv_cache, view, scale=rows.scale, **sight(rows))


def assert_matches_reference(out: Tensor, rows: Rows) -> None:
    tolerance = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[rows.q.dtype]
    torch.testing.assert_close(out, reference(rows), atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 20, 1000])
def test_the_reference_is_naive_attention(window: int | None) -> None:
    rows = make_rows(VERIFICATIONS + CHUNKS, window=window, num_padding=2, device=DEVICE)
    out = reference(rows).double().cpu().flatten(1)
    torch.testing.assert_close(out, rows.expected(), atol=2e-6, rtol=0)
    assert out[-2:].eq(0).all()
    assert prefill_attention_ref is decode_attention_ref


def deep_tree(num: int) -> tuple[int, ...]:
    """A tree of `num` drafts with branches everywhere."""
    return tuple(max(0, child - 1 - child % 3) for child in range(1, num + 1))


@pytest.mark.parametrize("window", [None, 30])
def test_the_reference_is_naive_attention_over_trees(window: int | None) -> None:
    rows = make_rows([(6, 6), (5, 258), (66, 100)], window=window, num_padding=1, device=DEVICE)
    rows.plant(deep_tree(64), [5, 3, 64])
    out = reference(rows).double().cpu().flatten(1)
    torch.testing.assert_close(out, rows.expected(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 9, 280])
def test_short_rows_with_trees_match(window: int | None) -> None:
    rows = make_rows(
        [(6, 6), (8, 258), (8, 263), (1, 40), (3, 600)], block_size=16, window=window, device=DEVICE
    )
    rows.plant(deep_tree(7), [5, 7, 7, 0, 2])
    assert_matches_reference(decode(rows, 8), rows)


@pytest.mark.parametrize("heads", [(2, 1), (16, 1)])  # with 16, some tiles have drafts alone
@pytest.mark.parametrize("window", [None, 40])
def test_long_rows_with_trees_match(heads: tuple[int, int], window: int | None) -> None:
    rows = make_rows([(65, 100), (30, 64), (33, 33)], heads=heads, window=window, device=DEVICE)
    rows.plant(deep_tree(64), [64, 20, 0])
    assert_matches_reference(prefill(rows), rows)


def test_tiles_of_a_block_see_what_lies_behind_them() -> None:
    """Queries that see each other both ways: with 16 heads a KV head, 8 of them are a tile."""
    rows = make_rows([(16, 21), (12, 40)], heads=(16, 1), device=DEVICE)
    rows.fwd.tree = TreeMask(
        torch.tensor([(1 << 16) - 1] * 16 + [(1 << 12) - 1] * 12, device=DEVICE),
        torch.tensor([5, 28], dtype=torch.int32, device=DEVICE),
    )
    assert_matches_reference(prefill(rows), rows)


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_decodes_match_over_pages_of_any_size(block_size: int) -> None:
    rows = make_rows(DECODES, block_size=block_size, device=DEVICE)
    assert_matches_reference(decode(rows, 1), rows)


@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (4, 1), (8, 1), (7, 1), (6, 2)])
@pytest.mark.parametrize("lens", [[(1, 300)], [(4, 258)], [(65, 100)]])
def test_any_ratio_of_query_heads_to_kv_heads_matches(
    heads: tuple[int, int], lens: list[tuple[int, int]]
) -> None:
    rows = make_rows(lens, heads=heads, block_size=64, device=DEVICE)
    assert_matches_reference(decode(rows, 4) if lens[0][0] <= 8 else prefill(rows), rows)


@pytest.mark.parametrize("window", [None, 1, 5, 100, 300])
def test_verifications_match_within_any_window(window: int | None) -> None:
    rows = make_rows(VERIFICATIONS, block_size=64, window=window, device=DEVICE)
    assert_matches_reference(decode(rows, 4), rows)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 1000])
def test_rows_see_their_own_chunk_alone(chunk: int) -> None:
    both = make_rows(VERIFICATIONS + CHUNKS, chunk=chunk, num_padding=2, device=DEVICE)
    torch.testing.assert_close(reference(both).double().cpu().flatten(1), both.expected(), atol=2e-6, rtol=0)
    rows = make_rows(CHUNKS, block_size=64, chunk=chunk, device=DEVICE)
    assert_matches_reference(prefill(rows), rows)
    rows = make_rows(VERIFICATIONS, block_size=64, chunk=chunk, device=DEVICE)
    assert_matches_reference(decode(rows, 8), rows)


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2)])
@pytest.mark.parametrize("window", [1, 20, 128, 150])
def test_decodes_within_a_window_read_nothing_before_it(
    window: int, heads: tuple[int, int], block_size: int
) -> None:
    """Sinks beside them; rows that the window holds, some that it does not, and padding."""
    lens = [(1, 1), (1, 20), (1, 127), (1, 128), (1, 129), (1, 300)]
    shape = {"heads": heads, "head_dim": 64, "block_size": block_size, "dtype": torch.float16}
    rows = make_rows(lens, window=window, num_padding=1, **shape, device=DEVICE)
    assert_reads_nothing_unseen(rows, torch.linspace(-3, 4, rows.num_heads, device=DEVICE))


@pytest.mark.parametrize("sight", [{"window": 20}, {"window": 150}, {"chunk": 50}], ids=str)
def test_verifications_read_nothing_that_no_query_sees(sight: dict[str, int]) -> None:
    assert_reads_nothing_unseen(make_rows(VERIFICATIONS, block_size=64, **sight, device=DEVICE))


def assert_reads_nothing_unseen(rows: Rows, sinks: Tensor | None = None) -> None:
    """Decode where those keys and values are NaN that a row's first query does not see."""
    view = paged(rows, max(rows.query_lens))
    how = {"scale": rows.scale, "sinks": sinks, **sight(rows)}
    expected = decode_attention_ref(rows.q, rows.kv_cache, view, **how)
    block_size = rows.kv_cache.shape[3]
    for row, (num_query, seq_len) in enumerate(zip(rows.query_lens, rows.seq_lens, strict=True)):
        unseen = torch.arange(rows.seen(row, seq_len - num_query)[0], device=DEVICE)
        rows.kv_cache[view.block_table[row, unseen // block_size], :, :, unseen % block_size] = torch.nan
    out = decode_attention(rows.q, rows.kv_cache, view, **how, out=torch.full_like(rows.q, torch.nan))
    tolerance = {torch.float32: 3e-6, torch.float16: 2e-3}[rows.q.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 30])
def test_prompt_chunks_match_behind_any_prefix(block_size: int, window: int | None) -> None:
    rows = make_rows(CHUNKS, block_size=block_size, window=window, device=DEVICE)
    assert_matches_reference(prefill(rows), rows)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_any_head_dim_matches(head_dim: int) -> None:
    short = make_rows([(2, 70), (1, 280)], head_dim=head_dim, block_size=64, device=DEVICE)
    assert_matches_reference(decode(short, 2), short)
    long = make_rows([(30, 100)], head_dim=head_dim, block_size=64, device=DEVICE)
    assert_matches_reference(prefill(long), long)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_half_precision_matches_within_its_rounding(dtype: torch.dtype) -> None:
    short = make_rows(VERIFICATIONS, dtype=dtype, head_dim=64, block_size=64, device=DEVICE)
    assert_matches_reference(decode(short, 4), short)
    long = make_rows(CHUNKS, dtype=dtype, head_dim=64, block_size=64, device=DEVICE)
    assert_matches_reference(prefill(long), long)


@diagonal({"window": [None, 30], "kept": [E4M3, E5M2], "dtype": [torch.float32, torch.float16, BFLOAT16]})
def test_an_fp8_cache_is_read_with_its_scales(
    dtype: torch.dtype, kept: torch.dtype, window: int | None
) -> None:
    scales = {"k_scale": 0.5, "v_scale": 3.0}
    shape = {"dtype": dtype, "head_dim": 64, "block_size": 64, "window": window, "stale": 7.0}
    tolerance = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 6e-2}[dtype]
    for lens in (VERIFICATIONS, CHUNKS):
        rows = make_rows(lens, **shape, device=DEVICE)
        view = paged(rows, rows.fwd.max_query)
        cache = rows.kv_cache.float().to(kept)
        how = {"scale": rows.scale, "window": window, **scales}
        out = torch.full_like(rows.q, torch.nan)
        if lens is VERIFICATIONS:
            decode_attention(rows.q, cache, view, **how, out=out)
        else:
            prefill_attention(rows.q, cache, view, tiles=tiles_of(rows, view), **how, out=out)
        expected = decode_attention_ref(rows.q, cache, view, **how)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("head_dim", "kept"), [(16, E5M2), (80, E4M3)])
def test_an_fp8_cache_of_any_head_dim_is_read_in_pairs(head_dim: int, kept: torch.dtype) -> None:
    rows = make_rows([(2, 70), (1, 280)], head_dim=head_dim, block_size=16, stale=7.0, device=DEVICE)
    view = paged(rows, 2)
    cache = rows.kv_cache.to(kept)
    out = decode_attention(rows.q, cache, view, scale=rows.scale, out=torch.full_like(rows.q, torch.nan))
    expected = decode_attention_ref(rows.q, cache, view, scale=rows.scale)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("num_query", "shape", "block_size"),
    [
        *((1, {"window": 100}, 16), (2, {"window": 100}, 64), (1, {"window": 100}, 256)),
        *((2, shape, 16) for shape in ({"heads": (8, 1), "head_dim": 80}, {"heads": (3, 3)})),
        *((1, shape, 64) for shape in ({"heads": (8, 1), "head_dim": 80}, {"heads": (3, 3)})),
        *((2, shape, 256) for shape in ({"heads": (8, 1), "head_dim": 80}, {"heads": (3, 3)})),
    ],
    ids=str,
)
def test_few_queries_over_an_fp8_cache_match_as_columns(
    num_query: int, shape: dict[str, Any], block_size: int
) -> None:
    lens = [(num_query, tokens) for tokens in (2, 127, 128, 300, 1100)]
    rows = make_rows(lens, dtype=torch.float16, block_size=block_size, device=DEVICE, **shape)
    for kept in (E4M3, E5M2):
        assert_fp8_matches(rows, num_query, kept)


def test_short_trees_over_an_fp8_cache_match_as_columns() -> None:
    rows = make_rows(
        [(4, 4), (4, 258), (1, 40), (3, 600)],
        heads=(2, 1),
        dtype=torch.float16,
        block_size=64,
        device=DEVICE,
    )
    rows.plant(deep_tree(3), [3, 3, 0, 2])
    assert_fp8_matches(rows, 4, E5M2)


def assert_fp8_matches(rows: Rows, max_query: int, kept: torch.dtype) -> None:
    """Decode over the rows' cache, rounded to FP8, as the reference does."""
    view = paged(rows, max_query)
    cache = rows.kv_cache.float().to(kept)
    how = {"scale": rows.scale, "window": rows.window, "k_scale": 0.5, "v_scale": 3.0}
    out = decode_attention(rows.q, cache, view, **how, out=torch.full_like(rows.q, torch.nan))
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 6e-2}[rows.q.dtype]
    torch.testing.assert_close(out, decode_attention_ref(rows.q, cache, view, **how), atol=tolerance, rtol=0)


def test_as_many_queries_are_columns_as_there_may_be() -> None:
    assert [padded_queries(n, torch.bfloat16, has_columns=True) for n in (1, 8, 9, 33)] == [8, 8, 16, 64]
    assert padded_queries(8, torch.bfloat16, has_columns=False) == 16
    assert padded_queries(8, torch.float32, has_columns=True) == 16


def test_tiles_hold_the_queries_that_are_wanted() -> None:
    lens, wanted = [40, 7, 100, 11, 33], [1, 0, 11, 11, 33]
    assert prefill_tiles(lens, 32).tolist() == prefill_tiles(lens, 32, lens).tolist()
    assert prefill_tiles(lens, 32, wanted).tolist() == [[0, 39], [2, 89], [3, 0], [4, 32], [4, 0]]
    assert prefill_tiles(lens, 16, wanted).tolist() == [[0, 39], [2, 89], [3, 0], [4, 32], [4, 16], [4, 0]]
    assert prefill_tiles(lens, 8, wanted).tolist()[:3] == [[0, 39], [2, 97], [2, 89]]
    assert prefill_tiles([40, 7], 16, [0, 0]).shape == (0, 2)


def test_tiles_that_see_most_keys_come_first() -> None:
    rows = make_rows([(20, 20), (300, 300), (150, 900)], device=DEVICE)
    tiles = torch.from_numpy(prefill_tiles(rows.fwd.query_lens, 64)).to(DEVICE)
    order = longest_first(tiles, paged(rows, 300)).tolist()
    assert sorted(order) == sorted(tiles.tolist())
    assert order[:3] == [[2, 128], [2, 64], [2, 0]]
    assert order[3:] == [[1, 256], [1, 192], [1, 128], [0, 0], [1, 64], [1, 0]]


def test_padding_rows_get_zeros() -> None:
    rows = make_rows([(1, 300), (1, 3)], num_padding=3, device=DEVICE)
    out = decode(rows, 1)
    assert_matches_reference(out, rows)
    assert out[-3:].eq(0).all()


def test_queries_may_be_a_view_of_a_packed_projection() -> None:
    rows = make_rows(DECODES, block_size=64, device=DEVICE)
    rows.q = torch.cat((rows.q, rows.k, rows.v), dim=1)[:, :4]
    out = torch.empty(rows.q.shape, device=DEVICE)
    view = paged(rows, 1)
    decode_attention(rows.q, rows.kv_cache, view, scale=rows.scale, out=out)
    assert_matches_reference(out, rows)


def test_a_decode_gives_the_same_bits_alone_and_in_company() -> None:
    crowd = make_rows([(1, 300), (1, 40), (1, 513)], block_size=64, device=DEVICE)
    together, everybody = decode(crowd, 1), paged(crowd, 1)
    for row in range(3):
        lengths = everybody.seq_lens.clone()
        lengths[torch.arange(3) != row] = 1
        others = replace(everybody, seq_lens=lengths)
        out = decode_attention(
            crowd.q, crowd.kv_cache, others, scale=crowd.scale, out=torch.empty_like(crowd.q)
        )
        assert torch.equal(together[row], out[row]), f"row {row} noticed its company"


@pytest.mark.parametrize(
    ("programs", "window"), [(1, None), (7, None), (20, None), (264, None), (5, 300), (264, 300)]
)
def test_chunks_match_whoever_takes_them(
    programs: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few programs some take several chunks, and rows with one chunk lie between those with many."""
    monkeypatch.setattr(decode_module, "PROGRAMS", programs)
    monkeypatch.setattr(decode_module, "CUTS", {1000: (128, 64, 8)})
    lens = [(1, 300), (3, 1100), (1, 40), (2, 2000), (1, 700)]
    rows = make_rows(lens, block_size=64, window=window, num_padding=1, device=DEVICE)
    assert_matches_reference(decode(rows, 4), rows)


@pytest.mark.parametrize(
    ("programs", "head_dim", "heads"),
    [
        *((5, 64, (4, 2)), (264, 128, (4, 2)), (5, 128, (8, 1)), (264, 64, (8, 1))),
        *((5, 64, (3, 3)), (264, 128, (3, 3))),
    ],
    ids=str,
)
def test_tiles_copied_by_lines_match(
    programs: int, head_dim: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with whole tiles alone, with some and with none; cut, with few programs and with one each."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cache_lines, "has_tma", lambda _: True)
    monkeypatch.setattr(decode_module, "MIN_PAIRS_BY_LINES", 0)
    monkeypatch.setattr(decode_module, "PROGRAMS", programs)
    monkeypatch.setattr(decode_module, "CUTS", {1000: (128, 64, 8)})
    lens = [(1, 1), (1, 64), (1, 65), (1, 128), (1, 300), (1, 577), (1, 640)]
    how = {"heads": heads, "head_dim": head_dim, "block_size": 64, "dtype": torch.float16}
    rows = make_rows(lens, **how, num_padding=2, device=DEVICE)
    view = paged(rows, 1)
    if not cache_lines.has_tma(rows.q.device):
        pytest.skip("this GPU has no TMA unit")
    assert decode_module.takes_lines(rows.q, rows.kv_cache, view)
    out = decode(rows, 1)
    assert_matches_reference(out, rows)
    assert out[-2:].eq(0).all()


@pytest.mark.parametrize(
    ("max_query", "how"),
    [
        (2, {}),
        (1, {"heads": (9, 1)}),
        (1, {"head_dim": 8}),
        (1, {"head_dim": 80}),
        (1, {"block_size": 32}),
        (1, {"dtype": torch.float32}),
    ],
    ids=str,
)
def test_other_rows_are_not_copied_by_lines(
    max_query: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_lines, "has_tma", lambda _: True)
    plain = {"head_dim": 64, "block_size": 64, "dtype": torch.float16}
    rows = make_rows([(1, 70)], **plain | how, device=DEVICE)
    assert not decode_module.takes_lines(rows.q, rows.kv_cache, paged(rows, max_query))
    rows = make_rows([(1, 70)], **plain, device=DEVICE)
    assert decode_module.takes_lines(rows.q, rows.kv_cache, paged(rows, 1))
    assert not decode_module.takes_lines(rows.q, rows.kv_cache.to(torch.float8_e4m3fn), paged(rows, 1))


def test_numbers_that_have_been_merged_are_missing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next launch would merge what this one has left."""
    made = []
    monkeypatch.setattr(
        decode_merge, "missing_numbers", lambda *args: made.append(missing_numbers(*args)) or made[-1]
    )
    rows = make_rows([(1, 700), (3, 1100), (1, 40)], block_size=64, num_padding=1, device=DEVICE)
    for _ in range(2):
        assert_matches_reference(decode(rows, 4), rows)
    assert len(made) == 2 and made[0] is made[1]
    assert made[0].view(torch.int32).eq(-1).all()


def test_few_rows_are_cut_fine_and_many_hardly() -> None:
    few, many = cut(8, 4096, 64), cut(2048, 4096, 64)
    assert few == Cut(whole=384, min_chunk=128, num_chunks=16, direct=16)
    assert many == Cut(whole=2048, min_chunk=2048, num_chunks=2, direct=1)
    assert cut(8, 384, 64).num_chunks == 1
    for num_pairs in (1, 8, 100, 1000, 4096):
        pieces = cut(num_pairs, 1_000_000, 128)
        assert pieces.min_chunk % 128 == 0 and 8 <= pieces.num_chunks <= MAX_CHUNKS


@pytest.mark.parametrize("block_size", [16, 48, 64, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("room", [SHARED_MEMORY, 99 * 1024])
def test_a_tile_is_part_of_a_page_or_some_pages(block_size: int, dtype: torch.dtype, room: int) -> None:
    for head_dim, num_pairs, padded in ((64, 8, 16), (128, 256, 16), (256, 512, 8), (128, 2048, 64)):
        cache = torch.empty(1, 2, 1, block_size, head_dim, dtype=dtype)
        query_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        tile = tile_for(num_pairs, cache, query_dtype, padded, room)
        assert block_size % tile.keys == 0 or tile.keys % block_size == 0, tile
        # One stage is in no buffer: it is what the program works on.
        buffers = max(1, tile.num_stages - 1) * 2 * tile.keys * head_dim * dtype.itemsize
        assert buffers <= room, tile


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (64, 8), (28, 4)])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("num_rows,most", [(1, 9000), (20, 2100), (170, 500)])
def test_large_fp8_caches_match_on_a_gpu(
    heads: tuple[int, int], window: int | None, num_rows: int, most: int
) -> None:
    shape = {"heads": heads, "head_dim": 128, "block_size": 64, "window": window, "dtype": torch.bfloat16}
    for num_query in (1, 2, 8):
        lens = [(num_query, most - 37 * i % (most - 8)) for i in range(num_rows)]
        rows = make_rows(lens, **shape, device="cuda")
        for kept in (E4M3, E5M2):
            assert_fp8_matches(rows, num_query, kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (64, 8), (28, 4)])
@pytest.mark.parametrize("window", [None, 700])
def test_large_shapes_match_on_a_gpu(dtype: torch.dtype, heads: tuple[int, int], window: int | None) -> None:
    lens = [(1, 37 * i + 1) for i in range(64)] + [(1, 9000)]
    shape = {
        "heads": heads,
        "head_dim": 128,
        "block_size": 64,
        "window": window,
        "dtype": dtype,
        "device": "cuda",
    }
    short = make_rows(lens, **shape)
    assert_matches_reference(decode(short, 1), short)
    verify = make_rows([(1 + i % 8, 37 * i + 8) for i in range(64)], **shape)
    assert_matches_reference(decode(verify, 8), verify)
    long = make_rows([(1000, 1000), (513, 3000), (9, 2000), (100, 100)], **shape)
    assert_matches_reference(prefill(long), long)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "heads", [(8, 8), (16, 8), (32, 8), (16, 2), (16, 1), (40, 8), (24, 4), (28, 4), (14, 2)]
)
def test_prompt_chunks_match_on_hopper(dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    lens = [(20, 20), (9, 130), (64, 64), (128, 128), (300, 1000), (63, 129), (130, 257), (1500, 1500)]
    shape = {"heads": heads, "head_dim": head_dim, "block_size": 64, "dtype": dtype}
    few = [(130, 4000)], [(512, 4512)], [(1, 3000), (700, 700)], [(40, 40)] * 20, [(1200, 6000), (9, 10_000)]
    for window, batch in itertools.product((None, 128), (lens * 3, *few)):
        rows = make_rows(batch, **shape, window=window, device="cuda")
        if not hopper_takes(rows.q, rows.kv_cache, paged(rows, 1500)):
            pytest.skip("no Hopper GPU")
        assert_matches_reference(prefill(rows), rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_of_prompts_match_on_hopper(window: int | None) -> None:
    shape = {"heads": (64, 8), "head_dim": 64, "block_size": 64, "dtype": torch.bfloat16, "window": window}
    rows = make_rows([(300, 1000), (1500, 1500), (20, 20)], **shape, device="cuda")
    view, out = paged(rows, rows.fwd.max_query), torch.full_like(rows.q, torch.nan)
    sinks = torch.linspace(-3, 4, 64, device="cuda").bfloat16()
    how = {"scale": rows.scale, "window": window, "sinks": sinks}
    prefill_attention(rows.q, rows.kv_cache, view, tiles=tiles_of(rows, view), **how, out=out)
    expected = decode_attention_ref(rows.q, rows.kv_cache, view, **how)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_query,keys", [(1, 450), (1, 2000), (8, 500), (8, 2000), (8, 9000)])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_who_merges_finds_what_others_have_written(num_query: int, keys: int, is_fp8: bool) -> None:
    """It waits for numbers, not for programs: were one missed, some of many results would differ."""
    shape = {"heads": (16, 8), "head_dim": 128, "block_size": 64, "dtype": torch.bfloat16}
    rows = make_rows([(num_query, keys)] * (2 if num_query == 1 else 1), **shape, device="cuda")
    view = paged(rows, num_query)
    cache = rows.kv_cache.float().to(torch.float8_e4m3fn) if is_fp8 else rows.kv_cache
    outs = torch.empty(50, *rows.q.shape, dtype=rows.q.dtype, device="cuda")
    expected = decode_attention_ref(rows.q, cache, view, scale=rows.scale)
    decode_attention(rows.q, cache, view, scale=rows.scale, out=outs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            decode_attention(rows.q, cache, view, scale=rows.scale, out=out)
    for _ in range(40):
        outs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outs, outs[:1].expand_as(outs))
    torch.testing.assert_close(outs[0], expected, atol=6e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_decode_replays_in_a_graph_with_other_lengths() -> None:
    rows = make_rows(
        [(1, 300), (1, 40), (1, 900)], dtype=torch.bfloat16, block_size=64, head_dim=128, device="cuda"
    )
    view, out = paged(rows, 1), torch.empty_like(rows.q)
    decode_attention(rows.q, rows.kv_cache, view, scale=rows.scale, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(rows.q, rows.kv_cache, view, scale=rows.scale, out=out)
    view.seq_lens.copy_(torch.tensor([123, 7, 800]))
    graph.replay()
    assert_matches_reference(out, rows)
