"""Routers, whose logits are few enough for a product of their own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.forward import ForwardInput
from pellucid.kernels.experts.routing import Parts, Routing, Share
from pellucid.layers.activation import Act
from pellucid.layers.experts import Router, Sparse
from pellucid.layers.leaf import FUSED
from pellucid.layers.linear import Linear
from pellucid.layers.weight import Weight
from pellucid.lora.bank import AdapterLimits, LoraBank, LowRank
from pellucid.quant.base import WHOLE, LinearShape
from pellucid.quant.unquantized import Unquantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, NUM_EXPERTS, NUM_TOKENS = 64, 8, 5


def step(adapters: torch.Tensor | None) -> ForwardInput:
    """A prompt, as far as a router asks for it."""
    tokens, none = torch.arange(NUM_TOKENS, device=DEVICE), torch.empty(0, device=DEVICE)
    return ForwardInput(
        input_ids=tokens.int(), positions=tokens, slots=none, cu_seqlens_q=none, seq_lens=none,
        block_tables=(), slot_mappings=(), logits_index=none, adapters=adapters,
    )  # fmt: skip


@pytest.mark.parametrize("is_wide", [False, True], ids=["16 bits", "float32"])
def test_few_tokens_of_adapters_are_routed_as_many_are(is_wide: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if is_wide else torch.float16
    shape = LinearShape(in_features=DIM, out_partitions=(NUM_EXPERTS,), split="out", dtype=dtype)
    method = Unquantized()
    weight = Weight.of(method.params(shape)["weight"], ("gate.weight",), (WHOLE,), DEVICE)
    weight.allocate()
    weight.data.normal_()
    bank = LoraBank(shape, ("gate",), (WHOLE,), AdapterLimits(max_loras=1, max_rank=2), DEVICE)
    linear = Linear(shape, method, {"weight": weight}, lora=bank)
    linear.finish()
    pair = LowRank(torch.randn(2, DIM), torch.randn(NUM_EXPERTS, 2))
    bank.put(0, [pair])
    sparse = Sparse(hidden=16, act=Act("silu"), routing=Routing(NUM_EXPERTS, 2), router_is_wide=is_wide)
    share = Share(0, NUM_EXPERTS)
    router = Router(linear, sparse, share, None, FUSED, name="gate", is_uniform=False)
    x = torch.randn(NUM_TOKENS, DIM, device=DEVICE).half()
    plain = x.float() @ linear.param("weight").float().T
    adapted = plain + (x.float() @ pair.down.to(DEVICE).T) @ pair.up.to(DEVICE).T
    places = torch.tensor([-1, 0, -1, 0, 0], dtype=torch.int32, device=DEVICE)
    for adapters, expected in ((None, plain), (places, torch.where(places[:, None] < 0, plain, adapted))):
        logits = router._logits(x, step(adapters))
        found = logits.total() if isinstance(logits, Parts) else logits.float()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=3e-2)
