"""Memory goes from under tensors and comes back, and whoever holds one sees the same numbers."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from pellucid.sleep.weights import HostWeights


class Packed:
    """A method's own tensors, beyond a module's parameters."""

    def __init__(self, q: torch.Tensor) -> None:
        self.parts = {"q": [q]}


def test_memory_moves_and_tensors_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    owned = torch.randn(5, 2)
    model.product = Packed(owned)  # type: ignore[assignment]
    bound = torch.randn(7)
    model.launch = partial(torch.add, bound)  # type: ignore[assignment]
    view = model[0].weight.data[1:]
    before = {name: tensor.clone() for name, tensor in {**model.state_dict(), "q": owned, "b": bound}.items()}
    away = HostWeights([model], torch.device("cpu"))
    assert away.nbytes == sum(tensor.nbytes for tensor in before.values())
    assert all(p.untyped_storage().nbytes() == 0 for p in (*model.parameters(), owned, bound))
    away.restore()
    after = {**model.state_dict(), "q": owned, "b": bound}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(view, before["0.weight"][1:]), "a view sees what came back"
