"""How near the routers of a model were to choosing otherwise: ties decide nothing in a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pellucid.kernels.experts.routing import Routing, in_best_groups_ref
from pellucid.layers.experts import Router

LEAST_MARGIN = 3e-5  # rounding moves float32 logits of models this small by a tenth of it, at most


@contextmanager
def noted_margins(model: nn.Module) -> Iterator[list[float]]:
    """Fills a list with the least margin of every call of a router, while the context is open."""
    margins: list[float] = []

    def note(router: nn.Module, args: tuple, _: object) -> None:
        assert isinstance(router, Router)
        x, fwd = args
        logits = router.linear(x.float() if router.is_wide else x, fwd)
        margins.append(margin(logits.float(), router.routing, router.bias))

    hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, Router)]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()


def margin(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> float:
    """By how much what is chosen is better than what is not, the least of all tokens.  logits [T, E]."""
    scores = logits.log_softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    liking = scores if bias is None else scores + bias
    least = float("inf")
    if routing.groups > routing.top_groups:
        assert routing.group_score == "top2" or routing.score == "softmax"
        by_group = liking.unflatten(1, (routing.groups, -1))
        num_best = min(2 if routing.group_score == "top2" else 1, by_group.shape[-1])
        least = gap(by_group.topk(num_best, -1).values.sum(-1), routing.top_groups)
    if routing.groups > 1:
        liking = in_best_groups_ref(liking, routing)
    return min(least, gap(liking, routing.top_k))


def gap(liking: Tensor, num: int) -> float:
    """Between the `num`-th best of each row and the next; [T, n], infinite if all are taken."""
    ordered = liking.sort(dim=-1, descending=True).values
    if num >= ordered.shape[1]:
        return float("inf")
    between = ordered[:, num - 1] - ordered[:, num]
    return float(between[torch.isfinite(between)].min()) if torch.isfinite(between).any() else float("inf")
