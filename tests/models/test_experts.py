"""Experts that checkpoints hold in codes, of all in one tensor or of each; and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pellucid.cli.main import main
from pellucid.layers.experts import Experts
from pellucid.models.build import BuiltModel
from pellucid.native.library import library
from pellucid.quant import quantization
from pellucid.quant.codes import E2M1, E2M1_NUMBERS, Codes, Group, Scales
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.native_experts import NativeExperts
from pellucid.quant.online import FORMATS
from pellucid.quant.rounding import rounded as codes_of
from tests.models.harness import Harness, load, num_codes
from tests.models.test_coded import GPTQ, encoded, rounded

transformers = pytest.importorskip("transformers")
MX_EXPERTS = LayerFormat(layout="mx-experts", code=E2M1, group=Group(1, 32))
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}},
}  # fmt: skip
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def save_model(
    folder: Path, *, one_by_one: bool, hidden: int = 32, heads: tuple[int, int] = (2, 1)
) -> dict[str, Tensor]:
    """A random Qwen3-MoE; its tensors."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=16,
        moe_intermediate_size=hidden,
        num_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder, save_original_format=one_by_one)
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor], quantization: Mapping[str, object] | None) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    file.write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def mxfp4(weight: Tensor) -> Codes:
    """The nearest numbers of four bits, with a power of two for each 32 inputs."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    table = torch.tensor(E2M1_NUMBERS)
    q = (groups[..., None] / exponent.exp2()[..., None, None] - table).abs().argmin(-1).to(torch.uint8)
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Codes(q=q.flatten(-2), code=E2M1, group=MX_EXPERTS.group, scale=Scales(scale))


def mixtures_of(built: BuiltModel) -> list[Experts]:
    assert isinstance(built.model, torch.nn.Module)
    return [layer for layer in built.model.modules() if isinstance(layer, Experts)]


def logits_of(folder: Path) -> Tensor:
    return Harness(load(folder, max_model_len=32), num_seqs=1, max_len=32).step({0: TOKENS})[0]


PACKS = pytest.mark.parametrize("packs", [False, True], ids=["decoded", "packed"])


def let_pack(monkeypatch: pytest.MonkeyPatch, *, packs: bool) -> None:
    """As on a GPU: codes of experts stay codes."""
    monkeypatch.setattr(quantization, "packs_codes", lambda platform, dtype: packs)


def assert_alike(actual: Tensor, expected: Tensor, *, packs: bool) -> None:
    """Of codes that are kept numbers are the same, and sums are of whole tiles."""
    torch.testing.assert_close(actual, expected, rtol=1e-4 * packs, atol=1e-5 * packs)


@PACKS
def test_mxfp4_experts_compute_what_their_numbers_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    plain = save_model(tmp_path, one_by_one=False)
    coded: dict[str, Tensor] = {}
    for name, tensor in list(plain.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes = mxfp4(tensor)
            plain[name] = codes.dequantized()
            written = encoded(codes, MX_EXPERTS)
            coded |= {f"{name}_{suffix}": part for suffix, part in written.items()}
        else:
            coded[name] = tensor
    assert len(coded) == len(plain) + 4
    rewrite(tmp_path, plain, None)
    expected = logits_of(tmp_path)
    rewrite(tmp_path, coded, {"quant_method": "mxfp4"})
    let_pack(monkeypatch, packs=packs)
    assert_alike(logits_of(tmp_path), expected, packs=packs)


@PACKS
def test_experts_in_codes_one_by_one_do_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    plain = save_model(tmp_path, one_by_one=True)
    format = LayerFormat(layout="gptq", code=rounded(torch.zeros(1, 8)).code, group=Group(1, 8))
    coded: dict[str, Tensor] = {}
    for name, tensor in list(plain.items()):
        if ".experts." in name:
            codes = rounded(tensor)
            plain[name] = codes.dequantized()
            written = encoded(codes, format)
            coded |= {name.replace("weight", suffix): part for suffix, part in written.items()}
        else:
            coded[name] = tensor
    rewrite(tmp_path, plain, None)
    expected = logits_of(tmp_path)
    dense = {r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}}
    rewrite(tmp_path, coded, GPTQ | {"dynamic": dense})
    let_pack(monkeypatch, packs=packs)
    assert_alike(logits_of(tmp_path), expected, packs=packs)


@pytest.mark.parametrize("way", ["fp8", "int8", "int4", "nf4", "mxfp4"])
def test_plain_experts_are_rounded_while_they_load(tmp_path: Path, way: str) -> None:
    plain = save_model(tmp_path, one_by_one=True)
    kept = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    format = FORMATS[way]
    of = {name: format(tensor.shape[1]) for name, tensor in plain.items() if name not in kept}
    rewrite(tmp_path, kept | {n: codes_of(plain[n], f).dequantized() for n, f in of.items()}, None)
    expected = logits_of(tmp_path)
    rewrite(tmp_path, plain, None)
    asked = json.dumps({"experts": way})
    built = load(tmp_path, max_model_len=32, quantization=asked)
    actual = Harness(built, num_seqs=1, max_len=32).step({0: TOKENS})[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    mixtures = mixtures_of(built)
    assert all(list(layer.parameters(recurse=False)) == [] for layer in mixtures), "plain matrices are gone"


@pytest.mark.parametrize("stored", [True, False, None])
def test_native_code_mixes_codes_as_files_have_them_and_as_they_are_rounded_and_none(
    tmp_path: Path, stored: bool | None
) -> None:
    """In bfloat16, beside the codes' numbers in float32."""
    if library() is None:
        pytest.skip("no native code here")
    plain = save_model(tmp_path, one_by_one=True)
    numbers, coded = dict(plain), dict(plain)
    for name in [name for name in plain if ".experts." in name and stored is not None]:
        format = FORMATS["int8" if stored else "int4"](plain[name].shape[1])
        codes = codes_of(plain[name], format)
        numbers[name] = codes.dequantized()
        if stored:
            del coded[name]
            written = encoded(codes, format)
            coded |= {name.replace("weight", suffix): part for suffix, part in written.items()}
    rewrite(tmp_path, numbers, None)
    expected = logits_of(tmp_path)
    rewrite(tmp_path, coded, INT8 if stored else None)
    asked, before = "int4" if stored is False else None, num_codes()
    built = load(tmp_path, max_model_len=32, dtype=torch.bfloat16, quantization=asked)
    mixtures = mixtures_of(built)
    assert num_codes() == before, "beside what is packed of them"
    assert all(isinstance(layer._kept, NativeExperts) for layer in mixtures)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    actual = Harness(built, num_seqs=1, max_len=32).step({0: TOKENS})[0]
    error = (actual.float() - expected).abs().max() / expected.abs().max()
    assert error < (0.15 if stored is False else 0.05), error


@pytest.mark.parametrize("one_by_one", [True, False])
def test_experts_are_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_by_one: bool) -> None:
    save_model(tmp_path, one_by_one=one_by_one)
    assert main(["inspect", str(tmp_path), "--json", "--device", "cpu"]) == 0
    rows = {row["names"]: row for row in json.loads(capsys.readouterr().out)["matrices"]}
    name = "gate_proj, up_proj of experts" if one_by_one else "gate_up_proj of experts"
    assert rows[name]["num_weights"] == 2 * 3 * 2 * 32 * 32
    assert rows[name]["served"] == "float32: torch's products, of the experts that are hit"
    assert rows[name]["bits"] == 32


def test_experts_that_cannot_stay_packed_are_decoded_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them is plain, in a layer that is said to be in codes."""
    plain = save_model(tmp_path, one_by_one=True)
    expected = logits_of(tmp_path)
    matrices = [name for name in plain if ".experts." in name]
    coded = {name: tensor for name, tensor in plain.items() if name not in matrices[1:]}
    for name in matrices[1:]:
        written = encoded(codes_of(plain[name], FORMATS["int8"](plain[name].shape[1])), FORMATS["int8"](32))
        coded |= {name.replace("weight", suffix): part for suffix, part in written.items()}
    rewrite(tmp_path, coded, INT8)
    let_pack(monkeypatch, packs=True)
    actual = logits_of(tmp_path)
    assert "experts are decoded: some are stored as plain numbers" in caplog.text
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


def test_padding_of_a_step_reads_no_expert(tmp_path: Path) -> None:
    save_model(tmp_path, one_by_one=True)
    harness = Harness(load(tmp_path, max_model_len=32), num_seqs=1, max_len=32)
    fwd = harness.inputs({0: TOKENS})
    mixture = mixtures_of(harness.built)[0]
    x = torch.randn(len(TOKENS), 32)
    whole = mixture(x, fwd)
    fwd.cu_seqlens_q[-1] = 5
    chosen = mixture.router(x, fwd)
    assert (chosen.ids[5:] == 3).all() and (chosen.ids[:5] < 3).all()
    padded = mixture(x, fwd)
    assert torch.equal(padded[:5], whole[:5]) and not padded[5:].any()


def test_a_dummys_tokens_are_spread_evenly_and_go_the_same_ways_again(tmp_path: Path) -> None:
    save_model(tmp_path, one_by_one=True)
    built = load(tmp_path, max_model_len=256, load_format="dummy")
    harness = Harness(built, num_seqs=1, max_len=256)
    fwd = harness.inputs({0: [7] * 200})
    routers = [layer.router for layer in mixtures_of(built)]
    x = torch.ones(200, 32)
    first, second = (router(x, fwd).ids for router in routers)
    assert torch.equal(first, routers[0](x, fwd).ids) and not torch.equal(first, second)
    assert first.flatten().bincount(minlength=3).min() > 100
