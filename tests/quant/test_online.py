"""Plain weights that become codes while they load: which layers, and what they then compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.layers.embedding import VocabEmbedding
from pellucid.layers.linear import Linear
from pellucid.models.loader import torch_module
from pellucid.quant.base import LinearMethod
from pellucid.quant.int8 import Int8, quantize_rows
from pellucid.quant.online import FORMATS, ONLINE, online
from pellucid.quant.rounding import in_slices, rounded, slices_of
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


def test_experts_of_a_layer_are_quantized_alike_or_refused() -> None:
    found = online({"experts": "int4", "re:.*down_proj": "nf4"})
    assert found is not None
    with pytest.raises(ValueError, match=r"mlp.up and others, .* in several ways: int4, nf4; name them all"):
        found.experts(("mlp.up",), ("mlp.down_proj",))


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
    monkeypatch.setattr("pellucid.quant.rounding.MOST_AT_ONCE", 20 * 96)
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


def test_float32_copies_are_of_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.quant.rounding.MOST_AT_ONCE", 20 * 96)
    weight, seen = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)), list[int]()

    def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(rows))
        return quantize_rows(rows)

    for ours, whole in zip(in_slices(weight, quantize), quantize_rows(weight), strict=True):
        assert torch.equal(ours, whole)
    assert seen == [1, 20, 20, 10]
    monkeypatch.undo()
    assert [len(rows) for rows in slices_of(torch.empty(1536, 1024))] == [1024, 512]


class Made(TorchDispatchMode):
    """Notes the bytes of what is made, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        self.nbytes += [out.nbytes] if isinstance(out, torch.Tensor) and not func.is_view else []
        return out


def test_room_for_codes_is_made_before_copies_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.quant.rounding.MOST_AT_ONCE", 20 * 96)
    with Made() as made:
        in_slices(torch.zeros(500, 96), quantize_rows)
    copies = made.nbytes.index(20 * 96 * 4)
    assert {500 * 96, 500 * 4} <= set(made.nbytes[:copies])
    assert max(made.nbytes[copies:]) == 20 * 96 * 4


@pytest.mark.parametrize("way", [way for way in ONLINE if way != "none"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_table_in_codes_gives_their_numbers_and_a_tied_head_is_as_it(
    tmp_path: Path, tied: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.quant.rounding.MOST_AT_ONCE", 40 * 64)
    folder = write_checkpoint(tmp_path, tie_word_embeddings=tied, hidden_size=64)
    plain = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    model = load(folder, max_model_len=32, quantization={"embedding": way}).model  # type: ignore[arg-type]
    embed = next(m for m in torch_module(model).modules() if isinstance(m, VocabEmbedding))
    numbers = rounded(plain, FORMATS[way](plain.shape[1])).dequantized()
    ids = torch.tensor([3, 0, len(plain) - 1, 3])
    assert torch.equal(embed(ids), numbers[ids])
    assert embed.weight.numel() == 0  # what was loaded is let go
    head = [m for m in torch_module(model).modules() if isinstance(m, Linear)][-1]
    assert isinstance(head.method, Unquantized) != tied


@pytest.mark.parametrize("way", ["int8", "fp8"])
def test_a_tied_head_multiplies_by_the_codes_that_the_table_has(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.quant.int8.can_pack", lambda: False)  # as a GPU has them: in rows
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True, hidden_size=64)

    def parts(asked: dict[str, str]) -> tuple[VocabEmbedding, Linear]:
        model = torch_module(load(folder, max_model_len=32, quantization=asked).model)  # type: ignore[arg-type]
        embed = next(m for m in model.modules() if isinstance(m, VocabEmbedding))
        return embed, [m for m in model.modules() if isinstance(m, Linear)][-1]

    embed, head = parts({"embedding": way})
    assert embed.codes is not None
    own = head.param("weight") if way == "fp8" else head.method._multiply.weight  # type: ignore[attr-defined]
    assert own.data_ptr() == embed.codes.codes.data_ptr()
    x = torch.randn(3, 64)
    expected = x @ embed(torch.arange(len(own))).T
    assert (head(x) - expected).norm() < 0.05 * expected.norm()  # of FP8 activations are rounded, too
    embed, head = parts({"embedding": "int8", "head": "fp8"})
    assert head.param("weight").dtype == torch.float8_e4m3fn


def test_a_head_that_is_named_is_not_as_the_table_that_it_is_tied_to(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    asked = {"embedding": "int8", "head": "none"}
    harnesses = (
        load(folder, max_model_len=32, quantization=each)  # type: ignore[arg-type]
        for each in (None, asked)
    )
    (wanted,), (got,) = (Harness(each, num_seqs=1, max_len=16).step({0: [1, 2, 3]}) for each in harnesses)
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05 * float(wanted.std()))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_quantized_where_asked_for_and_a_table_stays(tmp_path: Path, tied: bool) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=tied)
    plain, quantized = (
        load(folder, max_model_len=32, quantization=asked)  # type: ignore[arg-type]
        for asked in (None, {"head": "int8"})
    )
    head = [m for m in torch_module(quantized.model).modules() if isinstance(m, Linear)][-1]
    assert isinstance(head.method, Int8) and head._parameters["weight"] is None
    assert head.method.table is None, "a table without codes shares none, and the head's own may be packed"
    (wanted,), (got,) = (
        Harness(each, num_seqs=1, max_len=16).step({0: [1, 2, 3]}) for each in (plain, quantized)
    )
    assert not torch.equal(got, wanted)
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05 * float(wanted.std()))
