"""Low-rank additions: the kernels against the plain reference, and each token by itself."""

from __future__ import annotations

import pytest
import torch

from pellucid.kernels.pointwise.silu_mul import silu_mul, silu_mul_ref
from pellucid.kernels.products.lora import (
    WideShrink,
    add_lora,
    add_lora_ref,
    expand,
    expand_ref,
    expand_wide,
    expand_wide_ref,
    gate_wide,
    gate_wide_ref,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # tokens, inputs, outputs of the merged matrices, adapters, rank
    "q, k, v of a decode": (5, 80, (64, 16, 16), 3, 16),
    "one matrix, many tiles": (37, 600, (72,), 2, 32),
    "gate and up": (19, 64, (96, 96), 3, 16),
    "many tokens": (70, 64, (64,), 5, 16),
}


@pytest.mark.parametrize(("num_tokens", "num_in", "parts", "num", "rank"), SHAPES.values(), ids=SHAPES.keys())
def test_kernels_are_as_the_reference(
    num_tokens: int, num_in: int, parts: tuple[int, ...], num: int, rank: int
) -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    x, y = normal(num_tokens, num_in), normal(num_tokens, sum(parts))
    a, b = normal(num, len(parts), rank, num_in) * num_in**-0.5, normal(num, sum(parts), rank)
    adapters = torch.randint(-1, num, (num_tokens,), generator=generator).to(torch.int32)
    adapters[0], adapters[-1] = -1, num - 1
    adapters = adapters.to(DEVICE)
    expected, found = y.clone(), y.clone()
    add_lora_ref(expected, x, adapters, a, b, parts)
    add_lora(found, x, adapters, a, b, parts)
    shrunk, wide, by_torch = WideShrink(a)(x), y.clone(), y.clone()
    expand_wide(wide, shrunk, adapters, b, parts)
    expand_wide_ref(by_torch, shrunk, adapters, b, parts)
    if len(parts) == 2:
        gated = gate_wide(y, shrunk, adapters, b, "silu")
        torch.testing.assert_close(gated, silu_mul_ref(expected), atol=2e-4, rtol=2e-4)
        assert torch.equal(gated[0], silu_mul(y)[0]), "a token without an adapter has changed"
        torch.testing.assert_close(gate_wide_ref(y.clone(), shrunk, adapters, b, "silu"), gated)
    for sums in (found, wide, by_torch):
        assert torch.equal(sums[0], y[0]), "a token without an adapter has changed"
        torch.testing.assert_close(sums, expected, atol=2e-4, rtol=2e-4)


def test_what_an_embedding_adds_is_expanded_as_the_reference_does() -> None:
    generator = torch.Generator().manual_seed(3)
    shrunk, b = torch.randn(1, 1, 9, 16, generator=generator), torch.randn(2, 72, 16, generator=generator)
    y, adapters = torch.randn(9, 72, generator=generator), torch.tensor([0, -1, 1] * 3, dtype=torch.int32)
    expected, found = y.clone().to(DEVICE), y.clone().to(DEVICE)
    expand_ref(expected, shrunk.to(DEVICE), adapters.to(DEVICE), b.to(DEVICE), (72,))
    expand(found, shrunk.to(DEVICE), adapters.to(DEVICE), b.to(DEVICE), (72,))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(found[1].cpu(), y[1]) and not torch.equal(found[0].cpu(), y[0])


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    x, a = torch.randn(16, 64, generator=generator), torch.randn(3, 1, 16, 64, generator=generator)
    b = torch.randn(3, 48, 16, generator=generator)
    x, a, b = x.to(DEVICE), a.to(DEVICE), b.to(DEVICE)
    alone, together = torch.zeros(16, 48, device=DEVICE), torch.zeros(16, 48, device=DEVICE)
    adapters = torch.arange(16, device=DEVICE, dtype=torch.int32) % 3
    only = torch.full_like(adapters, -1)
    only[7] = adapters[7]
    shrunk = WideShrink(a)(x)
    add_lora(together, x, adapters, a, b, (48,))
    add_lora(alone, x, only, a, b, (48,))
    assert torch.equal(alone[7], together[7])
    strangers = shrunk.clone()
    strangers[torch.arange(16) != 7] = torch.inf
    expand_wide(together.zero_(), shrunk, adapters, b, (48,))
    expand_wide(alone.zero_(), strangers, only, b, (48,))
    assert torch.equal(alone[7], together[7])
    assert not alone[:7].any() and not alone[8:].any()
