"""FP8 weights, made while loading and from checkpoints, against plain references and through the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pellucid import LLM, SamplingParams
from pellucid.dist.vocab_share import vocab_share
from pellucid.kernels.products.round_rows import (
    Rounded,
    Rounding,
    round_rows,
    round_rows_ref,
    rounded_bytes_ref,
)
from pellucid.kernels.products.scaled_matmul import scaled_matmul_ref
from pellucid.layers.activation import Act
from pellucid.layers.leaf import PLAIN
from pellucid.layers.linear import Linear
from pellucid.layers.mlp import GatedMLP
from pellucid.layers.norm import NormSpec, RMSNorm
from pellucid.quant import bytes_product
from pellucid.quant import quantization as choice
from pellucid.quant.base import WHOLE, Coords, LinearMethod, LinearShape, Piece, Split, elements
from pellucid.quant.codes import E4M3
from pellucid.quant.fp8 import Fp8, Fp8Format, OutputScales, QuantizedWhenLoaded, inputs_of
from pellucid.quant.unquantized import Unquantized
from tests.models.harness import Harness, load
from tests.quant.layers import make_linear
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

FP8 = torch.float8_e4m3fn
STATIC = Fp8Format(activations="static")
PROMPTS = [[5, 17, 200, 33], [9, 9, 40, 41, 42, 300, 7]]


def fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """x as FP8 with this scale gives it back."""
    return (x * scale.reciprocal()).clamp(-448, 448).to(FP8).double() * scale.double()


def scale_of(x: Tensor, block: int | None = None) -> Tensor:
    """x's own scales, of whole rows or of blocks, as wide as x."""
    blocks = x.abs().split(block or x.shape[-1], dim=-1)
    return torch.cat([each.amax(-1, keepdim=True).expand_as(each) for each in blocks], dim=-1) * (1 / 448)


def reference(
    x: Tensor, weight: Tensor, input_scale: float | None = None, block: int | None = None
) -> Tensor:
    """The product of rounded activations with `weight`, in float64."""
    scale = scale_of(x, block) if input_scale is None else torch.tensor(input_scale)
    return F.linear(fake_quantize(x, scale), weight.double())


def test_rows_are_quantized_to_the_full_range_and_come_back_within_a_sixteenth() -> None:
    x = torch.randn(5, 64) * torch.tensor([[1e-6], [1.0], [50.0], [1e4], [0.0]])
    quantized, scale = rounded_bytes_ref(x, 64)
    assert quantized.dtype == FP8 and scale.shape == (5, 1)
    assert quantized.float().abs().amax(-1)[:4].eq(448).all()
    torch.testing.assert_close(
        quantized.float() * scale, x, rtol=1 / 16, atol=1e-3 * x.abs().max().item() / 448
    )
    assert quantized[4].float().eq(0).all()


@pytest.mark.parametrize(("num_features", "group"), [(64, 64), (64, 16), (70, 32)])
def test_a_group_is_quantized_as_if_it_were_alone(num_features: int, group: int) -> None:
    x = torch.randn(5, num_features) * torch.logspace(-3, 3, num_features)
    quantized, scale = rounded_bytes_ref(x, group)
    for i, part in enumerate(x.split(group, dim=1)):
        alone, own = rounded_bytes_ref(part, part.shape[1])
        assert torch.equal(quantized[:, i * group :][:, : part.shape[1]].float(), alone.float())
        assert torch.equal(scale[:, i : i + 1], own)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_plain_weights_become_fp8_and_the_product_is_exact(num_tokens: int, bias: bool) -> None:
    layer = make_linear(QuantizedWhenLoaded(), torch.float32, bias=bias)
    weight = layer.param("weight").clone()
    layer.finish()
    assert layer.param("weight").dtype == FP8
    x = torch.randn(num_tokens, 96)
    expected = reference(x, fake_quantize(weight, scale_of(weight)))
    expected = expected if layer.bias is None else expected + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-6, rtol=1e-5)


SHARED = [QuantizedWhenLoaded(), *(Fp8(each) for each in (Fp8Format(), STATIC, Fp8Format(block=(32, 32))))]


@pytest.mark.parametrize("index", range(len(SHARED)))
def test_whoever_rounds_the_activations_the_product_is_the_same(index: int) -> None:
    up, down = (make_linear(deepcopy(SHARED[index]), torch.float32) for _ in range(2))
    norm = RMSNorm(nn.Parameter(torch.rand(96)), NormSpec(1e-6), PLAIN)  # type: ignore[arg-type]
    mlp = GatedMLP(up, down, Act("silu"), PLAIN)
    x = torch.randn(5, 96)
    plain, _ = norm(x)
    norm.serve(up)
    for layer in (up, down):
        layer.finish()
    expected = up(plain)
    rounded, _ = norm(x)
    assert isinstance(rounded, Rounded) and rounded.values.dtype == FP8
    assert torch.equal(up(rounded), expected)
    gate_up = torch.randn(5, 192)
    hidden = mlp._gate(gate_up)
    assert isinstance(hidden, Rounded)
    assert torch.equal(down(hidden), down(PLAIN.gated(gate_up, "silu")))


@pytest.mark.parametrize(
    ("method", "is_shared"),
    [*((method, True) for method in SHARED), (Fp8(Fp8Format(block=(48, 48))), False), (Unquantized(), False)],
)
def test_only_groups_of_a_power_of_two_are_rounded_by_who_computes_them(
    method: LinearMethod, is_shared: bool
) -> None:
    assert (make_linear(deepcopy(method), torch.float32).rounding is not None) == is_shared


PARTS = (48, 32)  # outputs of make_linear's two matrices
SCALES = {  # what a checkpoint may bring for each of them, and the same for each output and input
    "a number": [(torch.tensor(0.5), torch.tensor(0.5)), (torch.tensor(3.0), torch.tensor(3.0))],
    "[1]": [(torch.tensor([0.5]), torch.tensor(0.5)), (torch.tensor([3.0]), torch.tensor(3.0))],
    "[N]": [(torch.arange(1.0, n + 1), torch.arange(1.0, n + 1)[:, None]) for n in PARTS],
    "[N, 1]": [(torch.arange(1.0, n + 1)[:, None], torch.arange(1.0, n + 1)[:, None]) for n in PARTS],
}


@pytest.mark.parametrize("input_scale", [None, 0.01])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
def test_merged_parts_keep_their_own_scales_of_any_shape(
    scales: list[tuple[Tensor, Tensor]], input_scale: float | None
) -> None:
    activations = "dynamic" if input_scale is None else "static"
    layer = make_linear(Fp8(Fp8Format(activations=activations)), torch.float32)  # type: ignore[arg-type]
    weight = torch.randn(80, 96).to(FP8)
    layer.param("weight").copy_(weight)
    for part, (stored, _) in enumerate(scales):
        layer.param("weight_scale").load(part, stored)  # type: ignore[attr-defined]
        if input_scale is not None:
            layer.param("input_scale").load(part, torch.tensor([input_scale / (2 - part)]))  # type: ignore[attr-defined]
    layer.finish()
    rows = torch.cat([wide.expand(n, 96) for n, (_, wide) in zip(PARTS, scales, strict=True)])
    x = torch.randn(7, 96) * 3
    expected = reference(x, weight.double() * rows.double(), input_scale)
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("block", [(32, 32), (16, 48), (20, 40)])
def test_scales_of_blocks_may_end_with_smaller_ones(block: tuple[int, int]) -> None:
    layer = make_linear(Fp8(Fp8Format(block=block, scale_name="weight_scale_inv")), torch.float32, bias=True)
    weight = torch.randn(80, 96).to(FP8)
    layer.param("weight").copy_(weight)
    wide = []
    for part, num_outputs in enumerate(PARTS):
        stored = torch.rand(-(-num_outputs // block[0]), -(-96 // block[1])) + 0.1
        layer.param("weight_scale_inv").load(part, stored)  # type: ignore[attr-defined]
        rows = stored.repeat_interleave(block[0], 0)[:num_outputs]
        wide.append(rows.repeat_interleave(block[1], 1)[:, :96])
    layer.finish()
    x = torch.randn(7, 96) * torch.logspace(-2, 2, 96)
    expected = reference(x, weight.double() * torch.cat(wide).double(), block=block[1])
    assert layer.bias is not None
    torch.testing.assert_close(layer(x).double(), expected + layer.bias, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("split", ["out", "in"])
@pytest.mark.parametrize("block", [None, (8, 4), (5, 4)])
@pytest.mark.parametrize("scalar", [False, True])
def test_two_ranks_have_the_scales_of_their_own_weights(
    split: Split, block: tuple[int, int] | None, scalar: bool
) -> None:
    num_outputs, num_inputs = 24, 16
    stored = torch.rand(-(-num_outputs // block[0]), num_inputs // block[1]) if block else torch.rand(24, 1)
    stored = torch.tensor(0.25) if scalar else stored
    parts = []
    for rank in range(2):
        outputs, inputs = (12, 16) if split == "out" else (24, 8)
        sizes = {"in_features": inputs, "out_partitions": (outputs,), "is_part": split == "in"}
        shape = LinearShape(**sizes, split=split, dtype=torch.float32)  # type: ignore[arg-type]
        param = torch.full((outputs, inputs // block[1] if block else 1), torch.nan)
        OutputScales(shape, block)(param, 0, stored, Coords(rank, 2))
        parts.append(param.repeat_interleave(inputs // param.shape[1], dim=1))
    whole = torch.cat(parts, dim=0 if split == "out" else 1)
    if scalar:
        expected = stored.expand(24, 16)
    else:
        rows = stored.repeat_interleave(block[0] if block else 1, dim=0)[:24]
        expected = rows.repeat_interleave(16 // rows.shape[1], dim=1)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("block", [None, (128, 4)])
@pytest.mark.parametrize("vocab,size", [(331, 2), (331, 4), (5, 4)])
def test_ranks_have_the_scales_of_their_shares_of_a_vocabulary(
    vocab: int, size: int, block: tuple[int, int] | None
) -> None:
    share = vocab_share(vocab, size)
    shape = LinearShape(in_features=8, out_partitions=(share,), split="out", dtype=torch.float32)
    stored = torch.rand(-(-vocab // block[0]), 8 // block[1]) if block else torch.rand(vocab, 1)
    parts = [torch.full((share, stored.shape[1]), torch.nan) for _ in range(size)]
    for rank, param in enumerate(parts):
        OutputScales(shape, block)(param, 0, stored, Coords(rank, size, vocab))
    expected = stored.repeat_interleave(block[0], dim=0)[:vocab] if block else stored
    assert torch.equal(torch.cat(parts)[:vocab], expected)


@pytest.mark.parametrize("block", [None, (8, 4), (5, 4)])
def test_pieces_of_a_matrix_have_the_scales_of_their_rows(block: tuple[int, int] | None) -> None:
    """As in Phi-3, whose q, k and v are one matrix."""
    stored = torch.rand(-(-40 // block[0]), 2) if block else torch.rand(40, 1)
    rows = stored.repeat_interleave(block[0], 0)[:40] if block else stored
    sizes, firsts = (12, 4, 4), (0, 24, 32)
    shape = LinearShape(in_features=8, out_partitions=sizes, split="out", dtype=torch.float32)
    for rank in range(2):
        param = torch.full((20, 2 if block else 1), torch.nan)
        for part, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
            coords = Coords(rank, 2, piece=Piece(first, 2 * size, 40))
            OutputScales(shape, block)(param, part, stored, coords)
        mine = [rows[first + rank * size :][:size] for size, first in zip(sizes, firsts, strict=True)]
        assert torch.equal(param, torch.cat(mine))


def test_blocks_that_ranks_cannot_share_out_are_refused_with_the_way_out() -> None:
    shape = LinearShape(in_features=72, out_partitions=(8,), split="in", dtype=torch.float32, is_part=True)
    with pytest.raises(
        ValueError, match=r"blocks of 128 inputs, and each rank gets 72.*another tensor_parallel_size"
    ):
        Fp8(Fp8Format(block=(8, 128))).params(shape)


@pytest.mark.parametrize("share", [192, 96])
def test_blocks_that_ranks_cut_become_smaller_ones(share: int) -> None:
    """Each rank's shares of 384 or, the last one's filled up, of 256 inputs."""
    ranks, total = (2, 384) if share == 192 else (3, 256)
    stored = torch.rand(2, elements(total, 128))
    whole = stored.repeat_interleave(8, 0).repeat_interleave(128, 1)[:, :total]
    shape = LinearShape(
        in_features=share, out_partitions=(16,), split="in", dtype=torch.float32, is_part=True
    )
    cut = inputs_of(shape, (8, 128))
    assert cut == (64 if share == 192 else 32)
    parts = [torch.full((16, share // cut), torch.nan) for _ in range(ranks)]
    for rank, param in enumerate(parts):
        OutputScales(shape, (8, 128))(param, 0, stored, Coords(rank, ranks, total))
    found = torch.cat(parts, 1).repeat_interleave(cut, 1)
    assert torch.equal(found[:, :total], whole) and not found[:, total:].any()


@pytest.mark.parametrize("stored", [torch.ones(79), torch.ones(80, 2), torch.ones(2, 40)])
def test_scales_of_another_shape_are_refused(stored: Tensor) -> None:
    shape = LinearShape(in_features=96, out_partitions=(80,), split="out", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"has shape .*, this model expects \(80"):
        OutputScales(shape, None)(torch.empty(80, 1), 0, stored, Coords())


@dataclass(frozen=True)
class Store:
    """How a checkpoint's projections are stored."""

    per_channel: bool = False
    static: bool = False
    block: tuple[int, int] | None = None
    suffix: str = "_scale"


def native(activations: str = "dynamic", **more: object) -> dict[str, object]:
    return {"quant_method": "fp8", "activation_scheme": activations, **more}


def compressed(strategy: str = "channel", *, static: bool = False, **more: object) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": not static}
    inputs["strategy"] = "tensor" if static else "token"
    if strategy == "block":
        weights["block_structure"] = [16, 8]
        inputs |= {"strategy": "group", "group_size": 8}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def blockwise(x: Tensor, block: tuple[int, int], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """One number for each block of a matrix."""
    rows = [row.split(block[1], dim=1) for row in x.split(block[0], dim=0)]
    return torch.stack([torch.stack([reduce(each) for each in row]) for row in rows])


def spread(scale: Tensor, like: Tensor, block: tuple[int, int] | None) -> Tensor:
    if block is None:
        return scale
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: like.shape[0], : like.shape[1]]


def write_quantized(folder: Path, quantization: dict[str, object], store: Store) -> Path:
    """A tiny checkpoint with FP8 projections, and `plain` beside it: the same numbers in float32."""
    write_checkpoint(folder)
    weights, plain = load_file(folder / "model.safetensors"), {}
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        if store.block:
            scale = blockwise(tensor.abs(), store.block, torch.max) / 448
        else:
            scale = (tensor.abs().amax(-1, keepdim=True) if store.per_channel else tensor.abs().max()) / 448
        wide = spread(scale, tensor, store.block)
        stored[name] = (tensor / wide).to(FP8)
        stored[name + store.suffix] = scale
        plain[name] = stored[name].float() * wide
        if store.static:
            stored[name.replace("weight", "input_scale")] = torch.tensor([0.02])
    write_checkpoint(folder / "plain")
    save_file(plain, folder / "plain" / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_rounded_inputs(harness: Harness, rounded: Callable[[Tensor], Tensor]) -> Harness:
    """The same model, the inputs of whose projections are rounded first: a reference without our FP8 code."""
    for module in harness.built.model.modules():  # type: ignore[attr-defined]
        if isinstance(module, Linear) and module.shape.out_features != 320:
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]), *args[1:]))
    return harness


CHECKPOINTS = {
    "native, dynamic": (native(), Store()),
    "native, static": (native("static"), Store(static=True)),
    "native, a scale for each output": (native(), Store(per_channel=True)),
    "native, blocks": (
        native(weight_block_size=[32, 16]),
        Store(block=(32, 16), suffix="_scale_inv"),
    ),
    "compressed, a scale for each output": (compressed(), Store(per_channel=True)),
    "compressed, a scale for each matrix": (compressed("tensor"), Store()),
    "compressed, static": (compressed("tensor", static=True), Store(static=True)),
    "compressed, blocks": (compressed("block"), Store(block=(16, 8))),
}


@pytest.mark.parametrize(("quantization", "store"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_checkpoint_computes_what_its_numbers_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: dict[str, object], store: Store
) -> None:
    """Exactly so in float32; where FP8 is multiplied, with activations rounded as the checkpoint says."""
    folder = write_quantized(tmp_path, quantization, store)
    work = dict(enumerate(PROMPTS))
    exact, wanted = (
        Harness(load(path, max_model_len=64), num_seqs=2, max_len=64).step(work)
        for path in (folder, folder / "plain")
    )
    torch.testing.assert_close(exact, wanted, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(choice, "served_codes", lambda platform, dtype: frozenset({E4M3}))

    def rounded(x: Tensor) -> Tensor:
        scale = torch.tensor(0.02) if store.static else scale_of(x, store.block and store.block[1])
        return fake_quantize(x, scale).float()

    ours = Harness(load(folder, max_model_len=64), num_seqs=2, max_len=64)
    plain = Harness(load(folder / "plain", max_model_len=64), num_seqs=2, max_len=64)
    plain = with_rounded_inputs(plain, rounded)
    for logits, expected in zip(ours.step(work), plain.step(work), strict=True):
        # Sums in another order may round an activation the other way, which is a sixteenth of it.
        assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("name", ["native, static", "native, blocks"])
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    folder = write_quantized(tmp_path, *CHECKPOINTS[name])
    prompts = [[(7 * i + 31 * j) % 319 + 1 for j in range(20)] for i in range(20)]
    tokens = []
    for size in (1, 2):
        options = {"dtype": "float32", "device": "cpu", "block_size": 16, "tensor_parallel_size": size}
        with LLM(str(folder), **options) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids[0] for output in outputs])
    assert tokens[0] == tokens[1]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_hardware_product_is_the_exact_one_within_bfloat16(num_tokens: int, dtype: torch.dtype) -> None:
    layer = make_linear(QuantizedWhenLoaded(), dtype, bias=True, device="cuda")
    weight = layer.param("weight").float()
    layer.finish()
    x = torch.randn(num_tokens, 96, device="cuda").to(dtype)
    expected = reference(x.float(), fake_quantize(weight, scale_of(weight)))
    assert layer.bias is not None
    torch.testing.assert_close(layer(x).double(), expected + layer.bias, atol=1e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "format", [Fp8Format(activations="static"), Fp8Format(block=(32, 32)), Fp8Format(block=(20, 40))], ids=str
)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_hardware_product_of_a_checkpoint_is_that_of_a_cpu(
    num_tokens: int, format: Fp8Format, dtype: torch.dtype
) -> None:
    layers = [make_linear(Fp8(format), dtype, bias=True, device=device) for device in ("cpu", "cuda")]
    for ours, theirs in zip(layers[1].parameters(), layers[0].parameters(), strict=True):
        ours.data.copy_(theirs.data)
    for layer in layers:
        layer.finish()
    x = torch.randn(num_tokens, 96).to(dtype)
    expected, ours = layers[0](x), layers[1](x.cuda()).cpu()
    torch.testing.assert_close(
        ours, expected, atol=0.02 * expected.abs().mean().item() if num_tokens else 0, rtol=2e-2
    )


def test_scales_of_blocks_lie_as_the_vendors_product_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes_product, "knows_blocks", lambda device: True)
    weight = torch.zeros(384, 1024, dtype=torch.float8_e4m3fn)
    blocks = torch.rand(3, 8)
    made = bytes_product.scales_of_blocks(weight, blocks.repeat_interleave(128, 0))
    assert made is not None and torch.equal(made, blocks) and made.stride() == (8, 1)
    assert bytes_product.scales_of_blocks(weight, torch.rand(384, 8)) is None


@pytest.mark.parametrize("num_rows", [160, 163])
def test_rows_for_the_vendors_product_are_whole_sixteens(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    def product(x: Tensor, weight: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: object) -> Tensor:
        assert len(x) % 16 == 0 and scale_a.stride() == (1, len(x)), scale_a.stride()
        wide = scale_b.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (x.float() * scale_a.repeat_interleave(128, 1)) @ (weight.t().float() * wide).t()

    monkeypatch.setattr(torch, "_scaled_mm", product)
    x = round_rows_ref(torch.randn(num_rows, 256), Rounding(128))
    weight, blocks = torch.randn(384, 256).to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5
    y = bytes_product.multiply_blocks(x, weight, blocks)
    scales = blocks.repeat_interleave(128, 0)
    expected = scaled_matmul_ref(x.values, x.scales, weight, scales, block=128, dtype=torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [130, 256, 1001])
def test_the_vendors_product_of_blocks_matches(num_rows: int) -> None:
    if not bytes_product.knows_blocks(torch.device("cuda")):
        pytest.skip("this GPU or torch has no such product")
    x = round_rows(torch.randn(num_rows, 1536, device="cuda").bfloat16(), Rounding(128))
    weight = torch.randn(384, 1536, device="cuda").to(torch.float8_e4m3fn)
    scale = (torch.rand(3, 12, device="cuda") + 0.5).repeat_interleave(128, 0)
    blocks = bytes_product.scales_of_blocks(weight, scale)
    assert blocks is not None
    y = bytes_product.multiply_blocks(x, weight, blocks).float()
    expected = scaled_matmul_ref(x.values, x.scales, weight, scale, block=128, dtype=torch.float32)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_scales_of_bytes_are_powers_of_two() -> None:
    shape = LinearShape(in_features=64, out_partitions=(64,), split="out", dtype=torch.bfloat16)
    scales = torch.tensor([[1.0, 0.25], [8.0, 2.0]])
    expected, found = torch.zeros(64, 2), torch.zeros(64, 2)
    place = OutputScales(shape, (32, 32))
    place(expected, 0, scales, WHOLE)
    place(found, 0, scales.to(torch.float8_e8m0fnu).view(torch.uint8), WHOLE)
    assert torch.equal(found, expected) and float(found.max()) == 8
