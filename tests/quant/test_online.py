"""Plain weights that become codes while they load: which layers, and what they then compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pellucid.layers.linear import Linear
from pellucid.models.loader import torch_module
from pellucid.quant.base import LinearMethod
from pellucid.quant.int8 import Int8
from pellucid.quant.online import online
from pellucid.quant.rounding import rounded
from pellucid.quant.unquantized import Unquantized
from pellucid.quant.when_loaded import Int4, Mxfp4, Nf4, WhenLoaded
from tests.models.harness import CPU, Harness, load
from tests.quant.layers import make_linear
from tests.tiny import write_checkpoint

MAPPING = {"linear": "int4", "head": "int8", "re:.*down_proj": "nf4", "ignore": ["model.layers.0"]}


def kind_of(method: LinearMethod | None) -> type | None:
    return None if method is None else type(method)


def test_a_mapping_names_kinds_layers_and_what_stays_plain() -> None:
    for asked in (MAPPING, json.dumps(MAPPING)):
        found = online(asked)
        assert found is not None
        layer = "model.layers.{}.mlp.{}"
        assert kind_of(found.method((layer.format(1, "up_proj"),), "linear")) is Int4
        assert kind_of(found.method((layer.format(1, "down_proj"),), "linear")) is Nf4
        assert kind_of(found.method((layer.format(0, "down_proj"),), "linear")) is Unquantized
        assert kind_of(found.method(("lm_head",), "head")) is Int8
        assert found.method((layer.format(0, "up_proj"), layer.format(1, "up_proj")), "linear") is None


def test_a_name_is_for_all_layers_but_the_head() -> None:
    found = online("mxfp4")
    assert found is not None
    assert kind_of(found.method(("model.layers.1.mlp.up_proj",), "linear")) is Mxfp4
    assert kind_of(found.method(("lm_head",), "head")) is Unquantized
    assert online("awq") is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"linear": "int5"}, "quantization of 'linear' is 'int5', must be one of none, fp8, int8, int4"),
        ({"embedding": "int4"}, "quantization of 'embedding' while loading is not served: rows are read"),
        ({"linear": "int4", "ignore": "lm_head"}, "ignore in quantization is 'lm_head', must be a list"),
        ("{int4}", "is no JSON"),
    ],
)
def test_what_there_is_not_is_refused(asked: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        online(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [Int4, Nf4, Mxfp4])
def test_a_layer_computes_with_the_nearest_codes(method: type[WhenLoaded]) -> None:
    own = method()
    linear = make_linear(own, torch.float32, bias=True)
    weight = linear.param("weight").detach().clone()
    own.choose(linear.shape, CPU)
    linear.finish()
    assert linear._parameters["weight"] is None
    assert own.format.group.inputs == min(32, method.group)  # of rows of 96
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert linear.bias is not None
    numbers = rounded(weight, own.format).dequantized()
    torch.testing.assert_close(linear(x), x @ numbers.T + linear.bias)


@pytest.mark.parametrize("method", [Int4, Nf4, Mxfp4])
def test_a_matrix_that_is_rounded_in_slices_is_one_part(
    method: type[WhenLoaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer's two, gates and what they open, kernels make one pass."""
    monkeypatch.setattr("pellucid.quant.when_loaded.ROWS", 20)
    own, kept = method(), []
    monkeypatch.setattr(own, "keep", lambda _, parts: kept.extend(parts))
    linear = make_linear(own, torch.float32)
    weight = linear.param("weight").detach().clone()
    own.choose(linear.shape, CPU)
    linear.finish()
    assert [len(part.q) for part in kept] == [48, 32]
    assert torch.equal(
        torch.cat([part.dequantized() for part in kept]), rounded(weight, own.format).dequantized()
    )


def test_rows_of_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="a row of 40 inputs is not made of whole groups of 128"):
        Int4().format_for(40)
    with pytest.raises(ValueError, match="a row of 48 inputs is not made of whole groups of 32"):
        Mxfp4().format_for(48)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_quantized_where_asked_for_and_a_table_stays(tmp_path: Path, tied: bool) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=tied)
    plain, quantized = (
        load(folder, max_model_len=32, quantization=asked)  # type: ignore[arg-type]
        for asked in (None, {"head": "int8"})
    )
    head = [m for m in torch_module(quantized.model).modules() if isinstance(m, Linear)][-1]
    assert isinstance(head.method, Int8) and head._parameters["weight"] is None
    (wanted,), (got,) = (
        Harness(each, num_seqs=1, max_len=16).step({0: [1, 2, 3]}) for each in (plain, quantized)
    )
    assert not torch.equal(got, wanted)
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05 * float(wanted.std()))
