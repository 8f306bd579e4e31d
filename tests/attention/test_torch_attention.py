"""The plain torch backend against naive attention, and its promise that a row does not notice its company."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from pellucid.attention.base import ATTENTION_BACKENDS, AttentionSpec, QKNorm, choose_backend
from pellucid.attention.torch import TorchAttention
from pellucid.platform import Platform
from tests.attention.paged import Rows, make_rows

CPU = Platform(device="cpu", name="CPU", memory_total=1, memory_free=1, num_cores=1)
MIXED = [(1, 1), (1, 40), (1, 33), (4, 37), (4, 40), (1, 100), (20, 20), (30, 75)]

# A block is cleared when its first token is written, so behind a row's end there are only numbers.
make_settled_rows = partial(make_rows, stale=7.0)


def attend(rows: Rows) -> Tensor:
    backend = TorchAttention()
    rows.fwd.attn = (backend.metadata(rows.fwd, 0),)
    return backend.forward(rows.qkv, rows, rows.fwd)


def assert_right(rows: Rows, tolerance: float = 2e-6) -> None:
    out, expected = attend(rows).double(), rows.expected()
    torch.testing.assert_close(out[: len(expected)], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
def test_mixed_rows_match_naive_attention(block_size: int, window: int | None) -> None:
    assert_right(make_settled_rows(MIXED, block_size=block_size, window=window))


@pytest.mark.parametrize("group_size", [1, 2, 4, 8])
def test_every_ratio_of_query_heads_to_kv_heads_matches(group_size: int) -> None:
    assert_right(make_settled_rows(MIXED, heads=(2 * group_size, 2)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    assert_right(make_settled_rows(MIXED, dtype=dtype, head_dim=64), tolerance)


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_rows_that_see_their_own_chunk_match_naive_attention(chunk: int) -> None:
    assert_right(make_settled_rows(MIXED, chunk=chunk))
    assert_right(make_settled_rows([(1100, 1300)], heads=(2, 1), chunk=chunk))


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_prompt_chunk_behind_a_prefix_is_cut_into_tiles(window: int | None) -> None:
    assert_right(make_settled_rows([(1100, 1300)], heads=(2, 1), window=window))


TREE = (0, 0, 1, 1, 2, 3, 0, 7, 8, 8)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [None, 5, 50])
def test_drafts_of_a_tree_see_their_ancestors_alone(block_size: int, window: int | None) -> None:
    lens = [(1, 1), (6, 40), (6, 33), (4, 37), (1, 100), (11, 60), (20, 20)]
    rows = make_settled_rows(lens, block_size=block_size, window=window)
    assert_right(rows.plant(TREE, [0, 5, 5, 3, 0, 10, 0]))


@pytest.mark.parametrize("window", [None, 20])
def test_queries_of_a_block_see_each_other(window: int | None) -> None:
    lens = [(4, 40), (8, 33), (2, 17), (16, 50), (1, 9)]
    assert_right(make_settled_rows(lens, window=window).open())


def test_what_is_kept_alone_is_what_attending_keeps() -> None:
    ours, theirs = (make_settled_rows([(1, 40), (3, 33), (20, 20)]) for _ in range(2))
    for rows in (ours, theirs):
        rows.qk_norm = QKNorm(torch.linspace(0.5, 1.5, 6 * 16).view(6, 16), 1e-6)
        rows.fwd.attn = (TorchAttention().metadata(rows.fwd, 0),)
    TorchAttention().write(ours.qkv[:, 4 * 16 :], ours, ours.fwd)
    TorchAttention().forward(theirs.qkv, theirs, theirs.fwd)
    assert torch.equal(ours.kv_cache, theirs.kv_cache)


def test_kept_drafts_move_together_and_the_rest_stays() -> None:
    before = torch.randn(5, 2, 2, 16, 8)
    cache = before.clone()
    sources, targets = torch.tensor([[19, 21], [0, 63]]), torch.tensor([[18, 19], [0, 62]])
    TorchAttention().move(cache, sources, targets)
    flat_before, flat = (x.permute(0, 3, 1, 2, 4).reshape(80, 2, 2, 8) for x in (before, cache))
    expected = flat_before.clone()
    expected[[18, 19, 62]] = flat_before[[19, 21, 63]]
    assert torch.equal(flat, expected)


def test_padding_rows_get_zeros_and_disturb_nobody() -> None:
    rows = make_settled_rows(MIXED, num_padding=3)
    assert_right(rows)
    assert attend(rows)[-3:].eq(0).all()


@pytest.mark.parametrize("num_query", [3, 8, 20])
def test_what_a_former_owner_left_in_a_block_is_not_seen(num_query: int) -> None:
    assert_right(make_rows([(num_query, num_query), (1, 17), (1, 1)], stale=torch.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    crowd = make_settled_rows(MIXED * 6, dtype=dtype, head_dim=64)
    together = attend(crowd)
    starts = crowd.fwd.cu_seqlens_q.tolist()
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        assert torch.equal(together[start:end], alone(crowd, row)), f"row {row} noticed its company"


def alone(crowd: Rows, row: int) -> Tensor:
    """Attention of one row of an already written crowd by itself."""
    start, end = crowd.fwd.cu_seqlens_q[row : row + 2].tolist()
    single = make_settled_rows(
        [(crowd.query_lens[row], crowd.seq_lens[row])], dtype=crowd.q.dtype, head_dim=64
    )
    single.q, single.k, single.v = crowd.q[start:end], crowd.k[start:end], crowd.v[start:end]
    single.kv_cache = crowd.kv_cache
    single.fwd.block_tables = (crowd.fwd.block_tables[0][row : row + 1],)
    single.fwd.slot_mappings = (crowd.fwd.slot_mappings[0][start:end],)
    return attend(single)


def test_layers_of_one_step_share_the_plan_and_differ_in_window() -> None:
    rows = make_settled_rows(MIXED)
    backend = TorchAttention()
    rows.fwd.attn = (backend.metadata(rows.fwd, 0),)
    for window in (None, 9, None, 9):
        rows.window = window
        out = backend.forward(rows.qkv, rows, rows.fwd)
        torch.testing.assert_close(out.double(), rows.expected(), atol=2e-6, rtol=0)


def test_an_fp8_cache_is_attention_over_rounded_keys_and_values() -> None:
    rows = make_rows(MIXED, block_size=64, stale=0.0)
    exact = rows.expected()
    rows.k_scale, rows.v_scale = 0.02, 0.01
    rounded = rows.kv_cache / torch.tensor([0.02, 0.01], device=rows.kv_cache.device).view(1, 2, 1, 1, 1)
    rows.kv_cache = rounded.to(torch.float8_e4m3fn)
    out = attend(rows).double().cpu()
    rows.history = [round_to_fp8(kv, rows) for kv in rows.history]
    torch.testing.assert_close(out, rows.expected(), atol=1e-5, rtol=0)
    assert 0.005 < (out - exact).abs().max() < 0.3


def round_to_fp8(kv: Tensor, rows: Rows) -> Tensor:
    """Keys and values [S, 2, K, H] as an FP8 cache gives them back."""
    scales = torch.tensor([rows.k_scale, rows.v_scale]).view(1, 2, 1, 1)
    return (kv / scales).to(torch.float8_e4m3fn).float() * scales


def spec(**changes: object) -> AttentionSpec:
    asked = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "block_size": 16}
    return AttentionSpec(**(asked | changes))  # type: ignore[arg-type]


def test_the_cpu_gets_this_backend() -> None:
    assert isinstance(choose_backend(None, [spec()], CPU), TorchAttention)
    assert ATTENTION_BACKENDS.load("torch") is TorchAttention


@pytest.mark.parametrize(
    "asked",
    [{"tree_depth": 4, "window": 4}, {"dtype": torch.int8}, {"num_kv_heads": 3}],
)
def test_what_it_cannot_do_it_refuses_with_a_reason(asked: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="backend torch cannot serve this model here: "):
        choose_backend("torch", [spec(**asked)], CPU)


def test_a_backend_without_masks_for_trees_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "supports_trees", False)
    with pytest.raises(
        ValueError, match="backend torch cannot serve this model here: has no masks for draft trees"
    ):
        choose_backend(None, [spec(tree_depth=3)], CPU)
    assert isinstance(choose_backend(None, [spec()], CPU), TorchAttention)


def test_the_layout_is_pages_of_keys_then_values() -> None:
    asked = spec(num_kv_heads=8, block_size=64, head_dim=128)
    shape = TorchAttention().kv_layout(asked, 10)
    assert shape == (10, 2, 8, 64, 128) and 4 * math.prod(shape[1:]) == asked.cache.num_bytes


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("height", [-50.0, 0.0, 50.0])
def test_sinks_take_weight_from_the_keys(window: int | None, height: float) -> None:
    rows = make_settled_rows(MIXED, window=window)
    rows.sinks = height + torch.linspace(-1, 1, rows.num_heads)
    assert_right(rows)


def test_sinks_of_a_long_prompt_are_those_of_each_tile() -> None:
    rows = make_settled_rows([(1100, 1300)], heads=(2, 1))
    rows.sinks = torch.tensor([0.5, 3.0])
    assert_right(rows)


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_capped_scores_are_those_of_naive_attention(sink: float | None, window: int | None) -> None:
    rows = make_settled_rows(MIXED, window=window)
    rows.softcap = 0.7
    rows.sinks = None if sink is None else sink + torch.linspace(-1, 1, rows.num_heads)
    assert_right(rows, 1e-5)
