"""Mixtures of experts in codes by native code, beside the reference with the codes' numbers in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.kernels.experts.experts import ExpertWeights, Gating, More, mix_experts_ref
from pellucid.kernels.experts.routing import Chosen
from pellucid.kernels.packed.packed_weight import GroupCodes
from pellucid.native.library import Library
from pellucid.quant.codes import Codes
from pellucid.quant.experts import NATIVE, CodedExperts, PlainExperts
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.native_experts import NativeExperts, native_experts, native_plain
from pellucid.quant.online import FORMATS
from pellucid.quant.packed import group_codes
from pellucid.quant.rounding import rounded

NUM, DIM, HIDDEN, TOP_K = 5, 96, 64, 3
SILU, CLAMPED = Gating("silu"), Gating("silu", 0.5, 1.702)
Expert = list[GroupCodes]


def codes(format: LayerFormat, num_out: int, num_in: int) -> GroupCodes:
    made: Codes = rounded(torch.randn(num_out, num_in), format)
    return group_codes(made)


def make(
    code: Library, way: str, dtype: torch.dtype, *, biased: bool = False
) -> tuple[NativeExperts, ExpertWeights]:
    """And what it computes with."""
    torch.manual_seed(0)
    format = FORMATS[way]
    ups: list[Expert] = [[codes(format(DIM), HIDDEN, DIM) for _ in range(2)] for _ in range(NUM)]
    downs: list[Expert] = [[codes(format(HIDDEN), DIM, HIDDEN)] for _ in range(NUM)]
    biases = (torch.randn(NUM, 2 * HIDDEN).to(dtype), torch.randn(NUM, DIM).to(dtype)) if biased else None
    plain = ExpertWeights(
        torch.stack([torch.stack([part.dequantized() for part in up], 1).flatten(0, 1) for up in ups]),
        torch.stack([part.dequantized() for (part,) in downs]),
        *(() if biases is None else (bias.float() for bias in biases)),
    )
    return native_experts(code, ups, downs, dtype, biases or (None, None)), plain


def chosen_by(num_tokens: int) -> Chosen:
    """Distinct experts, or nobody."""
    ids = torch.stack([torch.randperm(NUM + 1)[:TOP_K] for _ in range(num_tokens)]).int()
    return Chosen(ids, torch.rand(num_tokens, TOP_K))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.float() - expected).abs().max() / expected.abs().max()
    assert error < (2e-2 if actual.dtype == torch.bfloat16 else 2e-3), error


@pytest.mark.parametrize("way", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_codes_of_all_kinds_are_mixed_as_the_reference_does(
    code: Library, way: str, dtype: torch.dtype, num_tokens: int
) -> None:
    experts, plain = make(code, way, dtype)
    x, chosen = torch.randn(num_tokens, DIM).to(dtype), chosen_by(num_tokens)
    assert_near(experts.mix(x, chosen, SILU), mix_experts_ref(x.float(), chosen, plain, SILU))


@pytest.mark.parametrize("gating", [CLAMPED, Gating("gelu_tanh")], ids=str)
@pytest.mark.parametrize("gate", [True, False])
def test_biases_gates_and_what_else_a_mixture_has(code: Library, gating: Gating, gate: bool) -> None:
    experts, plain = make(code, "mxfp4", torch.float16, biased=True)
    x, chosen = torch.randn(9, DIM).half(), chosen_by(9)
    more = More(torch.randn(9, DIM).half(), torch.randn(9, 1).half() if gate else None)
    wide = More(more.values.float(), None if more.gate is None else more.gate.float())
    for weighs_input in (False, True):
        actual = experts.mix(x, chosen, gating, weighs_input=weighs_input, more=more)
        assert_near(
            actual,
            mix_experts_ref(x.float(), chosen, plain, gating, weighs_input=weighs_input, more=wide),
        )


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_plain_experts_are_mixed_as_the_reference_does(code: Library, biased: bool, num_tokens: int) -> None:
    _, plain = make(code, "int4", torch.bfloat16, biased=biased)
    parts = (plain.gate_up, plain.down, plain.gate_up_bias, plain.down_bias)
    rounded = ExpertWeights(*(None if part is None else part.bfloat16() for part in parts))  # type: ignore[arg-type]
    experts = native_plain(code, rounded)
    assert experts is not None
    x, chosen = torch.randn(num_tokens, DIM).bfloat16(), chosen_by(num_tokens)
    wide = ExpertWeights(*(None if part is None else part.bfloat16().float() for part in parts))  # type: ignore[arg-type]
    assert_near(experts.mix(x, chosen, SILU), mix_experts_ref(x.float(), chosen, wide, SILU))
    odd = ExpertWeights(rounded.gate_up[:, :40], rounded.down[:, :, :20])
    assert native_plain(code, odd) is None


def test_a_token_is_mixed_alike_alone_and_in_company(code: Library) -> None:
    experts, _ = make(code, "int4", torch.bfloat16)
    x, chosen = torch.randn(40, DIM).bfloat16(), chosen_by(40)
    together = experts.mix(x, chosen, SILU)
    for i in (0, 17, 39):
        alone = experts.mix(x[i : i + 1], Chosen(chosen.ids[i : i + 1], chosen.weights[i : i + 1]), SILU)
        assert torch.equal(alone[0], together[i])


def test_nobodys_tokens_are_nothing_and_there_may_be_none(code: Library) -> None:
    experts, _ = make(code, "int4", torch.bfloat16)
    nobody = Chosen(torch.full((2, TOP_K), NUM, dtype=torch.int32), torch.rand(2, TOP_K))
    assert not experts.mix(torch.randn(2, DIM).bfloat16(), nobody, SILU).any()
    none = Chosen(torch.empty(0, TOP_K, dtype=torch.int32), torch.empty(0, TOP_K))
    assert experts.mix(torch.empty(0, DIM).bfloat16(), none, SILU).shape == (0, DIM)


def test_matrices_of_other_than_whole_panels_are_refused(own: Library) -> None:
    format = FORMATS["int8"]
    parts = [codes(format(DIM), 40, DIM)] * 2
    with pytest.raises(ValueError, match=r"of \(40, 96\) are not of whole 16s"):
        native_experts(own, [parts], [[codes(format(40), DIM, 40)]], torch.bfloat16)


@pytest.mark.parametrize("way", ["plain", "fp8", "int8"])
@pytest.mark.parametrize(("hidden", "is_native"), [(HIDDEN, True), (40, False)])
def test_the_table_of_layers_says_what_multiplies(
    code: Library, way: str, hidden: int, is_native: bool
) -> None:
    format, method = FORMATS.get(way), PlainExperts(device="cpu")
    if format is not None:
        method = CodedExperts(format, format, is_stored=False, device="cpu")
    gate_up, down = torch.randn(NUM, 2 * hidden, DIM).bfloat16(), torch.randn(NUM, DIM, hidden).bfloat16()
    kept = method.finish(gate_up, down, torch.bfloat16, (None, None))
    assert isinstance(kept, NativeExperts) == is_native
    for said in (
        method.describe("gate_up", tuple(gate_up.shape), torch.bfloat16),
        method.describe("down", tuple(down.shape), torch.bfloat16),
    ):
        assert said.endswith(NATIVE if is_native else "for native code takes matrices of whole 16s")
