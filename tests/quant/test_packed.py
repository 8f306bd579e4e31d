"""Codes that stay packed: layers compute what their numbers say, merged, cut among ranks, in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.packed.packed_weight import numbers_of
from pellucid.kernels.packed.packed_weight import packed as pack
from pellucid.layers.linear import Linear
from pellucid.layers.weight import Weight
from pellucid.platform import Platform
from pellucid.quant import packed, products
from pellucid.quant.base import Coords, LinearShape, Piece, Split
from pellucid.quant.codes import E4M3, LUT4, PLAIN, S8, U4, U6, Codes, Group, Scales
from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.packed import Packed, group_codes, refusal
from tests.quant.formats import FORMATS, raw_of, shape_of

CPU = torch.device("cpu")
ORDERED = {"ct-w4a16-gptq-actorder", "gptq-4bit-g128-actorder"}
STORED = sorted(set(FORMATS) - {"gpt-oss-mxfp4-tiny"})  # experts


@pytest.mark.parametrize("name", STORED)
def test_what_tools_have_written_is_kept_to_the_bit(name: str) -> None:
    codes = layout_of(FORMATS[name]).decode(raw_of(name), FORMATS[name], shape_of(name))
    expected = codes.dequantized()
    assert refusal(FORMATS[name]) is None
    grouped, order = group_codes(codes).in_order()
    assert (order is not None) == (name in ORDERED)
    weight = pack([grouped], torch.float32)
    kept = numbers_of(weight)
    torch.testing.assert_close(kept, expected if order is None else expected[:, order], atol=0, rtol=0)
    bits = 8 * weight.words.nbytes / expected.numel()
    assert bits == packed.bits_kept(FORMATS[name].code), "and padding of whole tiles"


def codes_of(num_out: int, num_in: int, group: int = 32, *, ordered: bool = True) -> Codes:
    """4 bits with zeros."""
    groups = num_out, -(-num_in // group)
    index = None if ordered else torch.randperm(num_in) // group
    return Codes(
        q=torch.randint(16, (num_out, num_in), dtype=torch.uint8),
        code=U4,
        group=Group(1, group),
        scale=Scales(torch.rand(groups)),
        zero=Scales(torch.randint(16, groups, dtype=torch.uint8)),
        index=index,
    )


def layer_of(
    codes: list[Codes | Tensor],
    *,
    split: Split = "out",
    coords: Coords | None = None,
    vocab: int | None = None,
) -> Linear:
    """A layer of matrices [N, K], of which a rank has its share."""
    coords = coords or Coords()
    shapes = [part.q.shape if isinstance(part, Codes) else part.shape for part in codes]
    shares = [-(-out // coords.size) if split == "out" else out for out, _ in shapes]
    inn = shapes[0][1] // (coords.size if split == "in" else 1)
    shape = LinearShape(in_features=inn, out_partitions=tuple(shares), split=split, dtype=torch.float32)
    method = Packed(LayerFormat(layout="gptq", code=U4, group=Group(1, 32)))
    coords = replace(coords, total=vocab)
    weights = {
        name: Weight.of(spec, tuple("abc"[: len(codes)]), (coords,) * len(codes), CPU)
        for name, spec in method.params(shape).items()
    }
    weights["weight"].allocate()
    for part, matrix in enumerate(codes):
        weights["weight"].load(part, matrix)
    layer = Linear(shape, method, weights)
    layer.finish()
    assert not list(layer.parameters()), "raw codes are let go of"
    return layer


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("group", [32, 128, 200])
def test_a_layer_multiplies_its_numbers(group: int, ordered: bool) -> None:
    codes, x = codes_of(70, 200, group, ordered=ordered or group == 200), torch.randn(3, 200)
    close(layer_of([codes])(x), F.linear(x, codes.dequantized()))


def test_merged_matrices_lie_one_below_the_other() -> None:
    """Also where some have zeros that are all alike."""
    parts = [codes_of(48, 96), replace(codes_of(32, 96), zero=Scales(torch.tensor([[8]])))]
    x = torch.randn(3, 96)
    close(layer_of([*parts])(x), F.linear(x, torch.cat([part.dequantized() for part in parts])))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("group", [16, 128])
@pytest.mark.parametrize("split", ["out", "in"])
def test_ranks_have_a_share_each(split: Split, group: int, size: int) -> None:
    """Groups that are cut between ranks become smaller ones."""
    codes, x = codes_of(96, 480, group), torch.randn(3, 480)
    layers = [layer_of([codes], split=split, coords=Coords(rank, size)) for rank in range(size)]
    if split == "out":
        ours = torch.cat([layer(x) for layer in layers], -1)
    else:
        ours = sum(layer(part) for layer, part in zip(layers, x.chunk(size, -1), strict=True))
    assert isinstance(ours, Tensor)
    close(ours, F.linear(x, codes.dequantized()))


def test_one_matrix_may_hold_several() -> None:
    codes, x = codes_of(96, 64), torch.randn(3, 64)
    method = Packed(LayerFormat(layout="gptq", code=U4, group=Group(1, 32)))
    shape = LinearShape(in_features=64, out_partitions=(32, 16), split="out", dtype=torch.float32)
    coords = (Coords(1, 2, piece=Piece(0, 64, 96)), Coords(1, 2, piece=Piece(64, 32, 96)))
    weight = Weight.of(method.params(shape)["weight"], ("a", "a"), coords, CPU)
    weight.allocate()
    assert weight.whole_shape(0) == (96, 64)
    for part in (0, 1):
        weight.load(part, codes)
    layer = Linear(shape, method, {"weight": weight})
    layer.finish()
    expected = codes.dequantized()[[*range(32, 64), *range(80, 96)]]
    close(layer(x), F.linear(x, expected))


def test_shares_of_a_vocabulary_are_filled_up_with_zeros() -> None:
    codes, x = codes_of(50, 64), torch.randn(3, 64)
    layers = [layer_of([codes], coords=Coords(rank, 4), vocab=50) for rank in range(4)]
    ours = torch.cat([layer(x) for layer in layers], -1)
    close(ours, F.pad(F.linear(x, codes.dequantized()), (0, 2)))


BLOCKS = Codes(
    q=torch.randn(70, 96).to(torch.float8_e4m3fn),
    code=E4M3,
    group=Group(32, 64),
    scale=Scales(torch.rand(3, 2)),
)
OTHERS = {
    "blocks of outputs and inputs": BLOCKS,
    "a scale for the matrix": replace(BLOCKS, group=Group(0, 0), scale=Scales(torch.rand(1, 1))),
    "no scale": replace(BLOCKS, scale=None),
    "zeros that are no integers": replace(codes_of(70, 96), zero=Scales(torch.rand(70, 3))),
    "minima": replace(codes_of(70, 96), zero=None, offset=Scales(torch.rand(70, 3))),
    "scales of scales": replace(
        codes_of(70, 96), scale=Scales(torch.randint(63, (70, 3)), torch.rand(70, 1).half())
    ),
    "signed bytes": Codes(
        q=torch.randint(-128, 128, (70, 96), dtype=torch.int8),
        code=S8,
        group=Group(1, 32),
        scale=Scales(torch.rand(70, 3)),
        zero=Scales(torch.randint(-9, 9, (70, 3), dtype=torch.int8)),
    ),
    "six bits": replace(codes_of(70, 96), code=U6, zero=Scales(torch.tensor([[32]]))),
    "a table": Codes(
        q=codes_of(70, 96).q,
        code=LUT4,
        group=Group(1, 32),
        scale=Scales(torch.rand(70, 3)),
        table=torch.randn(16),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_codes_of_other_forms_are_kept(name: str) -> None:
    codes, x = OTHERS[name], torch.randn(3, 96)
    close(layer_of([codes])(x), F.linear(x, codes.dequantized()))


@pytest.mark.parametrize("name", ["uneven groups", "a plain matrix", "groups of eight", "several orders"])
def test_what_cannot_stay_packed_is_decoded_and_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    parts: list[Codes | Tensor] = [codes_of(48, 96)]
    match name:
        case "uneven groups":
            parts = [replace(codes_of(48, 96), index=torch.arange(96) // 60)]
        case "a plain matrix":
            parts = [parts[0], torch.randn(48, 96)]
        case "groups of eight":
            parts = [codes_of(48, 96, 8)]
        case "several orders":
            parts = [codes_of(48, 96, ordered=False), codes_of(48, 96, ordered=False)]
    x = torch.randn(3, 96)
    layer = layer_of(parts)
    plain = [part.dequantized() if isinstance(part, Codes) else part for part in parts]
    close(layer(x), F.linear(x, torch.cat(plain)))
    assert "is decoded" in caplog.text


def test_formats_that_are_no_codes_are_refused() -> None:
    assert refusal(LayerFormat(layout="bitmask", code=PLAIN)) is not None
    assert refusal(LayerFormat(layout="awq", code=U4, group=Group(1, 8))) is not None


def test_a_gpu_unpacks_in_registers_and_a_cpu_says_what_it_costs() -> None:
    def platform(device: str) -> Platform:
        capability = (9, 0) if device == "cuda" else None
        return Platform(
            device=device,  # pyright: ignore[reportArgumentType]
            name=device, memory_total=1, memory_free=1, num_cores=1, capability=capability,
        )  # fmt: skip

    gpu, cpu = (products.packed_product("awq u4, 4 bits", platform(device)) for device in ("cuda", "cpu"))
    assert "unpack" in gpu.multiplier.value and "costs time" in cpu.multiplier.value


@pytest.mark.parametrize(
    "format", ["awq-gemm-g128", "bnb-nf4", "ct-nvfp4", "ct-w8a16", "torchao-float8-weight-only"]
)
def test_dummies_look_like_weights(format: str) -> None:
    shape = LinearShape(in_features=256, out_partitions=(96,), split="out", dtype=torch.float32)
    method = Packed(FORMATS[format])
    weights = {name: Weight.of(spec, ("a",), (Coords(),), CPU) for name, spec in method.params(shape).items()}
    weights["weight"].allocate()
    weights["weight"].fill(torch.Generator().manual_seed(0))
    layer = Linear(shape, method, weights)
    layer.finish()
    y = layer(torch.eye(256))
    assert 0.01 < y.std() < 0.04 and abs(y.mean()) < 0.01
