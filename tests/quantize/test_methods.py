"""GPTQ, AWQ and SmoothQuant change outputs less than rounding does; what they scale changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.layers.linear import Linear
from pellucid.models.checkpoint import Checkpoint
from pellucid.quant.codes import U3, Group
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.rounding import rounded
from pellucid.quant.unquantized import Unquantized
from pellucid.quantize.awq import Awq, best_scale, nearest, of_outputs
from pellucid.quantize.base import METHODS, Recipe
from pellucid.quantize.dialects import config_of
from pellucid.quantize.folds import Fold, folds_of, norm_folds
from pellucid.quantize.gptq import gptq, inverse_factor
from pellucid.quantize.inputs import Inputs, Statistics, watched
from pellucid.quantize.run import norm_tensor
from pellucid.quantize.smoothquant import SmoothQuant, int8_rows
from pellucid.quantize.stage import Layer, in_chunks
from tests.quant.layers import make_linear
from tests.quantize.conftest import MACHINE, samples

FORMAT = LayerFormat(layout="ct-pack", code=U3, group=Group(1, 32))


def inputs_like_a_models(num: int = 400, size: int = 96) -> Tensor:
    """Correlated, some far larger than others."""
    draw = torch.Generator().manual_seed(3)
    mixed = torch.randn(num, size // 4, generator=draw) @ torch.randn(size // 4, size, generator=draw)
    sizes = torch.randn(size, generator=draw).mul(1.2).exp()
    return (mixed + torch.randn(num, size, generator=draw)) * sizes


def seen(x: Tensor) -> Statistics:
    inputs = Inputs()
    inputs.see(x, squares=True)
    return Statistics(inputs)


X = inputs_like_a_models()
W = torch.randn(48, 96, generator=torch.Generator().manual_seed(4)) / 10


def lost(numbers: Tensor) -> float:
    return float((X @ (numbers - W).T).square().sum() / (X @ W.T).square().sum())


@pytest.mark.parametrize("order", ["static", "group", "none"])
def test_gptq_changes_outputs_less_than_rounding(order: str) -> None:
    nearest = lost(rounded(W, FORMAT).dequantized())
    assert lost(gptq(W, seen(X).hessian, FORMAT, order).dequantized()) < 0.5 * nearest  # type: ignore[arg-type]


def test_gptq_of_independent_inputs_rounds_to_the_nearest() -> None:
    codes = gptq(W, torch.eye(96), FORMAT)
    assert torch.equal(codes.q, rounded(W, FORMAT).q)


def test_groups_that_follow_the_order_have_an_index() -> None:
    hessian = seen(X).hessian
    codes = gptq(W, hessian, FORMAT, "group")
    assert codes.index is not None
    largest = hessian.diagonal().argsort(descending=True)
    assert codes.index[largest].tolist() == [i // 32 for i in range(96)]
    assert gptq(W, hessian, FORMAT, "static").index is None


def test_inputs_that_are_never_fed_lose_their_weights() -> None:
    x = X.clone()
    x[:, 5] = 0
    numbers = gptq(W, seen(x).hessian, FORMAT).dequantized()
    assert numbers.isfinite().all() and not numbers[:, 5].any()


def test_hessians_of_fewer_samples_than_inputs_are_damped() -> None:
    hessian = seen(X[:4]).hessian
    factor = inverse_factor(hessian)
    assert factor.isfinite().all()
    assert torch.allclose(factor, factor.triu())
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(96)
    near = (factor.T @ factor @ damped - torch.eye(96)).abs().max()
    assert near < 1e-2
    with pytest.raises(ValueError, match="not finite"):
        inverse_factor(torch.full((4, 4), float("nan")))


def test_awq_finds_a_scale_that_outputs_like() -> None:
    linear, statistics = make_linear(Unquantized(), torch.float32), seen(X)
    weight = linear.param("weight").detach()
    fold = Fold((linear,), lambda scale: scale, lambda numbers: numbers)
    scale = best_scale(fold, [statistics], FORMAT)
    assert scale.max() / scale.min() > 2
    scaled, plain = nearest(weight * scale, FORMAT) / scale, nearest(weight, FORMAT)
    assert statistics.error(weight, scaled) < 0.9 * statistics.error(weight, plain)


def test_awq_clips_by_the_error_of_outputs() -> None:
    """Groups are looked at one by one, so they are fed one by one."""
    weights, outputs = (
        rounded(W, FORMAT, **clip).dequantized()
        for clip in ({}, {"lost": of_outputs(seen(X).hessian, FORMAT)})
    )

    def of_group(numbers: Tensor) -> float:
        return float((X[:, :32] @ (numbers - W)[:, :32].T).square().sum())

    assert of_group(outputs) < of_group(weights)


def test_smoothquant_moves_outliers_of_activations(plain: Path) -> None:
    layer, statistics = loaded(plain)
    for each in statistics.values():  # as large models have
        outliers = torch.ones_like(each.max_abs)
        outliers[3] = 200
        each.rows, each.max_abs = each.rows * outliers, each.max_abs * outliers
    fold = folds_of(layer.module, torch.float32)[0]
    reader = fold.readers[0]
    rows, weight = statistics[reader].rows, reader.param("weight").detach().clone()

    def off(x: Tensor, w: Tensor, format: LayerFormat) -> float:
        return float((int8_rows(x) @ rounded(w, format).dequantized().T - rows @ weight.T).square().sum())

    method = SmoothQuant(Recipe(method="smoothquant"))
    _, format = method.formats()
    before = off(rows, weight, format)
    method.prepare([fold], statistics, format)
    assert off(statistics[reader].rows, reader.param("weight").detach(), format) < 0.5 * before


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_what_is_scaled_computes_the_same(plain: Path, method: str) -> None:
    """Norms before q, k, v and before gate and up, values before o, up before down."""
    layer, statistics = loaded(plain)
    chunks = in_chunks(samples().learned)
    expected = [out.clone() for out in layer.run(chunks, None)]
    folds = folds_of(layer.module, torch.float32)
    assert len(folds) == 4
    weights = [reader.param("weight").detach().clone() for fold in folds for reader in fold.readers]
    made = {"awq": Awq, "smoothquant": SmoothQuant}[method](Recipe(method=method, group_size=32))
    made.prepare(folds, statistics, made.formats()[1])
    changed = [
        not torch.equal(reader.param("weight"), old)
        for reader, old in zip((reader for fold in folds for reader in fold.readers), weights, strict=True)
    ]
    assert all(changed)
    for ours, plain_out in zip(layer.run(chunks, None), expected, strict=True):
        torch.testing.assert_close(ours, plain_out, rtol=1e-4, atol=1e-4)


def test_a_norm_that_is_rounded_where_it_is_stored_is_made_up_for(plain: Path) -> None:
    layer, _ = loaded(plain)
    chunks = in_chunks(samples().learned)
    expected = next(layer.run(chunks, None)).clone()
    for fold in folds_of(layer.module, torch.bfloat16):
        fold.apply(fold.tie(torch.linspace(0.31, 3.7, fold.readers[0].shape.in_features)))
    torch.testing.assert_close(next(layer.run(chunks, None)), expected, rtol=1e-4, atol=1e-4)


def test_norms_that_add_to_their_weights_are_stored_without_that(plain: Path) -> None:
    layer, _ = loaded(plain)
    norm = next(iter(layer.norms.values()))
    norm.spec = replace(norm.spec, offset=1.0)
    old = norm.weight.detach().clone()
    fold = next(iter(norm_folds(norm, torch.bfloat16)))
    exact = fold.divide(torch.full_like(old, 1.7))
    stored = norm_tensor(norm, old - 1)
    assert torch.equal(stored.bfloat16().float(), stored)
    torch.testing.assert_close(exact * (stored + 1), old)


def loaded(plain: Path) -> tuple[Layer, dict[Linear, Statistics]]:
    """The first layer and what it is fed."""
    layer = Layer(Checkpoint.open(ModelConfig(model=str(plain))), 0, MACHINE, 24)
    layer.load(layer.source, {})
    with watched(layer.module, squares=True) as inputs:
        for _ in layer.run(in_chunks(samples().learned), None):
            pass
    return layer, {linear: Statistics(each) for linear, each in inputs.items() if each.count}


def test_formats_of_methods() -> None:
    def format_of(**options: object) -> tuple[str, str, str]:
        recipe = Recipe(**options)  # type: ignore[arg-type]
        dialect, format = METHODS.load(recipe.method)(recipe).formats()
        return dialect, format.layout, format.code.name

    assert format_of(method="awq") == ("awq", "awq", "u4")
    assert format_of(method="awq", bits=3) == ("compressed-tensors", "ct-pack", "u3")
    assert format_of(method="awq", dialect="compressed-tensors") == ("compressed-tensors", "ct-pack", "u4")
    assert format_of(method="gptq", bits=8) == ("gptq", "gptq", "s8")
    assert format_of(method="gptq", bits=5) == ("compressed-tensors", "ct-pack", "u5")
    assert format_of(method="int4", bits=7) == ("compressed-tensors", "ct-pack", "s8")


@pytest.mark.parametrize(("symmetric", "version"), [(True, "gptq"), (False, "gptq_v2")])
def test_gptq_of_zeros_is_of_version_2_which_gptqmodel_reads(symmetric: bool, version: str) -> None:
    recipe = Recipe(method="gptq", symmetric=symmetric)
    dialect, format = METHODS.load(recipe.method)(recipe).formats()
    assert config_of(dialect, format, recipe, [])["checkpoint_format"] == version
    assert ("v2" in format.options) == (version == "gptq_v2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "gtpq"}, "unknown method of quantization 'gtpq'.*gptq"),
        ({"method": "int4", "bits": 9}, "bits is 9, must be 2 to 8"),
        ({"method": "int4", "group_size": 33}, "group_size is 33, must be a multiple of 8"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe(**options)  # type: ignore[arg-type]
