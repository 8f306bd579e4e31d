"""Kernels for Hopper GPUs, against their references, on a CPU that plays one."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.attention import prefill_plan
from pellucid.kernels.attention.paged_attention import LOG2_E, paged_attention_ref
from pellucid.kernels.attention.prefill_attention import prefill_tiles, queries_per_tile
from pellucid.kernels.attention.prefill_plan import PromptTiles
from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.kernels.products.small_matmul import Scales, small_matmul_ref
from pellucid.kernels.products.tiles import Gemv, Persistent, Wgmma
from tests.attention.paged import make_rows
from tests.diagonal import diagonal
from tests.kernels.emulator import emulated
from tests.kernels.test_attention_kernels import paged
from tests.kernels.test_prefill_plan import is_cut, programs_of

LENGTHS = [[(1, 1), (65, 65), (200, 330)], [(130, 600), (3, 64), (129, 129)]]  # queries, keys


def attend(
    lengths: list[tuple[int, int]],
    head_dim: int,
    heads: tuple[int, int],
    *edits: tuple[str, str],
    num_wanted: list[int] | None = None,
    window: int | None = None,
    sinks: bool = False,
    **how: int,
) -> None:
    """Attend with the kernel, and compare.  num_wanted: of each row's last queries; None: all."""
    module = emulated("attention.hopper_prefill", *edits, **how)
    shape = {"heads": heads, "head_dim": head_dim, "block_size": 64, "dtype": torch.bfloat16}
    rows = make_rows(lengths, **shape, spare_columns=0, window=window)
    view = paged(rows, rows.fwd.max_query)
    tile_queries = queries_per_tile(heads[0] // heads[1], by_hopper=True)
    num_wanted = rows.query_lens if num_wanted is None else num_wanted
    tiles = torch.from_numpy(prefill_tiles(rows.query_lens, tile_queries, num_wanted))
    out = torch.full_like(rows.q, torch.nan)
    scales = {"scale": rows.scale * LOG2_E, "v_scale": 1.0, "window": window}
    logits = torch.linspace(-3, 4, heads[0]).bfloat16() if sinks else None
    module.hopper_prefill(
        rows.q, rows.kv_cache, view, tiles=PromptTiles(tiles, view, tile_queries), **scales, sinks=logits,
        out=out,
    )  # fmt: skip
    is_wanted = torch.cat(
        [torch.arange(q, 0, -1) <= num for q, num in zip(rows.query_lens, num_wanted, strict=True)]
    )
    wanted, expected = out[is_wanted].flatten(1).double(), rows.expected()[is_wanted]
    if sinks:
        how_ref = {"scale": rows.scale, "window": window, "sinks": logits}
        reference = paged_attention_ref(rows.q, rows.kv_cache, view, **how_ref)  # pyright: ignore[reportArgumentType]
        expected = reference[is_wanted].flatten(1).double()
    torch.testing.assert_close(wanted, expected, atol=2e-2, rtol=2e-2)
    assert out[~is_wanted].isnan().all()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
def test_prompt_chunks_match(lengths: list[tuple[int, int]], head_dim: int, heads: tuple[int, int]) -> None:
    attend(lengths, head_dim, heads)


@pytest.mark.parametrize("heads", [(5, 1), (12, 2), (14, 2), (6, 2)], ids=str)
def test_groups_of_any_number_of_heads_match(heads: tuple[int, int]) -> None:
    """They are padded with heads of the next KV head, and behind the last one with nothing."""
    attend([(1, 1), (65, 65), (40, 200)], 64, heads)
    attend([(30, 700)], 64, heads, num_multiprocessors=7)


@pytest.mark.parametrize("window", [1, 100, 128, 300])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_windows_and_sinks_match(window: int, sinks: bool) -> None:
    attend([(1, 1), (65, 65), (40, 700)], 64, (8, 1), window=window, sinks=sinks)


@pytest.mark.parametrize("window", [None, 500])
def test_sinks_of_parts_count_once(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_plan, "CUT", 0)
    attend([(70, 1300)], 64, (8, 2), window=window, sinks=True, num_multiprocessors=7)


def test_a_head_of_the_padding_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        attend([(65, 65)], 64, (10, 2), ("is_own & (packed % HEADS < GROUP_SIZE)", "is_own"))


@pytest.mark.parametrize("num_wanted", [[1, 0, 1], [1, 11, 70], [0, 3, 0]], ids=str)
@pytest.mark.parametrize("num_programs", [2, 7])
def test_only_the_queries_that_are_wanted_are_attended_with(num_wanted: list[int], num_programs: int) -> None:
    """Tiles then begin anywhere within a row."""
    lengths = [(1, 1), (65, 65), (200, 330)]
    attend(lengths, 64, (8, 2), num_wanted=num_wanted, num_multiprocessors=num_programs)


@pytest.mark.parametrize("lengths", [[(70, 900)], [(130, 1300)]], ids=str)
@pytest.mark.parametrize("heads", [(2, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_prompt_chunks_of_few_items_match(
    lengths: list[tuple[int, int]], heads: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs then take parts of items, and some take what others give."""
    monkeypatch.setattr(prefill_plan, "CUT", 0)
    plans = []
    plan = PromptTiles.plan
    monkeypatch.setattr(PromptTiles, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    attend(lengths, 64, heads, num_multiprocessors=7, seed=seed)
    assert is_cut(programs_of(plans[0], 7)), "all items are whole"


RELEASE = "mbarrier.arrive(k_empty.index(stage), pred=more)"
WAIT = "scores = warpgroup_mma_wait(1, deps=[scores])"
FAULTS = {
    "scores before there are keys": (
        "mbarrier.wait(k_full.index(stage), step // K_STAGES & 1, pred=more)",
        "",
    ),
    "keys go while they are used": (f"{WAIT}\n            {RELEASE}", f"{RELEASE}; {WAIT}"),
    "nobody says that keys may go": (RELEASE, ""),
    "copies do not wait for room": ("mbarrier.wait(empty.index(stage), phase ^ 1)", ""),
    "queries lie where results are": ("mbarrier.wait(q_empty.index(buffer), (round // 2 & 1) ^ 1)", ""),
    "fewer bytes are expected than come": ("GROUPS * ROWS * HEAD_DIM * 2", "GROUPS * ROWS * HEAD_DIM"),
    "fewer bytes of keys": (
        "mbarrier.expect(full, KEYS * HEAD_DIM * 2)",
        "mbarrier.expect(full, KEYS * HEAD_DIM)",
    ),
    "the future is seen": ("if start + KEYS > seen_by_all:", "if False:"),
    "what lies behind the end counts": ("if more & (seq_len - start < KEYS):", "if False:"),
    "pages behind the last one": (
        "gl.minimum(gl.maximum(key + PART, oldest), (num_keys - 1) // PART * PART)",
        "key + PART",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_would_be_noticed(fault: tuple[str, str]) -> None:
    old, new = fault
    lengths = [(20, 20)] * 4 + [(200, 330), (130, 650)]
    with pytest.raises(AssertionError):
        for seed in range(4):
            attend(lengths, 64, (2, 2), (old, new), num_multiprocessors=1, seed=seed)


def operands(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """x and weight, such that results are about 1."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
    return [each.to(dtype) for each in (x, weight)]


@pytest.mark.parametrize("tile", [Persistent(128, 16), Persistent(192, 2)], ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(300, 1056, 200), (500, 512, 448)], ids=str)
def test_gated_products_of_prompts_match(tile: Persistent, act: str, shape: tuple[int, int, int]) -> None:
    module = emulated("products.persistent_matmul")
    x, weight = operands(*shape)
    out = torch.full((len(x), len(weight) // 2), torch.nan, dtype=x.dtype)
    module.persistent_matmul(x, weight, out, tile, act=act)
    expected = small_matmul_ref(x, weight, act=act)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def integers(num_rows: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor, Scales]:
    """x and weight in INT8, with sums that float32 does not hold, and scales."""
    x, weight = (torch.randint(-127, 128, (num, num_in), dtype=torch.int8) for num in (num_rows, num_out))
    x[0], weight[0] = 127, 127
    return x, weight, Scales(weight=torch.rand(num_out, 1) / 999, x=torch.rand(num_rows, 1) / 999)


def exact(x: Tensor, weight: Tensor, scales: Scales, bias: Tensor | None = None) -> Tensor:
    """The sums, rounded to float32 once, times the scales."""
    y = (x.double() @ weight.double().T).float() * scales.weight.T * scales.x
    return (y if bias is None else y + bias.float()).bfloat16()


TILES = [
    Wgmma(64, 16, 1, 11),
    Wgmma(64, 16, 2, 20),
    Wgmma(128, 32, 4, 11),
    Wgmma(64, 64, 1, 8),
    Wgmma(64, 64, 4, 8),
    Wgmma(64, 128, 4, 8),
    Wgmma(128, 128, 2, 6),
    Wgmma(192, 64, 1, 6),
    Wgmma(192, 128, 1, 4),
]


@diagonal({"tile": TILES, "act": [None, "silu"]})
def test_products_of_few_rows_match(tile: Wgmma, act: str | None) -> None:
    module = emulated("products.hopper_matmul", num_multiprocessors=64)
    x, weight = operands(tile.rows + 5, 272, 1096)
    bias = torch.randn(272).to(x.dtype)
    out = torch.full((len(x), 272 // 2 if act else 272), torch.nan, dtype=x.dtype)
    arrivals = torch.zeros(module.num_arrivals(272, len(x), tile), dtype=torch.int32)
    module.hopper_matmul(x, weight, out, tile, bias=bias, act=act, arrivals=arrivals)
    assert not arrivals.any()
    expected = small_matmul_ref(x, weight, bias=bias, act=act)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_every_program_has_a_step_to_wait_with() -> None:
    module = emulated("products.hopper_matmul", num_multiprocessors=64)
    x, weight = operands(64, 64, 200)  # four steps
    out, arrivals = torch.empty(64, 64, dtype=x.dtype), torch.zeros(1, dtype=torch.int32)
    module.hopper_matmul(x, weight, out, Wgmma(64, 64, 4, 8), arrivals=arrivals)
    with pytest.raises(AssertionError):
        module.hopper_matmul(x, weight, out, Wgmma(64, 64, 8, 8), arrivals=arrivals)


@pytest.mark.parametrize("tile", [Gemv(8, 256, 4), Gemv(2, 1024, 4)], ids=str)
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_products_of_single_rows_match(tile: Gemv, act: str | None, num_rows: int) -> None:
    module = emulated("products.small_matmul")
    x, weight = operands(num_rows, 36, 1096)
    out = torch.full((len(x), 36 // 2 if act else 36), torch.nan, dtype=x.dtype)
    module.small_matmul(x, weight, out, tile, act=act)
    expected = small_matmul_ref(x, weight, act=act)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_fp8_products_of_few_rows_match() -> None:
    module = emulated("products.hopper_matmul", num_multiprocessors=64)
    tile, scales = Wgmma(128, 128, 2, 6), Scales(weight=torch.rand(272, 1) + 0.5, x=torch.rand(100, 1) + 0.5)
    check_fp8(module, tile, scales, None)


@diagonal(
    {
        "tile": [Wgmma(128, 128, 2, 6), Wgmma(64, 16, 1, 8), Wgmma(64, 64, 4, 4)],
        "group": [128, 256],
        "act": [None, "silu"],
    }
)
def test_fp8_products_with_scales_of_groups_match(tile: Wgmma, group: int, act: str | None) -> None:
    module = emulated("products.hopper_matmul", num_multiprocessors=64)
    num_groups = -(-1104 // group)
    scales = Scales(torch.rand(272, num_groups) + 0.5, torch.rand(100, num_groups) + 0.5, group)
    check_fp8(module, tile, scales, act)


@diagonal(
    {
        "tile": [Wgmma(128, 128, 2, 6), Wgmma(64, 16, 1, 8), Wgmma(64, 256, 1, 4), Wgmma(64, 64, 4, 4)],
        "act": [None, "silu"],
    }
)
def test_int8_products_are_exact_sums_times_scales(tile: Wgmma, act: str | None) -> None:
    module = emulated("products.hopper_matmul", num_multiprocessors=128)
    x, weight, scales = integers(300, 272, 1104)
    out = torch.full((300, 136 if act else 272), torch.nan, dtype=torch.bfloat16)
    arrivals = torch.zeros(module.num_arrivals(272, 300, tile), dtype=torch.int32)
    module.hopper_matmul(x, weight, out, tile, scales=scales, act=act, arrivals=arrivals)
    expected = exact(x, weight, scales)
    if act is None:
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, silu_mul_ref(expected, act), atol=1e-2, rtol=1e-2)


def check_fp8(module: ModuleType, tile: Wgmma, scales: Scales, act: str | None) -> None:
    """A product of 100 rows against the reference."""
    x, weight = (each.to(torch.float8_e4m3fn) for each in operands(100, 272, 1104))
    out = torch.full((100, 136 if act else 272), torch.nan, dtype=torch.bfloat16)
    arrivals = torch.zeros(module.num_arrivals(272, 100, tile), dtype=torch.int32)
    module.hopper_matmul(x, weight, out, tile, scales=scales, act=act, arrivals=arrivals)
    expected = small_matmul_ref(x, weight, scales=scales)
    expected = expected if act is None else silu_mul_ref(expected, act)
    torch.testing.assert_close(out.float(), expected, atol=4e-2, rtol=2e-2)
