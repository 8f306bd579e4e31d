"""On every GPU and CPU every kind of weights has a product, or is refused in words: none is slow unsaid."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn import functional as F

from pellucid.kernels.products.round_rows import Rounding, round_rows_ref, rounded_bytes_ref
from pellucid.kernels.products.tiles import Gemv, SplitK
from pellucid.platform import Platform
from pellucid.quant.base import LinearShape
from pellucid.quant.bytes_product import MULTIPLY as BYTES_PRODUCTS
from pellucid.quant.fp8 import Fp8, Fp8Format, QuantizedWhenLoaded
from pellucid.quant.int8 import MULTIPLY as INT8_PRODUCTS
from pellucid.quant.int8 import Int8, Int8Format, quantize_rows
from pellucid.quant.products import Multiplier, Product, fp8_product, int8_product, plain_product
from tests.models.harness import CPU, load
from tests.quant.layers import make_linear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS = [None, 128, 48]
SHAPES = [(4096, 4096), (4096, 4000 + 1), (96, 80)]
REFUSED = [(7, 0), (7, 5)]
SERVED = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SLOW = {Multiplier.WIDENED, Multiplier.REFERENCE}


def gpu(capability: tuple[int, int]) -> Platform:
    return Platform(
        device="cuda", name="GPU", memory_total=1, memory_free=1, num_cores=1, capability=capability
    )


def all_products(platform: Platform, *, packs: bool = False) -> dict[str, Product]:
    """By what was asked for."""
    products = {
        f"int8 {dtype} {rounds} {is_whole}": int8_product(
            platform, dtype, rounds=rounds, is_static=rounds, packs=packs or is_whole
        )
        for dtype, rounds, is_whole in itertools.product(DTYPES, (False, True), (False, True))
    }
    for dtype, (num_in, num_out) in itertools.product(DTYPES, SHAPES):
        shape = LinearShape(in_features=num_in, out_partitions=(num_out,), split="out", dtype=dtype)
        products[f"{dtype}"] = plain_product(dtype, platform, packs=packs)
        for block, is_static in [(block, False) for block in BLOCKS] + [(None, True)]:
            chosen = fp8_product(shape, platform, block=block or num_in, is_static=is_static)
            products[f"fp8 {dtype} {num_in} {num_out} {block} {is_static}"] = chosen
    return products


@pytest.mark.parametrize("capability", SERVED, ids=str)
def test_a_gpu_multiplies_all_weights_and_widens_none_in_memory(capability: tuple[int, int]) -> None:
    for asked, product in all_products(gpu(capability)).items():
        assert product.multiplier not in SLOW, asked
        is_fp8 = asked.startswith("fp8")
        assert not (is_fp8 and product.rounds) or capability >= (8, 9), f"{asked}: this GPU has no FP8"
        if is_fp8 or product.multiplier is Multiplier.INT8_KERNELS:
            assert product.multiplier in BYTES_PRODUCTS
        elif asked.startswith("int8"):
            assert product.multiplier in (*INT8_PRODUCTS, Multiplier.UNPACKED)


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        (gpu(each), r"the GPU is GPU \(compute capability 7\.\d\).* need 8\.0 .* device='cpu'")
        for each in REFUSED
    ]
    + [
        (replace(gpu((9, 0)), is_hip=True), "AMD one .*use an NVIDIA GPU, or device='cpu'"),
        (replace(gpu((9, 0)), has_triton=False), r"pip install 'pellucid\[cuda\]', or use device='cpu'"),
    ],
    ids=["7.0", "7.5", "hip", "no Triton"],
)
def test_what_no_kernel_is_written_for_is_refused_with_the_way_out(platform: Platform, words: str) -> None:
    shape = LinearShape(in_features=64, out_partitions=(64,), split="out", dtype=torch.float16)
    for refused in (
        lambda: plain_product(torch.float16, platform, packs=False),
        lambda: int8_product(platform, torch.float16),
        lambda: fp8_product(shape, platform, block=64),
    ):
        with pytest.raises(ValueError, match=words):
            refused()


# What large GPUs have had all along must be what they have; (8, 9) and (8, 0) are what they can.
@pytest.mark.parametrize(
    ("capability", "dtype", "block", "multiplier"),
    [
        ((9, 0), torch.bfloat16, None, Multiplier.FP8_ROWS),
        ((10, 0), torch.bfloat16, None, Multiplier.FP8_ROWS),
        ((8, 9), torch.bfloat16, None, Multiplier.FP8_ROWS),
        ((12, 0), torch.bfloat16, None, Multiplier.FP8_KERNELS),
        ((9, 0), torch.float16, None, Multiplier.FP8_KERNELS),
        ((9, 0), torch.float32, None, Multiplier.FP8_KERNEL),
        ((9, 0), torch.bfloat16, 128, Multiplier.FP8_BLOCKS),
        ((9, 0), torch.bfloat16, 48, Multiplier.FP8_KERNEL),
        ((8, 9), torch.float16, 128, Multiplier.FP8_KERNELS),
        ((8, 0), torch.bfloat16, None, Multiplier.WEIGHT_ONLY),
        ((8, 6), torch.float16, 128, Multiplier.WEIGHT_ONLY),
    ],
    ids=str,
)
def test_fp8_is_multiplied_in_fp8_where_there_is_hardware_for_it(
    capability: tuple[int, int], dtype: torch.dtype, block: int | None, multiplier: Multiplier
) -> None:
    shape = LinearShape(in_features=4096, out_partitions=(4096,), split="out", dtype=dtype)
    for is_static in (False, True)[: 1 if block else 2]:
        product = fp8_product(shape, gpu(capability), block=block or 4096, is_static=is_static)
        assert product.multiplier is multiplier


# Of other widths torch 2.11's product was seen to be wrong, or refused.
@pytest.mark.parametrize(
    ("num_in", "outs", "multiplier"),
    [
        (512, (256, 128), Multiplier.FP8_BLOCKS),
        (1536, (128,), Multiplier.FP8_BLOCKS),
        (384, (128,), Multiplier.FP8_KERNELS),
        (640, (128,), Multiplier.FP8_KERNELS),
        (1408, (128,), Multiplier.FP8_KERNELS),
        (512, (128, 64), Multiplier.FP8_KERNELS),
    ],
    ids=str,
)
def test_the_vendor_multiplies_blocks_of_widths_that_it_takes(
    num_in: int, outs: tuple[int, ...], multiplier: Multiplier
) -> None:
    shape = LinearShape(in_features=num_in, out_partitions=outs, split="out", dtype=torch.bfloat16)
    assert fp8_product(shape, gpu((9, 0)), block=128).multiplier is multiplier


def test_a_cpu_packs_what_it_can_and_says_where_it_is_slow() -> None:
    for rounds in (False, True):
        assert int8_product(CPU, torch.bfloat16, rounds=rounds, packs=True).multiplier is Multiplier.PACKED
        assert int8_product(CPU, torch.bfloat16, rounds=rounds).multiplier is Multiplier.WIDENED
    slow = {product for product in all_products(CPU).values() if product.multiplier in SLOW}
    fp8 = {"fp8 rows", "fp8 rows, static activations", "fp8 blocks of 128 inputs", "fp8 blocks of 48 inputs"}
    assert {product.kind for product in slow} == {"int8 rows", *fp8}
    assert all("slow" in str(product) or "costs time" in str(product) for product in slow)


FORMATS = [Fp8Format(), Fp8Format(activations="static"), Fp8Format(block=(32, 32)), None]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_where_there_is_no_fp8_weights_alone_are_rounded(format: Fp8Format | None) -> None:
    """As on an A100, by the kernel itself in Triton's interpreter."""
    pytest.importorskip("triton")
    method = QuantizedWhenLoaded() if format is None else Fp8(format)
    layer = make_linear(method, torch.float16, bias=True)
    layer.product = method.choose(layer.shape, gpu((8, 0)))
    assert layer.rounding is None
    if format is None:
        _, scale = rounded_bytes_ref(layer.param("weight"), 96)
    else:
        scale = layer.param("weight_scale").clone()
    layer.finish()
    weight = layer.param("weight").double() * scale.repeat_interleave(96 // scale.shape[1], dim=1)
    x = torch.randn(5, 96).half()
    assert layer.bias is not None
    expected = F.linear(x.double(), weight) + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, atol=2e-3 * expected.abs().max().item(), rtol=0)
    assert {name for name, _ in layer.named_parameters()} == {"weight", "weight_scale", "bias"}


@pytest.mark.parametrize(
    ("dtype", "rounds", "packs", "multiplier"),
    [
        (torch.bfloat16, True, True, Multiplier.INT8_KERNELS),
        (torch.float16, True, False, Multiplier.INT8_KERNELS),
        (torch.bfloat16, False, True, Multiplier.UNPACKED),
        (torch.bfloat16, False, False, Multiplier.WEIGHT_ONLY),  # a table's codes lie as rows are looked up
        (torch.float32, False, True, Multiplier.WEIGHT_ONLY),
    ],
)
def test_a_gpu_multiplies_integers_where_activations_are_rounded_to_them(
    dtype: torch.dtype, rounds: bool, packs: bool, multiplier: Multiplier
) -> None:
    for capability in SERVED:
        assert int8_product(gpu(capability), dtype, rounds=rounds, packs=packs).multiplier is multiplier


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_activations_that_are_not_rounded_are_multiplied_with_the_numbers_of_weights(
    dtype: torch.dtype,
) -> None:
    """In 16 bits by the kernels of packed codes, by another one in float32."""
    pytest.importorskip("triton")
    layer = make_linear(method := Int8(), dtype, bias=True)
    layer.product = method.choose(layer.shape, gpu((8, 0)))
    integers, scale = quantize_rows(layer.param("weight"))
    layer.finish()
    x = torch.randn(3, 96).to(dtype)
    assert layer.rounding is None and layer.bias is not None
    expected = F.linear(x.double(), integers.double() * scale.double()[:, None]) + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_integers_of_a_checkpoint_are_multiplied_as_its_activations_are_rounded(
    activations: Literal["dynamic", "static"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are exact, so whoever rounds them, and whichever kernel multiplies, the bits are the same."""
    pytest.importorskip("triton")
    from pellucid.kernels.products import own_products

    few = {1: Gemv(4, 128, 4), 4: SplitK(16, 64, 2, 4, 3), 8: None}
    monkeypatch.setattr(own_products, "choices_for", lambda weight, group: few)
    layer = make_linear(method := Int8(Int8Format(activations)), torch.float16)
    layer.product = method.choose(layer.shape, gpu((9, 0)))
    weight, scale = layer.param("weight").double(), layer.param("weight_scale").float() / 100
    layer.param("weight_scale").copy_(scale)
    static = layer.param("input_scale").max().clone() if activations == "static" else None
    layer.finish()
    assert {name for name, _ in layer.named_parameters()} >= {"weight", "weight_scale"}
    x = torch.randn(9, 96).half()
    rounded = round_rows_ref(x, Rounding(static=static, dtype=torch.int8))
    expected = ((rounded.values.double() @ weight.T).float() * scale.T * rounded.scales).half()
    rounding = layer.rounding
    assert rounding is not None
    for num_rows in (0, 1, 3, 4, 9):
        assert torch.equal(layer(x[:num_rows]), expected[:num_rows])
        assert torch.equal(layer(round_rows_ref(x[:num_rows], rounding())), expected[:num_rows])
    gated = layer.gated(round_rows_ref(x[:1], rounding()), "silu", None)  # pyright: ignore[reportArgumentType]
    assert gated is None, "the gate's own pass rounds for all programs of the next product"


@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_the_log_says_what_multiplies_each_kind_of_weights(
    tiny: Path, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pellucid.models.build"):
        load(tiny, max_model_len=64, quantization=quantization, show_progress=True)
    attention, weights = [
        record.getMessage() for record in caplog.records if record.name == "pellucid.models.build"
    ]
    assert attention == "attention: torch's operations"
    title, *rows = weights.splitlines()
    assert title == "weights:"
    kind = {None: "float32", "fp8": "fp8 rows", "int8": "int8 rows"}[quantization]
    bits = 8 if quantization else 32
    for row in rows:
        names, how = row.split(": ", 1)
        is_quantized = not names.endswith(("embed_tokens", "lm_head"))
        assert f"kept at {bits if is_quantized else 32}.00 bits a weight" in how
        assert f"; {kind}: " in how or not is_quantized


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", [Int8, QuantizedWhenLoaded])
@pytest.mark.parametrize("num_tokens", [0, 1, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_alone_are_widened_in_registers_on_a_gpu(
    method: type[Int8 | QuantizedWhenLoaded], num_tokens: int, dtype: torch.dtype
) -> None:
    layer = make_linear(ours := method(), dtype, device="cuda")
    ours.choose(layer.shape, gpu((8, 0)))
    plain = layer.param("weight").double()
    layer.finish()
    x = torch.randn(num_tokens, 96, device="cuda").to(dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (num_tokens, 80)
    expected = F.linear(x.double(), plain)
    assert num_tokens == 0 or (y.double() - expected).square().mean() < 4e-3 * expected.square().mean()
