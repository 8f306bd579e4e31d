"""From projection to attention's operands: the kernel against its reference, and what is written where."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.attention import qkv_rope as qkv_rope_module
from pellucid.kernels.attention.qkv_rope import FEW_TOKENS, SMALL_HEAD, program_size, qkv_rope, qkv_rope_ref
from pellucid.layers.rope import RopeConfig
from pellucid.layers.rotary import rotary_table
from tests.kernels.compare import DTYPES, assert_rounded_alike

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = [17, 64, 3 * 16 + 15, 5 * 16]
MAX_LEN = 300


@dataclass(frozen=True)
class Shape:
    """Heads as the kernel sees them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # 0: nothing turns
    has_norm: bool
    block_size: int = 16
    interleaved: bool = False
    is_wide: bool = False


SHAPES = [
    Shape(16, 8, 128, 128, True),  # Qwen3-0.6B
    Shape(5, 1, 64, 64, False, block_size=64),
    Shape(6, 3, 80, 80, True, block_size=256),
    Shape(4, 2, 16, 8, True),
    Shape(9, 3, 96, 24, False),
    Shape(2, 2, 40, 0, True),
    Shape(3, 1, 7, 0, False),
    Shape(4, 2, 16, 16, True, is_wide=True),
    Shape(4, 2, 24, 12, True, interleaved=True),
    Shape(5, 1, 64, 64, False, interleaved=True),
    Shape(0, 2, 64, 64, True),  # what is kept and does not attend
]


@dataclass
class Call:
    """Operands of one call."""

    qkv: Tensor
    cache: Tensor
    positions: Tensor
    places: Tensor
    options: dict

    def run(self, function, **scales: float) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        """(q, the cache afterwards)"""
        cache = self.cache.clone()
        q = function(self.qkv, cache, self.positions, self.places, **self.options, **scales)
        return q, cache


def table(rotary_dim: int) -> Tensor:
    config = RopeConfig(kind="default", theta=1e4, rotary_dim=rotary_dim, max_position_embeddings=MAX_LEN)
    return rotary_table(config, MAX_LEN).to(DEVICE)


def make(shape: Shape, dtype: torch.dtype = torch.float32, num_tokens: int = 5) -> Call:
    num_packed = shape.num_heads + 2 * shape.num_kv_heads
    weight = 1 + torch.randn(shape.num_heads + shape.num_kv_heads, shape.head_dim, device=DEVICE) / 4
    pages = (8, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return Call(
        qkv=(2 * torch.randn(num_tokens, num_packed * shape.head_dim, device=DEVICE)).to(dtype),
        cache=torch.randn(pages, device=DEVICE).to(dtype),
        positions=torch.randint(MAX_LEN, (num_tokens,), device=DEVICE),
        places=torch.randperm(8 * shape.block_size, device=DEVICE)[:num_tokens],
        options={
            "norm": (weight if shape.is_wide else weight.to(dtype), 1e-6) if shape.has_norm else None,
            "rope": table(shape.rotary_dim) if shape.rotary_dim else None,
            "interleaved": shape.interleaved,
        },
    )


def name(shape: Shape) -> str:
    norm = ("wide-norm" if shape.is_wide else "norm") if shape.has_norm else "no-norm"
    turn = f"{'pairs' if shape.interleaved else 'turn'}{shape.rotary_dim}"
    return f"{shape.num_heads}+{shape.num_kv_heads}x{shape.head_dim}-{turn}-{norm}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_the_kernel_rounds_as_its_reference_does(shape: Shape, dtype: torch.dtype) -> None:
    call = make(shape, dtype)
    (q, cache), (expected, expected_cache) = call.run(qkv_rope), call.run(qkv_rope_ref)
    assert_rounded_alike(q, expected)
    assert_rounded_alike(cache, expected_cache)
    assert q.is_contiguous()


@pytest.mark.parametrize("function", [qkv_rope, qkv_rope_ref])
def test_each_token_lands_in_its_place_and_nothing_else_changes(function) -> None:  # noqa: ANN001
    call = make(Shape(4, 3, 8, 0, has_norm=False), num_tokens=4)
    call.cache.zero_()
    call.places = torch.tensor(PLACES, device=DEVICE)
    q, cache = call.run(function)
    expected, k, v = call.qkv.unflatten(1, (-1, 8)).split((4, 3, 3), dim=1)
    assert torch.equal(q, expected)
    for token, place in enumerate(PLACES):
        page = cache[place // 16, :, :, place % 16]
        assert torch.equal(page[0], k[token]) and torch.equal(page[1], v[token])
        page.zero_()
    assert cache.eq(0).all()


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[9]], ids=name)
def test_many_tokens_take_larger_programs_and_give_the_same(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qkv_rope_module, "MANY_TOKENS", FEW_TOKENS + 1)
    call = make(shape, num_tokens=FEW_TOKENS + 1)
    (q, cache), (expected, expected_cache) = call.run(qkv_rope), call.run(qkv_rope_ref)
    sizes = [program_size(num, shape.head_dim) for num in (FEW_TOKENS, FEW_TOKENS + 1)]
    assert sizes[0] < sizes[1] and (sizes[1] > (8, 2)) == (shape.head_dim <= SMALL_HEAD)
    assert_rounded_alike(q, expected)
    assert_rounded_alike(cache, expected_cache)


def test_rows_may_be_slices_of_wider_ones() -> None:
    call = make(SHAPES[3])
    expected, expected_cache = call.run(qkv_rope)
    call.qkv = torch.cat((call.qkv, call.qkv), dim=1)[:, : call.qkv.shape[1]]
    q, cache = call.run(qkv_rope)
    assert torch.equal(q, expected) and torch.equal(cache, expected_cache)


def test_tokens_of_padding_may_share_a_place() -> None:
    call = make(SHAPES[3])
    call.cache.zero_()
    call.places = torch.tensor([20, 0, 0, 0, 21], device=DEVICE)
    (_, cache), (_, expected) = call.run(qkv_rope), call.run(qkv_rope_ref)
    torch.testing.assert_close(cache[1:], expected[1:])
    assert cache[1, :, :, 4:6].ne(0).all()


def test_no_tokens_write_nothing() -> None:
    call = make(SHAPES[0], num_tokens=0)
    q, cache = call.run(qkv_rope)
    assert q.shape == (0, 16, 128) and torch.equal(cache, call.cache)


KEPT = [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)]


@pytest.mark.parametrize(("kept", "limit"), KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache_holds_scaled_and_saturated_numbers(
    dtype: torch.dtype, kept: torch.dtype, limit: float
) -> None:
    call = make(Shape(4, 3, 8, 0, has_norm=False), dtype, num_tokens=4)
    call.qkv[0, 4 * 8] = 1e6
    call.cache, call.places = call.cache.to(kept), torch.tensor(PLACES, device=DEVICE)
    _, cache = call.run(qkv_rope_ref, k_scale=2.0, v_scale=0.5)
    _, k, v = call.qkv.unflatten(1, (-1, 8)).split((4, 3, 3), dim=1)
    written = cache[1, :, :, 1].float()
    assert written[0, 0, 0] == limit
    step = torch.finfo(kept).eps / 2
    torch.testing.assert_close(written[0, 1:], k[0, 1:].float() / 2, rtol=step, atol=2**-9)
    torch.testing.assert_close(written[1], v[0].float() * 2, rtol=step, atol=2**-9)


gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("kept", "limit"), KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache_is_written_as_the_reference_does(
    dtype: torch.dtype, kept: torch.dtype, limit: float
) -> None:
    """The interpreter does not round to FP8 as GPUs do.  Without norm and rope nothing else is rounded."""
    call = make(Shape(16, 8, 128, 0, has_norm=False), dtype)
    call.qkv *= limit / 4
    call.cache = torch.zeros_like(call.cache).to(kept)
    (_, cache), (_, expected) = (call.run(f, k_scale=2.0, v_scale=0.5) for f in (qkv_rope, qkv_rope_ref))
    assert torch.equal(cache.float(), expected.float())
    assert cache.float().max() == limit


@pytest.mark.gpu
@gpu
def test_a_graph_reads_places_and_positions_again() -> None:
    call = make(SHAPES[0], torch.bfloat16)
    cache = call.cache.clone()
    qkv_rope(call.qkv, cache, call.positions, call.places, **call.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = qkv_rope(call.qkv, cache, call.positions, call.places, **call.options)
    for _ in range(2):
        call.positions.copy_(torch.randint_like(call.positions, MAX_LEN))
        call.places.copy_(torch.randperm(128, device=DEVICE)[:5])
        cache.copy_(call.cache)
        graph.replay()
        expected, expected_cache = call.run(qkv_rope_ref)
        assert_rounded_alike(q, expected)
        assert_rounded_alike(cache, expected_cache)
