"""Products of native code: those of the numbers that codes stand for, whatever the CPU; each row its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.native.library import Code, Library
from pellucid.native.matrix import NativeMatrix, Numbers, in_bfloat16, in_int8
from pellucid.quant.codes import E2M1_NUMBERS

DTYPES = [torch.bfloat16, torch.float16]
NUM_OUT = 80
TABLE = torch.linspace(-1, 1, 16) ** 3
KINDS = ["bf16", "int8", "u8 g32", "u4 g128", "u4 g32 offset", "e2m1 g32", "table g64", "e4m3 g128", "e5m2"]


def codes_of(kind: str, num_in: int, num_out: int = NUM_OUT) -> tuple[Numbers, Tensor]:
    """Random numbers of a kind, and what they stand for, float64."""
    if kind == "bf16":
        weight = torch.randn(num_out, num_in).bfloat16()
        return in_bfloat16(weight), weight.double()
    if kind == "int8":
        weight = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
        rows = torch.rand(num_out) + 0.5
        return in_int8(weight, rows), weight.double() * rows.double()[:, None]
    name, *others = kind.split()
    group = next((int(other[1:]) for other in others if other[0] == "g"), 0)
    num_groups = -(-num_in // group) if group else 1
    scale = (torch.rand(num_out, num_groups) + 0.5).half().float()
    offset = (torch.rand(num_out, num_groups) * 4).half().float() if "offset" in others else None
    q = torch.randint(0, 256 if name in ("u8", "e4m3", "e5m2") else 16, (num_out, num_in), dtype=torch.uint8)
    code, middle, table = {"u8": Code.BYTES, "u4": Code.NIBBLES}.get(name, Code.TABLE), 0, None
    if name in ("u8", "u4"):
        middle = 128 if name == "u8" else 8
        values = q.double() - middle
    elif name == "table":
        table, values = TABLE, TABLE.double()[q.int()]
    elif name == "e2m1":
        twice = [int(2 * number) for number in E2M1_NUMBERS]
        code, middle, table = Code.MAPPED, 12, torch.tensor([n + 12 for n in twice], dtype=torch.uint8)
        values = torch.tensor(twice).double()[q.int()]
    else:
        q = q & 0xBB
        dtype, code = {"e4m3": (torch.float8_e4m3fn, Code.E4M3), "e5m2": (torch.float8_e5m2, Code.E5M2)}[name]
        values = q.view(dtype).double()

    def spread(numbers: Tensor) -> Tensor:
        return numbers.double().repeat_interleave(group or num_in, 1)[:, :num_in]

    numbers = values * spread(scale)
    if offset is not None:
        numbers = numbers - spread(offset)
    made = Numbers(q=q, code=code, group=group, scale=scale, offset=offset, middle=middle, table=table)
    return made, numbers


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_numbers(code: Library, kind: str, num_tokens: int) -> None:
    for dtype in DTYPES[: 1 if kind == "bf16" else 2]:
        numbers, expected = codes_of(kind, 256)
        bias = torch.randn(NUM_OUT).to(dtype)
        x = torch.randn(num_tokens, 256).to(dtype)
        y = NativeMatrix(code, numbers, dtype, bias=bias)(x)
        exact = x.double() @ expected.T + bias.double()
        size = x.double().abs() @ expected.abs().T
        assert ((y.double() - exact).abs() <= 1e-4 * size + torch.finfo(dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("num_in", [16, 96, 100, 1000])
@pytest.mark.parametrize("num_out", [1, 16, 50, 130])
def test_any_size_will_do(code: Library, num_in: int, num_out: int) -> None:
    for kind in ("bf16", "int8", "u4 g16", "table g64", "e4m3 g32"):
        numbers, expected = codes_of(kind, num_in, num_out)
        matrix = NativeMatrix(code, numbers, torch.bfloat16)
        for num_tokens in (1, 6):
            x = torch.randn(num_tokens, num_in).bfloat16()
            exact = x.double() @ expected.T
            size = x.double().abs() @ expected.abs().T
            assert ((matrix(x).double() - exact).abs() <= 1e-4 * size + 2**-8 * exact.abs()).all(), kind
    assert matrix(x[:0]).shape == (0, num_out)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_its_company_nor_on_threads(code: Library, kind: str) -> None:
    matrix = NativeMatrix(code, codes_of(kind, 256)[0], torch.bfloat16)
    x = torch.randn(70, 256).bfloat16()
    alone = torch.cat([matrix(row[None]) for row in x])
    for num in (2, 3, 4, 5, 8, 16, 17, 33, 70):
        assert torch.equal(matrix(x[:num]), alone[:num]), num
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(matrix(x), alone)
    finally:
        torch.set_num_threads(threads)


def test_sums_of_integers_are_exact(code: Library) -> None:
    """Activations and scales of whole numbers, whose products and sums floats hold."""
    x = torch.randint(-8, 9, (9, 256)).bfloat16()
    x[:, 0] = 127 / 4  # the largest: the step is a power of two
    for kind, bound in (("u8 g32", 128), ("u4 g128", 8), ("e2m1 g32", 12)):
        numbers, _ = codes_of(kind, 256)
        assert numbers.scale is not None
        ones = Numbers(
            q=numbers.q, code=numbers.code, group=numbers.group, scale=torch.ones_like(numbers.scale),
            middle=numbers.middle, table=numbers.table,
        )  # fmt: skip
        values = ones.q.int() if ones.table is None else ones.table.int()[ones.q.int()]
        expected = (x.double() @ (values - bound).double().T).bfloat16()
        assert torch.equal(NativeMatrix(code, ones, torch.bfloat16)(x), expected)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu"])
def test_a_gate_is_that_of_the_product(code: Library, act: str) -> None:
    for kind in ("bf16", "u4 g32 offset"):
        numbers, _ = codes_of(kind, 128, 96)
        matrix = NativeMatrix(code, numbers, torch.bfloat16, gated=True)
        plain = NativeMatrix(code, numbers, torch.bfloat16)
        for num_tokens in (1, 3, 40):
            x = torch.randn(num_tokens, 128).bfloat16() / 8
            both = matrix(x)
            assert torch.equal(both, plain(x))
            torch.testing.assert_close(matrix.of_gate(x, act), silu_mul_ref(both, act), atol=1e-5, rtol=2e-2)


def test_memory_is_that_of_the_codes(own: Library) -> None:
    numbers, _ = codes_of("u4 g32 offset", 1024, 64)
    assert NativeMatrix(own, numbers, torch.bfloat16).nbytes == 64 * 1024 * (4 + 2 * 16 / 32) / 8
    assert NativeMatrix(own, codes_of("int8", 1024, 64)[0], torch.bfloat16).nbytes == 64 * (1024 + 4)
