"""Checkpoints whose matrices are codes that no method multiplies: they compute what their numbers say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.models.build import BuildOptions, make_context
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.loader import open_source
from pellucid.models.registry import MODELS
from pellucid.quant.codes import U4, Codes, Group, Scales
from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import LayerFormat, Writes
from tests.models.conftest import CONFIG, Folder
from tests.models.harness import CPU, Harness, load, num_codes

GROUP = Group(1, 8)


def rounded(weight: Tensor) -> Codes:
    """Four bits, a scale and a zero for each eight inputs."""
    groups = weight.float().unflatten(1, (-1, 8))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15).to(torch.uint8)
    q = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return Codes(q=q.flatten(1).to(torch.uint8), code=U4, group=GROUP, scale=Scales(scale), zero=Scales(zero))


def in_act_order(weight: Tensor) -> Codes:
    """The same of inputs in another order, as GPTQ leaves them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    codes = rounded(weight[:, order])
    back = order.argsort()
    return Codes(
        q=codes.q[:, back],
        code=U4,
        group=GROUP,
        scale=codes.scale,
        zero=codes.zero,
        index=(torch.arange(weight.shape[1]) // 8)[back],
    )


GPTQ: dict[str, object] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 8,
    "sym": False,
    "desc_act": False,
}
CHECKPOINTS: dict[str, tuple[Mapping[str, object], LayerFormat, Callable[[Tensor], Codes]]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"},
        LayerFormat(layout="awq", code=U4, group=GROUP),
        rounded,
    ),
    "gptq": (GPTQ, LayerFormat(layout="gptq", code=U4, group=GROUP), rounded),
    "gptq, act-order": (
        GPTQ | {"desc_act": True},
        LayerFormat(layout="gptq", code=U4, group=GROUP, options=frozenset({"act_order"})),
        in_act_order,
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": False,
                        "strategy": "group",
                        "group_size": 8,
                    },
                }
            },
            "ignore": ["lm_head"],
        },
        LayerFormat(layout="ct-pack", code=U4, group=GROUP, options=frozenset({"asym"})),
        rounded,
    ),
}


def encoded(codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
    """The tensors that hold them, by suffix."""
    layout = layout_of(format)
    assert isinstance(layout, Writes)
    return layout.encode(codes, format)


def write_coded(folder: Folder, name: str) -> tuple[Path, Path]:
    """A folder with codes, and one with the same numbers as plain weights."""
    quantization, format, quantize = CHECKPOINTS[name]
    coded, plain = dict(folder.tensors), dict(folder.tensors)
    for key, weight in folder.tensors.items():
        if key.endswith("_proj.weight"):
            codes, path = quantize(weight), key.removesuffix(".weight")
            joint = layout_of(format).joint
            del coded[key]
            plain[key] = codes.dequantized()
            for suffix, tensor in encoded(codes, format).items():
                coded[f"{path}{joint}{suffix}"] = tensor.contiguous().clone()
    paths = folder.path / "coded", folder.path / "plain"
    configs = folder.config | {"quantization_config": quantization}, folder.config
    for path, config, tensors in zip(paths, configs, (coded, plain), strict=True):
        path.mkdir()
        Folder(path, config, tensors).write()
    return paths


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_codes_compute_what_their_numbers_say(folder: Folder, name: str) -> None:
    work = {0: [1, 2, 3, 7], 1: [40, 5]}
    coded, plain = (
        Harness(load(path, max_model_len=64), num_seqs=2, max_len=16).step(work)
        for path in write_coded(folder, name)
    )
    for ours, expected in zip(coded, plain, strict=True):
        assert torch.equal(ours, expected)


def test_the_config_may_lie_beside_config_json(folder: Folder) -> None:
    coded, plain = write_coded(folder, "gptq")
    config = json.loads((coded / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "quantize_config.json").write_text(json.dumps(quantization))
    ours, expected = (
        Harness(load(path, max_model_len=64), num_seqs=1, max_len=16).step({0: [1, 2]})
        for path in (coded, plain)
    )
    assert torch.equal(ours[0], expected[0])


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("qweight", r"missing: model.layers.0.mlp.up_proj.weight"),
        ("scales", r"lacks model.layers.0.mlp.up_proj.scales, which awq has"),
    ],
)
def test_lost_tensors_of_a_matrix_are_named(folder: Folder, lost: str, words: str) -> None:
    coded, _ = write_coded(folder, "awq")
    tensors = torch_files(coded)
    for suffix in ("qweight", "qzeros", "scales") if lost == "qweight" else (lost,):
        del tensors[f"model.layers.0.mlp.up_proj.{suffix}"]
    (coded / "again").mkdir()
    config = json.loads((coded / "config.json").read_text())
    with pytest.raises(ValueError, match=words):
        load(Folder(coded / "again", config, tensors).write(), max_model_len=64)


def changed(coded: Path, tensors: dict[str, Tensor], **quantization: object) -> Path:
    """The folder with more or other tensors, and entries of its quantization config."""
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] |= quantization
    (coded / "again").mkdir(exist_ok=True)
    return Folder(coded / "again", config, torch_files(coded) | tensors).write()


def test_scales_that_are_no_numbers_are_told(folder: Folder) -> None:
    coded, _ = write_coded(folder, "compressed-tensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    scales = torch_files(coded)[name]
    scales[3, 1] = torch.inf
    with pytest.raises(ValueError, match=r"layers.0.mlp.up_proj.*ct-pack: its scales are not all finite"):
        load(changed(coded, {name: scales}), max_model_len=64)


def test_tensors_that_a_config_denies_are_told(folder: Folder) -> None:
    coded, _ = write_coded(folder, "compressed-tensors")
    groups = json.loads((coded / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["symmetric"] = True
    with pytest.raises(ValueError, match=r"q_proj.* has weight_zero_point beside it, of which the config"):
        load(changed(coded, {}, config_groups=groups), max_model_len=64)
    name = "model.layers.0.mlp.up_proj.pre_quant_scale"
    with pytest.raises(ValueError, match=r"up_proj.* has pre_quant_scale beside it"):
        load(changed(coded, {name: torch.ones(16)}), max_model_len=64)
    name = "model.layers.0.mlp.up_proj.weight_g_idx"
    load(changed(coded, {name: torch.zeros(16)}), max_model_len=64)  # as tools write what is not there


def test_biases_of_old_tools_are_zeros_or_refused(folder: Folder) -> None:
    """AutoGPTQ and others wrote one for every matrix."""
    coded, plain = write_coded(folder, "gptq")
    tensors, config = torch_files(coded), json.loads((coded / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj.bias"
    tensors[name] = torch.zeros(len(folder.tensors["model.layers.0.mlp.up_proj.weight"]))
    (coded / "zeros").mkdir()
    (coded / "ones").mkdir()
    ours, expected = (
        Harness(load(path, max_model_len=64), num_seqs=1, max_len=16).step({0: [1, 2]})
        for path in (Folder(coded / "zeros", config, tensors).write(), plain)
    )
    assert torch.equal(ours[0], expected[0])
    tensors[name] += 1
    with pytest.raises(ValueError, match=f"no use for these tensors: {name}"):
        load(Folder(coded / "ones", config, tensors).write(), max_model_len=64)


def torch_files(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {key: tensor for file in path.glob("*.safetensors") for key, tensor in load_file(file).items()}


def test_torchs_own_files_are_read_and_nothing_else_in_them(folder: Folder) -> None:
    written = folder.write()
    expected = Harness(load(written, max_model_len=64), num_seqs=1, max_len=16).step({0: [1, 2]})
    tensors = torch_files(written)
    for file in written.glob("*.safetensors*"):
        file.unlink()
    torch.save(tensors, written / "pytorch_model.bin")
    for load_format in ("auto", "pt"):
        built = load(written, max_model_len=64, load_format=load_format)
        (ours,) = Harness(built, num_seqs=1, max_len=16).step({0: [1, 2]})
        assert torch.equal(ours, expected[0])
    torch.save({**tensors, "lm_head.weight": print}, written / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin cannot be read as tensors alone.*safetensors"):
        load(written, max_model_len=64)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_codes_that_stay_packed_compute_the_same(
    folder: Folder, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, whose kernels' stand-in is torch's product of the numbers."""
    monkeypatch.setattr("pellucid.quant.quantization.packs_codes", lambda *_: True)
    monkeypatch.setattr("pellucid.quant.packed.LEAST_GROUP", 8)
    monkeypatch.setattr("pellucid.kernels.packed.packed_weight.LEAST_GROUP", 8)
    caplog.set_level("INFO")
    work = {0: [1, 2, 3, 7], 1: [40, 5]}
    before = num_codes()
    harnesses = [
        Harness(load(path, max_model_len=64, show_progress=True), num_seqs=2, max_len=16)
        for path in write_coded(folder, name)
    ]
    ours, expected = (harness.step(work) for harness in harnesses)
    assert num_codes() == before, "beside what is packed of them"
    assert "kept at 6.00 bits" in caplog.text or "kept at 8.00 bits" in caplog.text
    assert "decoded" not in caplog.text
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "in_files", "in_config", "ours"),
    [
        ("Gemma3ForConditionalGeneration", "language_model.model.{}", "model.language_model.{}", "model.{}"),
        ("Gemma3ForConditionalGeneration", "model.language_model.{}", "language_model.model.{}", "model.{}"),
        ("Llama4ForConditionalGeneration", *["language_model.model.{}"] * 2, "model.{}"),
        (
            *("MixtralForCausalLM", "model.{}.block_sparse_moe.experts.0.w2"),
            *("model.{}.block_sparse_moe.experts.0.w2", "model.{}.mlp.experts.0.down_proj"),
        ),
    ],
)
def test_configs_name_matrices_as_checkpoints_do_or_their_classes(
    architecture: str, in_files: str, in_config: str, ours: str, tmp_path: Path
) -> None:
    plain, coded = "layers.0", "layers.1"
    tensors = {f"{in_files.format(layer)}.weight": torch.zeros(2) for layer in (plain, coded)}
    quantization = {**CHECKPOINTS["compressed-tensors"][0], "ignore": [in_config.format(plain)]}
    folder = Folder(tmp_path, CONFIG | {"quantization_config": quantization}, tensors).write()
    checkpoint, family = Checkpoint.open(ModelConfig(model=str(folder))), MODELS.load(architecture)
    source = open_source(checkpoint, family.rename)
    options = BuildOptions(dtype=torch.bfloat16, device=torch.device("cpu"), block_size=16, max_model_len=64)
    stored = make_context(checkpoint, source, {}, CPU, options).quantization.stored
    assert stored(ours.format(plain), "linear") is None
    assert stored(ours.format(coded), "linear") is not None
