"""What lies between products: the same as plain torch, but for the last bits of float32 sums."""

from __future__ import annotations

import pytest
import torch

from pellucid.kernels.pointwise.rms_norm import Post, add_rms_norm_ref
from pellucid.kernels.pointwise.silu_mul import silu_mul_ref
from pellucid.layers.leaf import NATIVE, add_norm_native, choose_leaf, gated_native
from pellucid.native import between
from pellucid.native.library import Library


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("has_stream", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 1024), (40, 48)])
def test_a_norm_is_torchs(
    own: Library, shape: tuple[int, int], has_stream: bool, is_wide: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[1]) + 0.5
    weight = weight if is_wide else weight.to(dtype)
    stream = torch.randn(shape).to(dtype) if has_stream else None
    expected, summed = add_rms_norm_ref(x, None if stream is None else stream.clone(), weight, 1e-6)
    done = between.add_norm(x, stream, weight, 1e-6)
    assert done is not None
    assert torch.equal(done[1], summed) and (stream is None or done[1] is stream)
    torch.testing.assert_close(done[0], expected, atol=0, rtol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 64), (50, 96)])
def test_a_gate_is_torchs(own: Library, shape: tuple[int, int], act: str) -> None:
    x = torch.randn(shape).bfloat16() * 4
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    done = between.gated(x, act)
    assert done is not None
    torch.testing.assert_close(done, silu_mul_ref(x, act), atol=1e-5, rtol=2e-2)


def test_others_are_torchs(own: Library) -> None:
    assert choose_leaf(torch.device("cpu")) is NATIVE
    for x in (torch.randn(2, 64), torch.randn(2, 40).bfloat16(), torch.randn(64, 2).bfloat16().T):
        weight = torch.ones(x.shape[1], dtype=x.dtype)
        assert torch.equal(
            add_norm_native(x, None, weight, 1e-6)[0], add_rms_norm_ref(x, None, weight, 1e-6)[0]
        )
        assert torch.equal(gated_native(x), silu_mul_ref(x))
    x, post = torch.randn(2, 64).bfloat16(), Post(torch.rand(64).bfloat16(), 1e-6, 0.5)
    ours = add_norm_native(x, torch.zeros_like(x), torch.ones(64).bfloat16(), 1e-6, post)
    theirs = add_rms_norm_ref(x, torch.zeros_like(x), torch.ones(64).bfloat16(), 1e-6, post)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [1, 7, 16, 40, 1003])
def test_the_highest_is_the_first_of_equals(own: Library, num: int, dtype: torch.dtype) -> None:
    scores = torch.randint(-3, 4, (20, num)).to(dtype)
    scores[0], scores[1] = -torch.inf, torch.inf
    scores[2, num - 1] = 9
    expected = [row.index(max(row)) for row in scores.tolist()]
    places = between.highest(scores)
    assert places is not None and places.tolist() == expected
    assert between.highest(scores.float()) is None
