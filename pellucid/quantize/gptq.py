"""GPTQ (Frantar et al. 2022): each input's error is made up for by the weights of inputs that come later.

The second derivatives of a layer's squared error by a row of weights are H = X^T X, the same for all rows.
Once a weight is rounded, the best that the others can do follows from H's inverse (Hassibi & Stork 1993), of
which the Cholesky factor has all that is ever needed, a row for each input.

Legend: N outputs, K inputs, g inputs of a group.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.quant.codes import Codes
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.rounding import Grid, best_grid, in_groups, rounded
from pellucid.quantize.base import COMPRESSED, INTEGERS, ActOrder, Method, packed_format
from pellucid.quantize.inputs import Statistics

DAMP = 0.01  # of H's mean diagonal, added to it
MOST_DAMP = 10.0
BLOCK = 128  # inputs whose errors are passed on at once
BITS = (2, 3, 4, 8)  # that GPTQ's own files have


class Gptq(Method):
    squares = True  # X^T X

    def formats(self) -> tuple[str, LayerFormat]:
        recipe, options = self.recipe, set[str]()
        if recipe.act_order == "group":
            options.add("act_order")
        if recipe.dialect == COMPRESSED or recipe.bits not in BITS:
            format = packed_format(recipe)
            return COMPRESSED, replace(format, options=format.options | options)
        if recipe.symmetric is False:  # version 1 cannot tell a zero of 0, so GPTQModel does not read these
            options |= {"asym", "v2"}
        code = INTEGERS[recipe.bits]
        return "gptq", LayerFormat(layout="gptq", code=code, group=recipe.group, options=frozenset(options))

    def codes(self, weight: Tensor, format: LayerFormat, inputs: Statistics | None) -> Codes:
        if inputs is None:
            return rounded(weight, format)
        return gptq(weight, inputs.hessian, format, self.recipe.act_order)


@torch.no_grad()
def gptq(weight: Tensor, hessian: Tensor, format: LayerFormat, act_order: ActOrder = "static") -> Codes:
    """weight: float32 [N, K]; hessian: [K, K].

    act_order: "static" takes inputs by their size, within groups that stay; "group" makes groups of inputs
    that follow one another in that order, and the codes have an index.
    """
    inputs = weight.shape[1]
    size = format.group.inputs or inputs
    padding = -inputs % size
    work = F.pad(weight.T, (0, 0, 0, padding)).contiguous()  # [K, N]: a row is an input
    hessian = F.pad(hessian, (0, padding, 0, padding))
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1
    work[unused] = 0
    places = torch.arange(len(work), device=work.device)
    order = places if act_order == "none" else hessian.diagonal().argsort(descending=True)
    fixed = best_grid(in_groups(work.T, format.group), format) if act_order == "static" else None
    groups = (order if fixed else places) // size
    factor = inverse_factor(hessian[order][:, order])
    q, grid = passed_on(work[order], factor, groups, format, fixed)
    back = order.argsort()
    index = groups[back][:inputs] if act_order == "group" else None
    return grid.codes(q[back][:inputs].T.contiguous(), format, index)


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, more damped if rounding has made that indefinite."""
    mean, damp = hessian.diagonal().mean(), DAMP
    while damp <= MOST_DAMP:
        damped = hessian.clone()
        damped.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damp *= 10
    raise ValueError("the inputs of a layer are not finite; check the calibration text, or use method int4")


def passed_on(
    work: Tensor, factor: Tensor, groups: Tensor, format: LayerFormat, fixed: Grid | None
) -> tuple[Tensor, Grid]:
    """Round inputs one after the other: (codes [K, N], the grid of all groups).

    work: [K, N], changed.  groups: of each input, int64 [K].  fixed: the grid; None: each group's is made
    when its first input is reached, which is where a block begins.
    """
    num_inputs, size = len(work), format.group.inputs or len(work)
    step = next(n for n in range(min(size, BLOCK), 0, -1) if size % n == 0)
    q, grids = torch.empty_like(work), list[Grid]()
    for start in range(0, num_inputs, step):
        end = min(start + step, num_inputs)
        if fixed is None and start % size == 0:
            grids.append(best_grid(work[start : start + size].T[:, None].contiguous(), format))
        grid = fixed or grids[-1]
        which = groups[start:end] if fixed else torch.zeros_like(groups[start:end])
        scale, zero = grid.scale.T[which].float(), grid.zero.T[which]
        errors = round_block(work[start:end], factor[start:end, start:end], scale, zero, grid, q[start:end])
        work[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    if fixed is not None:
        return q, fixed
    scale, zero = (torch.cat(parts, 1) for parts in zip(*(grid[:2] for grid in grids), strict=True))
    return q, Grid(scale, zero, grids[0].least, grids[0].most)


def round_block(block: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, grid: Grid, q: Tensor) -> Tensor:
    """Round the inputs of a block [B, N] into q, each passing its error on to those behind it.

    Returns the errors [B, N], for the blocks behind this one.
    """
    errors = torch.empty_like(block)
    inverse, diagonal = 1 / scale, factor.diagonal().tolist()
    for i, own in enumerate(diagonal):
        torch.addcmul(zero[i], block[i], inverse[i], out=q[i]).round_().clamp_(grid.least, grid.most)
        torch.sub(block[i], (q[i] - zero[i]).mul_(scale[i]), out=errors[i]).div_(own)
        block[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return errors
