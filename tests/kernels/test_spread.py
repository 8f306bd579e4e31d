"""Tokens with their experts as one message, and back: kernels beside their plain references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.experts.routing import Chosen, Share
from pellucid.kernels.slots.spread import pack, pack_ref, unpack, unpack_ref, words_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_EXPERTS, TOP_K = 8, 3


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_packed_is_unpacked_with_the_experts_that_are_here(
    num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    dim, num_common, share = 48, 7, Share(2, 4)
    x = torch.randn((num_tokens, dim), generator=generator).to(DEVICE, dtype)
    ids = torch.randint(NUM_EXPERTS, (num_tokens, TOP_K), generator=generator, dtype=torch.int32).to(DEVICE)
    chosen = Chosen(ids, torch.rand((num_tokens, TOP_K), generator=generator).to(DEVICE))
    words = words_of(dim * dtype.itemsize, TOP_K)
    message = pack(x, chosen, num_common, words, NUM_EXPERTS)
    expected = pack_ref(x, chosen, num_common, words, NUM_EXPERTS)
    for made in (message, expected):
        for back in (unpack, unpack_ref):
            features, those = back(made, dtype, dim, TOP_K, share)
            assert torch.equal(features[:num_tokens], x)
            is_here = (ids >= 2) & (ids < 6)
            assert torch.equal(those.ids[:num_tokens], torch.where(is_here, ids - 2, 4).int())
            assert (those.ids[num_tokens:] == 4).all(), "padding is nobody's"
            assert torch.equal(those.weights[:num_tokens], chosen.weights)
