"""FP8 weights, made while loading and from checkpoints, against plain references and through the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from pellucid import LLM, SamplingParams
from pellucid.layers.linear import Linear
from pellucid.quant.base import choose_scheme
from pellucid.quant.compressed_tensors import CompressedTensorsScheme
from pellucid.quant.fp8 import Fp8, Fp8Scheme, QuantizedWhenLoaded, quantize_rows
from pellucid.quant.unquantized import Unquantized
from tests.models.harness import Harness, load
from tests.quant.layers import make_linear
from tests.tiny import write_checkpoint

FP8 = torch.float8_e4m3fn
PROMPTS = [[5, 17, 200, 33], [9, 9, 40, 41, 42, 300, 7]]


def fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """x as FP8 with this scale gives it back."""
    return (x / scale).clamp(-448, 448).to(FP8).double() * scale.double()


def reference(x: Tensor, weight: Tensor, input_scale: float | None = None) -> Tensor:
    """The product of rounded activations with `weight`, in float64."""
    scale = x.abs().amax(-1, keepdim=True) / 448 if input_scale is None else torch.tensor(input_scale)
    return F.linear(fake_quantize(x, scale), weight.double())


def test_rows_are_quantized_to_the_full_range_and_come_back_within_a_sixteenth() -> None:
    x = torch.randn(5, 64) * torch.tensor([[1e-6], [1.0], [50.0], [1e4], [0.0]])
    quantized, scale = quantize_rows(x)
    assert quantized.dtype == FP8 and scale.shape == (5, 1)
    assert quantized.float().abs().amax(-1)[:4].eq(448).all()
    torch.testing.assert_close(
        quantized.float() * scale, x, rtol=1 / 16, atol=1e-3 * x.abs().max().item() / 448
    )
    assert quantized[4].float().eq(0).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_plain_weights_become_fp8_and_the_product_is_exact(num_tokens: int, bias: bool) -> None:
    layer = make_linear(QuantizedWhenLoaded(), torch.float32, bias=bias)
    weight = layer.param("weight").clone()
    layer.finish()
    assert layer.param("weight").dtype == FP8
    x = torch.randn(num_tokens, 96)
    expected = reference(x, fake_quantize(weight, weight.abs().amax(-1, keepdim=True) / 448))
    expected = expected if layer.bias is None else expected + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("input_scale", [None, 0.01])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_merged_parts_keep_their_own_scales(per: str, input_scale: float | None) -> None:
    layer = make_linear(Fp8(per, "dynamic" if input_scale is None else "static"), torch.float32)  # type: ignore[arg-type]
    weight = torch.randn(80, 96).to(FP8)
    layer.param("weight").copy_(weight)
    scales = torch.tensor([0.5, 3.0]) if per == "tensor" else torch.rand(80, 1)
    layer.param("weight_scale").copy_(scales)
    if input_scale is not None:
        layer.param("input_scale").copy_(torch.tensor([input_scale / 2, input_scale]))
    layer.finish()
    rows = torch.tensor([[0.5]] * 48 + [[3.0]] * 32) if per == "tensor" else scales
    x = torch.randn(7, 96) * 3
    expected = reference(x, weight.double() * rows.double(), input_scale)
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-4, rtol=1e-5)


def native(activations: str = "dynamic", **more: object) -> dict[str, object]:
    return {"quant_method": "fp8", "activation_scheme": activations, **more}


def compressed(strategy: str = "channel", *, static: bool = False, **more: object) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": not static}
    inputs["strategy"] = "tensor" if static else "token"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def write_quantized(
    folder: Path, quantization: dict[str, object], *, per_channel: bool, static: bool
) -> Path:
    """A tiny checkpoint with FP8 projections, and `plain` beside it: the same numbers in float32."""
    write_checkpoint(folder)
    weights, plain = load_file(folder / "model.safetensors"), {}
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        biggest = tensor.abs().amax(-1, keepdim=True) if per_channel else tensor.abs().max()
        scale = biggest / 448
        stored[name] = (tensor / scale).to(FP8)
        stored[name + "_scale"] = scale
        plain[name] = stored[name].float() * scale
        if static:
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
    "native, dynamic": (native(), False, False),
    "native, static": (native("static"), False, True),
    "compressed, a scale for each output": (compressed(), True, False),
    "compressed, a scale for each matrix": (compressed("tensor"), False, False),
    "compressed, static": (compressed("tensor", static=True), False, True),
}


@pytest.mark.parametrize(
    ("quantization", "per_channel", "static"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys()
)
def test_a_checkpoint_computes_what_its_numbers_say(
    tmp_path: Path, quantization: dict[str, object], per_channel: bool, static: bool
) -> None:
    folder = write_quantized(tmp_path, quantization, per_channel=per_channel, static=static)

    def rounded(x: Tensor) -> Tensor:
        scale = torch.tensor(0.02) if static else x.abs().amax(-1, keepdim=True) / 448
        return fake_quantize(x, scale).float()

    ours = Harness(load(folder, max_model_len=64), num_seqs=2, max_len=64)
    plain = Harness(load(folder / "plain", max_model_len=64), num_seqs=2, max_len=64)
    plain = with_rounded_inputs(plain, rounded)
    work = dict(enumerate(PROMPTS))
    for logits, expected in zip(ours.step(work), plain.step(work), strict=True):
        # Sums in another order may round an activation the other way, which is a sixteenth of it.
        assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


@pytest.mark.parametrize(
    ("quantization", "prefixes", "merged"),
    [
        (native(ignored_layers=["model.layers.0.mlp.up_proj"]), ("gate_proj", "up_proj"), False),
        (native(ignored_layers=["model.layers.0.mlp"]), ("gate_proj", "up_proj"), True),
        (compressed(ignore=["re:.*up_proj"]), ("gate_proj", "up_proj"), False),
        (compressed(ignore=["re:.*mlp.*"]), ("gate_proj", "up_proj"), True),
    ],
)
def test_ignored_layers_stay_plain_and_are_not_merged_with_others(
    quantization: dict[str, object], prefixes: tuple[str, ...], merged: bool
) -> None:
    scheme = choose_scheme({"quantization_config": quantization})
    paths = tuple(f"model.layers.0.mlp.{prefix}" for prefix in prefixes)
    method = scheme.method(paths, "linear")
    assert isinstance(method, Unquantized) if merged else method is None
    assert isinstance(scheme.method(("model.layers.0.self_attn.o_proj",), "linear"), Fp8)


def test_the_config_chooses_the_scheme() -> None:
    assert isinstance(choose_scheme({"quantization_config": native()}), Fp8Scheme)
    assert isinstance(choose_scheme({"quantization_config": compressed()}), CompressedTensorsScheme)
    assert isinstance(choose_scheme({}, "fp8").method(("a",), "linear"), QuantizedWhenLoaded)
    assert isinstance(choose_scheme({}, "fp8").method(("lm_head",), "head"), Unquantized)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (native(weight_block_size=[128, 128]), r"weight_block_size in config.json is \[128, 128\]"),
        (native("sometimes"), "activation_scheme .*'sometimes'"),
        (compressed("block"), "a weight scale for each 'block'"),
        (compressed() | {"format": "pack-quantized"}, "format 'pack-quantized'"),
        (compressed() | {"config_groups": {}}, "0 config_groups"),
        (compressed() | {"config_groups": 3}, "holds 3 where an object must stand"),
        (
            compressed() | {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}}},
            "weights of type 'int' with 8 bits",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(quantization: Mapping[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_scheme({"quantization_config": quantization})


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_quantized_checkpoint_is_not_quantized_again(name: str) -> None:
    with pytest.raises(ValueError, match=f"quantization is '{name}'.*stored as 'compressed-tensors'"):
        choose_scheme({"quantization_config": compressed()}, name)


def test_an_fp8_checkpoint_runs_through_the_engine_as_fp8(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, compressed(), per_channel=True, static=False)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), dtype="float32", device="cpu", block_size=16) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 12]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_the_hardware_product_is_the_exact_one_within_bfloat16(num_tokens: int) -> None:
    layer = make_linear(QuantizedWhenLoaded(), torch.bfloat16, bias=True, device="cuda")
    weight = layer.param("weight").float()
    layer.finish()
    x = torch.randn(num_tokens, 96, device="cuda").bfloat16()
    expected = reference(x.float(), fake_quantize(weight, weight.abs().amax(-1, keepdim=True) / 448))
    assert layer.bias is not None
    torch.testing.assert_close(layer(x).double(), expected + layer.bias, atol=1e-2, rtol=2e-2)
