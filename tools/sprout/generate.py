"""Greedy generation for a batch of prompts with a padded key-value cache.  Only for checking sprout here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Qwen3


class Cache:
    """Keys and values of every layer, rows padded on the right; attends over what each row has written."""

    def __init__(self, model: Qwen3, rows: int, length: int, device: torch.device) -> None:
        shape = model.shape
        size = (shape.layers, rows, length, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.zeros((rows, 1), dtype=torch.long, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write this call's keys and values at `positions` [B, L] and attend to all up to them."""
        rows = torch.arange(q.shape[0], device=q.device).unsqueeze(1)
        self.keys[layer, rows, self.positions] = k
        self.values[layer, rows, self.positions] = v
        length = self.keys.shape[2]
        visible = torch.arange(length, device=q.device) <= self.positions.unsqueeze(-1)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[layer].transpose(1, 2),
            self.values[layer].transpose(1, 2),
            attn_mask=visible.unsqueeze(1),
            enable_gqa=True,
        )
        return mixed.transpose(1, 2)


@torch.inference_mode()
def generate(
    model: Qwen3, prompts: list[list[int]], limits: list[int], *, stops: set[int], device: torch.device
) -> list[list[int]]:
    """Continue each prompt greedily up to its limit of new tokens or a stop token (left out)."""
    longest = max(map(len, prompts))
    length = min(model.shape.context, longest + max(limits))
    cache = Cache(model, len(prompts), length, device)
    ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    sizes = torch.tensor([len(p) for p in prompts], device=device)
    # Padding writes its keys too, but every later step overwrites one before it can be seen.
    cache.positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    hidden = model(ids, cache.positions, cache.attend, torch.bfloat16)
    last = hidden[torch.arange(len(prompts), device=device), sizes - 1]
    outputs: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    cache.positions = sizes.unsqueeze(1)
    while running:
        tokens = model.logits(last).argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            if row in running and token not in stops:
                outputs[row].append(token)
            full = len(prompts[row]) + len(outputs[row]) >= length
            if token in stops or full or len(outputs[row]) >= limits[row]:
                running.discard(row)
        hidden = model(tokens.unsqueeze(1), cache.positions, cache.attend, torch.bfloat16)
        last = hidden[:, 0]
        cache.positions = (cache.positions + 1).clamp(max=length - 1)
    return outputs
