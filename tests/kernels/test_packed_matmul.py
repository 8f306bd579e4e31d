"""Packed matrices: how codes lie, what they stand for, and products with them, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.packed.packed_matmul import dequantize, packed_matmul, packed_matmul_ref, splits_for
from pellucid.kernels.packed.packed_products import PackedProducts
from pellucid.kernels.packed.packed_weight import (
    GroupCodes,
    Numbers,
    PackedWeight,
    by_turns,
    group_for,
    in_lanes,
    in_words,
    numbers_of,
    out_of_lanes,
    out_of_words,
    packed,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=GPU)]
KINDS = [  # of codes: what they stand for, bits, inputs a group, what else there is
    (Numbers.INTEGER, 4, 128, ()),
    (Numbers.INTEGER, 4, 64, ("zero",)),
    (Numbers.INTEGER, 4, 32, ("offset",)),
    (Numbers.INTEGER, 4, 0, ("zero",)),  # a scale for each output
    (Numbers.INTEGER, 8, 16, ()),
    (Numbers.INTEGER, 8, 128, ("zero",)),
    (Numbers.E2M1, 4, 32, ()),
    (Numbers.E2M1, 4, 16, ()),
    (Numbers.TABLE, 4, 64, ()),
    (Numbers.E4M3, 8, 0, ()),
    (Numbers.E5M2, 8, 64, ()),
]
Kind = tuple[Numbers, int, int, tuple[str, ...]]


def codes(kind: Kind, num_out: int, num_in: int) -> GroupCodes:
    """Whose numbers are about the inverse root of the inputs."""
    numbers, bits, group, more = kind
    group = group or num_in
    generator = torch.Generator().manual_seed(num_in)
    q = torch.randint(1 << bits, (num_out, num_in), generator=generator).to(torch.uint8)
    if numbers in (Numbers.E4M3, Numbers.E5M2):
        q &= 0xBB  # none is infinite or large
    size = num_out, -(-num_in // group)
    scale = (torch.rand(size, generator=generator) + 0.5) * num_in**-0.5 / (1 << bits - 2)
    zero = torch.randint(1 << bits, size, generator=generator).float() if "zero" in more else None
    offset = torch.rand(size, generator=generator) * num_in**-0.5 if "offset" in more else None
    table = torch.linspace(-1.2, 0.8, 16) if numbers is Numbers.TABLE else None
    middle = 1 << bits - 1 if numbers is Numbers.INTEGER and zero is None else 0
    parts = {"q": q, "scale": scale, "zero": zero, "offset": offset, "table": table}
    on_device = {name: None if part is None else part.to(DEVICE) for name, part in parts.items()}
    return GroupCodes(**on_device, numbers=numbers, bits=bits, group=group, middle=middle)


def weight_of(kind: Kind, num_out: int, num_in: int, dtype: torch.dtype) -> PackedWeight:
    return packed([codes(kind, num_out, num_in)], dtype)


def rows(num_rows: int, num_in: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_undone(bits: int) -> None:
    q = torch.randint(1 << bits, (130, 200), dtype=torch.uint8)
    assert torch.equal(out_of_words(in_words(q, bits), bits)[:130, :200], q)


def test_a_thread_has_the_fragment_that_it_multiplies() -> None:
    """PTX ISA, matrix A of mma.m16n8k16: row lane / 4 + 8 b, column lane % 4 * 2 + 8 c + a."""
    q = torch.randint(16, (64, 64), dtype=torch.uint8)
    words = in_words(q, 4).view(4, 8, 4, 4)
    for warp, lane, thread, step in [(0, 0, 0, 0), (1, 3, 2, 1), (3, 7, 3, 3)]:
        for a, b, c in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
            nibble = int(words[warp, lane, thread, step]) >> 8 * c + 4 * b + 16 * a & 15
            assert nibble == q[16 * warp + 8 * b + lane, 16 * step + 8 * c + 2 * thread + a]


def test_lanes_are_undone() -> None:
    scales = torch.randn(130, 3)
    assert torch.equal(out_of_lanes(in_lanes(scales, 4))[:130, :3], scales)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packing_loses_nothing(kind: Kind) -> None:
    """Also of several matrices, whose outputs are no whole tiles."""
    parts = [codes(kind, num_out, 200) for num_out in (70, 40)]
    expected = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(numbers_of(packed(parts, torch.float32)), expected)
    assert torch.equal(numbers_of(packed(parts, torch.float32), 64, 100), expected[64:100])


@pytest.mark.parametrize("groups", [(192, 128), (0, 64), (96, 0)])
def test_matrices_of_one_layer_may_have_groups_of_their_own(groups: tuple[int, int]) -> None:
    parts = [codes((Numbers.INTEGER, 4, group, ("zero",)), 70, 400) for group in groups]
    expected = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(numbers_of(packed(parts, torch.float32)), expected)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[8]], ids=str)
def test_gates_and_what_they_open_may_lie_by_turns(kind: Kind) -> None:
    parts = [codes(kind, 96, 200)] * 2
    weight = packed(parts, torch.float32, gated=True)
    expected = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(numbers_of(weight), expected) and torch.equal(dequantize(weight), expected)
    lying = out_of_words(weight.words, weight.bits)[:192, :200]
    assert torch.equal(lying, torch.cat([part.q for part in parts])[by_turns(192)])
    assert by_turns(64)[:24].tolist() == [*range(8), *range(32, 40), *range(8, 16)]


@pytest.mark.parametrize(
    ("group", "expected"), [(128, 128), (64, 64), (32, 32), (16, 16), (96, 32), (1000, 1024), (8, None)]
)
def test_groups_are_whole_steps(group: int, expected: int | None) -> None:
    assert group_for(group, 1000) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_are_made_of_codes(kind: Kind, dtype: torch.dtype) -> None:
    weight = weight_of(kind, 130, 200, dtype)
    expected = numbers_of(weight)
    how = {"atol": 0.0, "rtol": 0.0} if weight.offset is None else {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(dequantize(weight), expected, **how)
    torch.testing.assert_close(dequantize(weight, 64, 100), expected[64:100], **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("num_rows", "splits"), [(1, 1), (3, 3), (17, 2)])
def test_few_rows_match(kind: Kind, dtype: torch.dtype, num_rows: int, splits: int) -> None:
    weight = weight_of(kind, 130, 200, dtype)
    x, bias = rows(num_rows, 200, dtype), rows(1, 130, dtype)[0]
    arrivals = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    y = packed_matmul(x, weight, bias=bias, arrivals=arrivals, splits=splits)
    assert not arrivals.any()
    expected = packed_matmul_ref(x, weight, bias=bias)
    torch.testing.assert_close(y.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_row_has_the_same_bits_in_any_company() -> None:
    weight = weight_of(KINDS[1], 70, 1100, torch.float16)
    assert splits_for(weight) > 1
    product, x = PackedProducts(weight), rows(15, 1100, torch.float16)
    together = product(x)
    x[1] = 6e4  # whatever a neighbour holds
    beside = product(x)
    assert torch.equal(beside[[0, 2, 14]], together[[0, 2, 14]]) and not torch.equal(beside[1], together[1])
    assert torch.equal(product(x[2:3]), together[2:3])


@pytest.mark.parametrize("num_rows", [0, 2, 70])
def test_inputs_may_be_in_another_order(num_rows: int) -> None:
    weight, order = weight_of(KINDS[0], 70, 200, torch.float32), torch.randperm(200, device=DEVICE)
    x = rows(num_rows, 200, torch.float32)
    expected = packed_matmul_ref(x[:, order], weight)
    torch.testing.assert_close(PackedProducts(weight, order)(x), expected, atol=1e-5, rtol=1e-5)


def test_many_rows_are_multiplied_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.kernels.packed.packed_products.SCRATCH_BYTES", 64 * 200 * 4)
    weight = weight_of(KINDS[0], 150, 200, torch.float32)
    x, bias = rows(70, 200, torch.float32), rows(1, 150, torch.float32)[0]
    expected = packed_matmul_ref(x, weight, bias=bias)
    torch.testing.assert_close(PackedProducts(weight)(x, bias), expected, atol=1e-5, rtol=1e-5)
