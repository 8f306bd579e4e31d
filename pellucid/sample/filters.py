"""Which tokens may be drawn at all: min_p, then top_k, then top_p, as one floor under the logits.

A filter here is a function of values, not of places: tokens that tie with the last one kept are kept too (as
in transformers' top_k).  Probabilities are summed as integers, so no order of summation, width or neighbour
can move a floor.  Legend: R rows, V vocab, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.sample.state import Column, SlotParams

# Units to the most likely token's probability; int64 sums are exact for a vocabulary below 2**23.
_MASS_UNIT = 2.0**40


def filter_logits(logits: Tensor, params: SlotParams, width: int | None) -> None:
    """Set to -inf, in place, what the rows' min_p, top_k and top_p do not let pass.

    logits: [R, V] float32.  width: no row has a larger top_k, nor top_p without top_k; None is no bound.
    """
    logits.masked_fill_(logits < floors(logits, params, width)[:, None], -float("inf"))


def floors(logits: Tensor, params: SlotParams, width: int | None) -> Tensor:
    """[R] float32: the least logit that passes in each row."""
    ranked = _ranked(logits, width)
    temperature = params.floats(Column.TEMPERATURE)
    highest = ranked[:, 0]
    # p >= min_p * p_max, with p proportional to exp(logit / T).
    floor = torch.maximum(
        highest + temperature * params.floats(Column.LOG_MIN_P),
        _kth_highest(ranked, params.ints(Column.TOP_K)),
    )
    if ranked.shape[1] == 1:
        return floor
    total = _masses(logits, floor, highest, temperature).sum(-1)
    nucleus = params.floats(Column.TOP_P).double() * total
    masses = _masses(ranked, floor, highest, temperature)
    mass_above = masses.cumsum(-1) - masses
    num_kept = (mass_above < nucleus[:, None]).sum(-1).clamp_(min=1)
    top_p_floor = ranked.gather(1, num_kept[:, None] - 1)[:, 0]
    # Without top_p even a token too unlikely for any mass passes.
    return torch.where(params.floats(Column.TOP_P) < 1, torch.maximum(floor, top_p_floor), floor)


def _ranked(logits: Tensor, width: int | None) -> Tensor:
    """[R, W]: the `width` highest logits, falling; all of them without a width."""
    if width is None or width >= logits.shape[1]:
        return logits.sort(-1, descending=True).values
    return logits.topk(width).values


def _kth_highest(ranked: Tensor, top_k: Tensor) -> Tensor:
    """[R]: the top_k-th value of each row; -inf where top_k is 0."""
    last = (top_k - 1).clamp(0, ranked.shape[1] - 1)
    return torch.where(top_k > 0, ranked.gather(1, last[:, None])[:, 0], -float("inf"))


def _masses(logits: Tensor, floor: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """int64, as logits: the unnormalized probability of what is at or above the floor, 0 of the rest."""
    scaled = ((logits - highest[:, None]) / temperature[:, None]).exp_().mul_(_MASS_UNIT)
    return scaled.masked_fill_(logits < floor[:, None], 0.0).to(torch.int64)
