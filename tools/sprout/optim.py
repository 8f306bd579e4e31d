"""Muon for the matrices inside the layers (Jordan et al., 2024: https://kellerjordan.github.io/posts/muon),
AdamW for the embedding and the norms, and the learning-rate schedule.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalize(stack: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix of a stack [M, rows, columns] towards one (Newton-Schulz)."""
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal; matrices of one shape are orthogonalized together."""

    def __init__(
        self, params: list[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            by_shape.setdefault(param.shape, []).append(param)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._orthogonalize = torch.compile(orthogonalize) if params[0].is_cuda else orthogonalize

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = group["params"]
            grads = [param.grad for param in params]
            for param in params:
                if not self.state[param]:
                    self.state[param]["momentum"] = torch.zeros_like(param)
            buffers = [self.state[param]["momentum"] for param in params]
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
            updates = self._orthogonalize(torch.stack(nesterov)).unbind()
            rows, columns = params[0].shape
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


class Optimizers:
    """Both optimizers as one, with a shared schedule."""

    def __init__(self, model: nn.Module, *, muon_lr: float = 0.02, adam_lr: float = 0.003) -> None:
        named = list(model.named_parameters())
        matrices = [param for name, param in named if ".layers." in name and param.ndim == 2]
        rest = [param for name, param in named if not (".layers." in name and param.ndim == 2)]
        muon = Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.02)
        fused = rest[0].is_cuda
        adam = torch.optim.AdamW(
            rest, lr=adam_lr, betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0, fused=fused
        )
        self._peaks = ((muon, muon_lr), (adam, adam_lr))

    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` times the peak learning rates, and clear them."""
        for optimizer, peak in self._peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        return [optimizer.state_dict() for optimizer, _ in self._peaks]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        for (optimizer, _), state in zip(self._peaks, states, strict=True):
            optimizer.load_state_dict(state)


def schedule(step: int, steps: int, *, warmup: int = 150, decay_from: float = 0.35) -> float:
    """Give the learning rate's factor: a short warm-up, a plateau, then a straight line down to zero."""
    progress = step / steps
    down = min(1.0, (1.0 - progress) / (1.0 - decay_from))
    return min(1.0, (step + 1) / warmup) * down
