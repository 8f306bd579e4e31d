"""Which method serves which stored format, and what is said of names that none serves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from pellucid.platform import Platform
from pellucid.quant.base import LinearShape
from pellucid.quant.fp8 import Fp8, QuantizedWhenLoaded
from pellucid.quant.int8 import Int8
from pellucid.quant.packed import Packed
from pellucid.quant.quantization import Quantization, choose_quantization
from pellucid.quant.schemes.base import StoredConfig
from pellucid.quant.unquantized import Unquantized

CPU = Platform(device="cpu", name="CPU", memory_total=1 << 33, memory_free=1 << 33, num_cores=1)
GPU = Platform(
    device="cuda", name="a GPU", memory_total=1 << 33, memory_free=1 << 33, num_cores=1, capability=(9, 0)
)
SHAPE = LinearShape(in_features=64, out_partitions=(32, 32), split="out", dtype=torch.bfloat16)
PATHS = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
INTEGERS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}


def chosen(
    quantization: Mapping[str, object] | None,
    name: str | None = None,
    *,
    platform: Platform = GPU,
    dtype: torch.dtype = torch.bfloat16,
) -> Quantization:
    stored = StoredConfig(config={"quantization_config": quantization})
    return choose_quantization(stored, name, platform, dtype)


@pytest.mark.parametrize(
    ("quantization", "name", "expected"),
    [
        (None, None, Unquantized),
        (None, "none", Unquantized),
        (None, "fp8", QuantizedWhenLoaded),
        (None, "int8", Int8),
        (FP8, None, Fp8),
        (FP8, "fp8", Fp8),
        (BLOCKS, None, Fp8),
        (INTEGERS, None, Int8),
        (AWQ, None, Packed),
        (AWQ, "awq_marlin", Packed),
    ],
)
def test_a_method_serves_what_is_stored_or_asked_for(
    quantization: Mapping[str, object] | None, name: str | None, expected: type[object]
) -> None:
    choice = chosen(quantization, name)
    assert type(choice.method(PATHS, "linear")) is expected
    assert type(choice.method(("lm_head",), "head")) is Unquantized


@pytest.fixture(params=[True, False])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a CPU has native code."""
    monkeypatch.setattr("pellucid.quant.quantization.serves", lambda dtype: request.param)
    return request.param


@pytest.mark.parametrize("quantization", [FP8, BLOCKS, INTEGERS])
def test_in_float32_and_where_no_product_is_weights_are_decoded(
    quantization: Mapping[str, object], native: bool
) -> None:
    exact = chosen(quantization, dtype=torch.float32)
    assert type(exact.method(PATHS, "linear")) is Unquantized
    assert exact.stored(PATHS[0], "linear") is not None
    on_cpu = chosen(quantization, platform=CPU).method(PATHS, "linear")
    assert type(on_cpu) is (Int8 if quantization is INTEGERS else Packed if native else Unquantized)


@pytest.mark.parametrize(
    ("act", "activations"),
    [
        ({}, "dynamic"),
        ({"dynamic": False, "strategy": "tensor"}, "static"),
        ({"symmetric": False}, None),
        (None, None),
    ],
)
def test_integers_are_multiplied_as_activations_are_rounded(
    act: dict[str, object] | None, activations: str | None
) -> None:
    """A GPU keeps packed what it does not multiply with integers; a CPU has one product for all but zeros."""
    group = INTEGERS["config_groups"]["group_0"]
    inputs = None if act is None else group["input_activations"] | act
    config = INTEGERS | {"config_groups": {"group_0": group | {"input_activations": inputs}}}
    method = chosen(config).method(PATHS, "linear")
    if activations is None:
        assert type(method) is Packed
    else:
        assert isinstance(method, Int8) and method.activations == activations
        assert ("input_scale" in method.params(SHAPE)) == (activations == "static")
    on_cpu = chosen(config, platform=CPU).method(PATHS, "linear")
    is_int8 = act is None or act.get("symmetric", True)
    assert isinstance(on_cpu, Int8) == is_int8
    assert not isinstance(on_cpu, Int8) or on_cpu.activations == "plain"


def test_matrices_that_are_not_stored_alike_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = chosen({**FP8, "modules_to_not_convert": ["up_proj"]})
    assert mixed.method(PATHS, "linear") is None
    assert type(mixed.method(PATHS[:1], "linear")) is Fp8
    assert type(mixed.method(PATHS[1:], "linear")) is Unquantized
    monkeypatch.setattr("pellucid.quant.quantization.serves", lambda dtype: False)
    decoded = chosen({**AWQ, "modules_to_not_convert": ["up_proj"]}, platform=CPU)
    assert type(decoded.method(PATHS, "linear")) is Unquantized  # plain, both of them, once they are read


@pytest.mark.parametrize(
    ("quantization", "name", "words"),
    [
        (AWQ, "none", "quantization is 'none'.*stored as 'awq'.*leave quantization out"),
        (AWQ, "int8", "quantization is 'int8'.*stored as 'awq'"),
        (None, "awq", "quantization is 'awq', but the checkpoint is plain.*fp8, int8"),
        (None, "gptq_marlin", "quantization is 'gptq_marlin', but the checkpoint is plain.*fp8, int8"),
        (None, "nine", "unknown quantization 'nine'.*fp8, int8"),
        ({"quant_method": "nine"}, None, "'nine'.*awq"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    quantization: Mapping[str, object] | None, name: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        chosen(quantization, name)
