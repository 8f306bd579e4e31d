"""Train draft heads for sprout, all at once on the same batches: EAGLE-3, MTP and Medusa; DFlash if it is named.

    python tools/sprout/heads.py --seconds 240 --out pellucid/assets
    python tools/sprout/heads.py --seconds 120 --heads dflash --out pellucid/assets

sprout stays as it is; the heads learn its distributions (soft labels).  EAGLE-3 and MTP are unrolled as they
will run: at depth j a head is fed its own features of depth j - 1 and the text's next token, and attends to what
it made of sprout's states, and behind that to its own features (EAGLE-3's training-time test).  DFlash fills
in blocks behind places that are drawn.  Time is the only budget: the learning rate follows the clock, so the heads
are whole whenever it ends.
Shapes: W windows, L tokens of each, A anchors of each, n places of a block, D model dim, N heads, K key-value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from operator import mul
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data import CONTEXT, ID_MASK, LEARN, SHARES, SOURCES, START, Shards
from export import load
from model import SPROUT, Qwen3, RMSNorm, Weight, linear, packed_attention, rotary_table, rotate
from optim import Muon, orthogonalize

LOG = logging.getLogger("heads")
TAPS = (2, SPROUT.layers // 2, SPROUT.layers - 3)
DEPTH = 4  # drafts in a row that are learned
OWN_EAGLE, OWN_MEDUSA, MEDUSA_HEADS = 1536, 1024, 3
EAGLE_INNER = 640
DFLASH_LAYERS, DFLASH_INNER, DFLASH_BLOCK = 2, 384, 6
ANCHORS = 48  # of a window: where blocks begin
FADING, BLOCK_FADING = 0.8, 0.78  # weight of a draft's loss beside the one before it
# Tables, the second and third of SOURCES, are soon learned; Python, the last, is what is hard to guess.
FACTORS = (1.0, 0.4, 0.4, *(1.0,) * (len(SOURCES) - 4), 8.0)


@dataclass(frozen=True, slots=True)
class Windows:
    """Stretches of packed text and what sprout makes of them.  Documents may begin and end anywhere."""

    ids: Tensor  # [W, L]
    positions: Tensor  # [W, L]
    documents: Tensor  # [W, L], whose token it is
    learned: Tensor  # [W, L] bool
    hidden: Tensor  # [W, L, D] behind the last norm
    taps: Tensor  # [W, L, len(TAPS) * D]

    def mask(self) -> Tensor:
        """[W, 1, L, L]: who sees whom."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return ((self.documents[:, :, None] == self.documents[:, None, :]) & causal)[:, None]

    def ahead(self, x: Tensor, num: int) -> Tensor:
        """x [W, L, ..] of the token `num` places further; what has none there gets any."""
        return torch.roll(x, -num, dims=1)

    def has(self, num: int) -> Tensor:
        """[W, L]: is there a token of the same document so much further, whose distribution is learned?"""
        same = self.ahead(self.documents, num) == self.documents
        same[:, -num:] = False
        return same & self.ahead(self.learned, num)


class Teacher:
    """sprout, and what heads read of it."""

    def __init__(self, folder: Path, device: torch.device, length: int) -> None:
        self.model, self.device, self.length = load(folder, device).requires_grad_(False), device, length
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._streams: dict[int, Tensor] = {}
        for index in TAPS:
            self.model.model.layers[index].register_forward_pre_hook(self._hook(index))

    def _hook(self, index: int):
        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._streams[index] = args[0]

        return keep

    @torch.no_grad()
    def read(self, codes: np.ndarray) -> Windows:
        """A batch of packed codes."""
        ids = (codes & ID_MASK).astype(np.int64)
        starts = np.flatnonzero(codes & START)
        if not len(starts) or starts[0]:
            starts = np.append(0, starts)
        ends = np.append(starts, len(codes))
        positions = np.arange(len(codes)) - np.repeat(starts, np.diff(ends))
        documents = np.repeat(np.arange(len(starts)), np.diff(ends))
        there = [torch.from_numpy(array).to(self.device) for array in (ids, positions, documents)]
        cu_seqlens = torch.from_numpy(ends.astype(np.int32)).to(self.device)
        attend = packed_attention(cu_seqlens, CONTEXT)
        hidden = self.model(there[0], there[1], attend, self.dtype)
        taps = torch.cat([self._streams[index] for index in TAPS], dim=-1)
        learned = torch.from_numpy((codes & LEARN > 0) & (codes & START == 0)).to(self.device)
        cut = (x.unflatten(0, (-1, self.length)) for x in (*there, learned, hidden, taps))
        return Windows(*cut)

    @torch.no_grad()
    def chances(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V] float32."""
        return self.model.logits(hidden).float().softmax(-1)


class Attention(nn.Module):
    """Grouped-query attention of one depth, over the keys of depth 0 and each place's own of the depths between."""

    def __init__(self, width: int, *, qk_norm: bool) -> None:
        super().__init__()
        std, head = width**-0.5, SPROUT.head_dim
        self.q_proj = Weight(SPROUT.heads * head, width, std=std)
        self.k_proj = Weight(SPROUT.kv_heads * head, width, std=std)
        self.v_proj = Weight(SPROUT.kv_heads * head, width, std=std)
        self.o_proj = Weight(SPROUT.hidden, SPROUT.heads * head, std=0.0)
        if qk_norm:
            self.q_norm, self.k_norm = RMSNorm(head, SPROUT.rms_eps), RMSNorm(head, SPROUT.rms_eps)
        self.has_norm = qk_norm

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [W, L, width] of the depth after `before`, whose keys and values [W, L, N, H] are appended."""
        qkv = linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        heads, kv_heads = SPROUT.heads, SPROUT.kv_heads
        q, k, v = qkv.unflatten(-1, (-1, SPROUT.head_dim)).split((heads, kv_heads, kv_heads), dim=-2)
        if self.has_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotary), rotate(k, rotary)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=-2) for t in (k, v))
        before.append((k, v))
        keys, values = before[0]
        if len(before) == 1:
            q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(1, 2)
        else:
            scale = SPROUT.head_dim**-0.5
            scores = (q.transpose(1, 2) @ keys.permute(0, 2, 3, 1)).float() * scale  # [W, N, L, L]
            scores = scores.masked_fill(~mask, -torch.inf)
            own = [(q * key).sum(-1).transpose(1, 2)[..., None].float() * scale for key, _ in before[1:]]
            weights = torch.cat((scores, *own), dim=-1).softmax(-1).to(q.dtype)
            length = keys.shape[1]
            out = (weights[..., :length] @ values.transpose(1, 2)).transpose(1, 2)
            for i, (_, value) in enumerate(before[1:]):
                out = out + weights[..., length + i].transpose(1, 2)[..., None] * value
        return linear(out.flatten(-2), self.o_proj.weight)


class MLP(nn.Module):
    """Gated, `inner` wide."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        std = SPROUT.hidden**-0.5
        self.gate_proj = Weight(inner, SPROUT.hidden, std=std)
        self.up_proj = Weight(inner, SPROUT.hidden, std=std)
        self.down_proj = Weight(SPROUT.hidden, inner, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_proj.weight, self.up_proj.weight).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down_proj.weight)


def norm() -> RMSNorm:
    return RMSNorm(SPROUT.hidden, SPROUT.rms_eps)


class Block(nn.Module):
    """A decoder layer's parts by their public names; the head adds them up."""

    def __init__(self, width: int, inner: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = Attention(width, qk_norm=qk_norm)
        self.post_attention_layernorm = norm()
        self.mlp = MLP(inner)


class Eagle3(nn.Module):
    """pellucid/spec/eagle3.py, as it is trained."""

    def __init__(self, own: Tensor) -> None:
        super().__init__()
        dim = SPROUT.hidden
        self.fc = Weight(dim, len(TAPS) * dim, std=(len(TAPS) * dim) ** -0.5)
        self.midlayer = Block(2 * dim, EAGLE_INNER, qk_norm=False)
        self.midlayer.hidden_norm = norm()
        self.norm = norm()
        self.lm_head = Weight(len(own), dim, std=dim**-0.5)
        self.own = own

    def begin(self, windows: Windows) -> Tensor:
        """[W, L, D] of sprout's states."""
        return linear(windows.taps, self.fc.weight)

    def forward(self, embedded: Tensor, x: Tensor, rotary, mask: Tensor, before: list) -> Tensor:
        layer = self.midlayer
        pair = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(x)), dim=-1)
        x = x + layer.self_attn(pair, rotary, mask, before)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, x: Tensor) -> Tensor:
        return linear(self.norm(x), self.lm_head.weight)


class Mtp(nn.Module):
    """pellucid/spec/mtp.py, as it is trained."""

    def __init__(self, teacher: Qwen3) -> None:
        super().__init__()
        dim = SPROUT.hidden
        self.fc = Weight(dim, 2 * dim, std=(2 * dim) ** -0.5)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        self.layers = nn.ModuleList([Block(dim, SPROUT.intermediate, qk_norm=True)])
        self.norm = norm()
        self.head = [teacher]  # in a list, so that it is no part of this
        self.own = None

    def begin(self, windows: Windows) -> Tensor:
        return windows.hidden

    def forward(self, embedded: Tensor, x: Tensor, rotary, mask: Tensor, before: list) -> Tensor:
        layer = self.layers[0]
        pair = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(x)
        x = linear(torch.cat(pair, dim=-1), self.fc.weight)
        x = x + layer.self_attn(layer.input_layernorm(x), rotary, mask, before)
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))

    def logits(self, x: Tensor) -> Tensor:
        return self.head[0].logits(x)


class Medusa(nn.Module):
    """pellucid/spec/medusa.py, as it is trained: one residual block a head."""

    def __init__(self, own: Tensor, first: Tensor) -> None:
        """first: [W, D], where the projections begin."""
        super().__init__()
        dim = SPROUT.hidden
        self.blocks = nn.ModuleList(Weight(dim, dim, std=0.0) for _ in range(MEDUSA_HEADS))
        self.lm_heads = nn.ModuleList(Weight(len(own), dim, std=0.0) for _ in range(MEDUSA_HEADS))
        for lm_head in self.lm_heads:
            lm_head.weight.data.copy_(first)
        self.own = own

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        x = hidden + F.silu(linear(hidden, self.blocks[head].weight))
        return linear(x, self.lm_heads[head].weight)


class BlockAttention(nn.Module):
    """Attention of blocks over a context that does not attend, and over themselves."""

    def __init__(self) -> None:
        super().__init__()
        dim, head = SPROUT.hidden, SPROUT.head_dim
        self.q_proj = Weight(SPROUT.heads * head, dim, std=dim**-0.5)
        self.k_proj = Weight(SPROUT.kv_heads * head, dim, std=dim**-0.5)
        self.v_proj = Weight(SPROUT.kv_heads * head, dim, std=dim**-0.5)
        self.o_proj = Weight(dim, SPROUT.heads * head, std=0.0)
        self.q_norm, self.k_norm = RMSNorm(head, SPROUT.rms_eps), RMSNorm(head, SPROUT.rms_eps)

    def forward(self, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [W, A * n, D], context [W, L, D].  rotary: of the context, then of x.  mask: [W, A * n, L + A * n]."""
        num, heads = context.shape[1], SPROUT.heads
        q = linear(x, self.q_proj.weight).unflatten(-1, (heads, -1))
        both = linear(torch.cat((context, x), dim=1), self.k_proj.weight, self.v_proj.weight)
        k, v = both.unflatten(-1, (2 * SPROUT.kv_heads, -1)).chunk(2, dim=-2)
        cos, sin = rotary
        q, k = rotate(self.q_norm(q), (cos[:, num:], sin[:, num:])), rotate(self.k_norm(k), rotary)
        k, v = (t.repeat_interleave(heads // SPROUT.kv_heads, dim=-2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2)
        return linear(out.flatten(-2), self.o_proj.weight)


class BlockLayer(nn.Module):
    """A decoder layer by its public names."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = BlockAttention(), MLP(DFLASH_INNER)

    def forward(self, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotary, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """pellucid/spec/dflash.py, as it is trained."""

    def __init__(self, teacher: Qwen3) -> None:
        super().__init__()
        dim = SPROUT.hidden
        self.fc = Weight(dim, len(TAPS) * dim, std=(len(TAPS) * dim) ** -0.5)
        self.hidden_norm, self.norm = norm(), norm()
        self.layers = nn.ModuleList(BlockLayer() for _ in range(DFLASH_LAYERS))
        self.mask_embedding = nn.Parameter(torch.randn(dim) * 0.1)
        self.head = [teacher]  # in a list, so that it is no part of this

    def forward(
        self, windows: Windows, anchors: Tensor, num: int, table: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[W, A, num - 1, D] of the masked places of blocks that begin at `anchors` [W, A].

        table: sprout's embeddings.  rotary: of all positions.
        """
        context = self.hidden_norm(linear(windows.taps, self.fc.weight))
        first = F.embedding(windows.ids.gather(1, anchors), table).to(context.dtype)[:, :, None]
        masks = self.mask_embedding.to(context.dtype).expand(*anchors.shape, num - 1, -1)
        x = torch.cat((first, masks), dim=2).flatten(1, 2)
        steps = torch.arange(num, device=anchors.device)
        behind = windows.positions.gather(1, anchors)[:, :, None] + steps
        at = torch.cat((windows.positions, behind.flatten(1)), dim=1).clamp(max=CONTEXT - 1)
        turns = rotary[0][at].unsqueeze(-2), rotary[1][at].unsqueeze(-2)
        mask = self.mask(windows, anchors, num)
        for layer in self.layers:
            x = layer(x, context, turns, mask)
        return self.norm(x).unflatten(1, (-1, num))[:, :, 1:]

    @staticmethod
    def mask(windows: Windows, anchors: Tensor, num: int) -> Tensor:
        """[W, A * num, L + A * num]: a block sees what of its document lies before it, and itself."""
        places = torch.arange(windows.ids.shape[1], device=anchors.device)
        owner = windows.documents.gather(1, anchors)
        context = (places < anchors[:, :, None]) & (windows.documents[:, None] == owner[:, :, None])
        blocks = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device)
        own = blocks.repeat_interleave(num, 0).repeat_interleave(num, 1).expand(len(anchors), -1, -1)
        return torch.cat((context.repeat_interleave(num, 1), own), dim=-1)

    def logits(self, x: Tensor) -> Tensor:
        return self.head[0].logits(x)


@dataclass(frozen=True, slots=True)
class Guess:
    """What a head says at some places, and what sprout does."""

    logits: Tensor  # [n, own V]
    chances: Tensor  # [n, V] float32
    own: Tensor | None  # [own V], which tokens these are; None: all

    def loss(self) -> Tensor:
        """Cross-entropy over the tokens that the head can name."""
        chances = self.chances if self.own is None else self.chances[:, self.own]
        return -(chances * self.logits.float().log_softmax(-1)).sum() / max(1, len(chances))

    def hits(self) -> Tensor:
        """[n] bool: is the likeliest token sprout's?"""
        best = self.logits.argmax(-1)
        return (best if self.own is None else self.own[best]) == self.chances.argmax(-1)


class Heads:
    """All of them, on the same windows."""

    def __init__(self, teacher: Teacher, own: Tensor, capacity: int, wanted: Sequence[str]) -> None:
        """own: tokens by how often sprout says them.  capacity: places of a batch that are learned.

        wanted: which of them.
        """
        self.wanted, self.num_filled = wanted, 0
        self.teacher, self.capacity, device = teacher, capacity, teacher.device
        embedding = teacher.model.model.embed_tokens.weight.float()
        of_eagle, of_medusa = (own[:num].sort().values for num in (OWN_EAGLE, OWN_MEDUSA))
        self.eagle3 = Eagle3(of_eagle).to(device)
        self.eagle3.lm_head.weight.data.copy_(embedding[of_eagle])
        self.mtp = Mtp(teacher.model).to(device)
        self.medusa = Medusa(of_medusa, embedding[of_medusa]).to(device)
        self.dflash = DFlash(teacher.model).to(device)
        cos, sin = rotary_table(SPROUT)
        self.cos, self.sin = cos.to(device, teacher.dtype), sin.to(device, teacher.dtype)

    def modules(self) -> dict[str, nn.Module]:
        """By name, those that are wanted."""
        known = {"eagle3": self.eagle3, "mtp": self.mtp, "medusa": self.medusa, "dflash": self.dflash}
        return {name: known[name] for name in self.wanted}

    def guesses(self, windows: Windows, name: str) -> Iterator[tuple[Tensor, Guess]]:
        """Of each depth: places [n], and what is guessed there of the token depth + 2 further."""
        head = self.modules()[name]
        if isinstance(head, DFlash):
            yield from self._filled(head, windows)
            return
        mask = windows.mask()
        embed = self.teacher.model.model.embed_tokens.weight
        x = None if isinstance(head, Medusa) else head.begin(windows)
        before: list[tuple[Tensor, Tensor]] = []
        for depth in range(MEDUSA_HEADS if x is None else DEPTH):
            places = self._places(windows, depth)
            if x is not None:
                embedded = F.embedding(windows.ahead(windows.ids, 1 + depth), embed).to(x.dtype)
                at = (windows.positions + depth).clamp(max=CONTEXT - 1)
                rotary = self.cos[at].unsqueeze(-2), self.sin[at].unsqueeze(-2)
                x = head(embedded, x, rotary, mask, before)
                logits = head.logits(x.flatten(0, 1)[places])
            else:
                logits = head.logits(windows.hidden.flatten(0, 1)[places], depth)
            states = windows.ahead(windows.hidden, 1 + depth).flatten(0, 1)[places]
            yield places, Guess(logits, self.teacher.chances(states), head.own)

    def _filled(self, head: DFlash, windows: Windows) -> Iterator[tuple[Tensor, Guess]]:
        """The same of blocks behind drawn anchors, which are by turns shorter: engines draft fewer, too."""
        self.num_filled += 1
        num = DFLASH_BLOCK - self.num_filled % 3 if head.training else 1 + DEPTH
        num_windows, length = windows.ids.shape
        drawn = torch.rand(num_windows, length - num, device=windows.ids.device).argsort(1)
        anchors = drawn[:, :ANCHORS].sort(1).values
        table = self.teacher.model.model.embed_tokens.weight
        filled = head(windows, anchors, num, table, (self.cos, self.sin))
        first = anchors + torch.arange(num_windows, device=anchors.device)[:, None] * length
        for depth in range(num - 1):
            known = windows.has(1 + depth).gather(1, anchors)
            states = windows.hidden.flatten(0, 1)[first[known] + depth]
            guess = Guess(head.logits(filled[:, :, depth][known]), self.teacher.chances(states), None)
            yield first[known], guess

    def _places(self, windows: Windows, depth: int) -> Tensor:
        return windows.has(2 + depth).flatten().nonzero()[:, 0][: self.capacity]

    def loss(self, windows: Windows, name: str) -> Tensor:
        fading = BLOCK_FADING if name == "dflash" else FADING
        return sum(fading**i * guess.loss() for i, (_, guess) in enumerate(self.guesses(windows, name)))

    @torch.no_grad()
    def acceptance(self, batches: list[Windows], name: str) -> list[float]:
        """Of the first, the first two, .. drafts the share that is sprout's likeliest, along given text."""
        num, hits = 0, [0.0] * DEPTH
        for windows in batches:
            standing = windows.has(2 + (MEDUSA_HEADS if name == "medusa" else DEPTH) - 1).flatten()
            for depth, (places, guess) in enumerate(self.guesses(windows, name)):
                if depth == 0:
                    standing &= torch.zeros_like(standing).index_fill(0, places, True)
                    num += int(standing.sum())
                right = torch.zeros_like(standing)
                right[places] = guess.hits()
                standing = standing & right
                hits[depth] += float(standing.sum())
        return [hit / max(1, num) for hit in hits]


class Optimizer:
    """Muon for matrices, AdamW for norms and projections to tokens."""

    def __init__(self, heads: Heads, lr: float) -> None:
        named = [pair for head in heads.modules().values() for pair in head.named_parameters()]
        matrices = [p for name, p in named if p.ndim == 2 and "lm_head" not in name]
        rest = [p for name, p in named if not (p.ndim == 2 and "lm_head" not in name)]
        muon = Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.01)
        muon._orthogonalize = orthogonalize  # as it is: to compile it takes longer than it saves here
        adam = torch.optim.AdamW(rest, lr=lr / 10, betas=(0.9, 0.97), weight_decay=0.0, fused=rest[0].is_cuda)
        self._peaks = ((muon, lr), (adam, lr / 10))

    def step(self, factor: float) -> None:
        for optimizer, peak in self._peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def common_tokens(teacher: Teacher, batches: list[np.ndarray]) -> Tensor:
    """All tokens, those first that sprout most often finds likeliest."""
    counts = torch.zeros(SPROUT.vocab, device=teacher.device)
    for codes in batches:
        windows = teacher.read(codes)
        hidden = windows.hidden.flatten(0, 1)[windows.learned.flatten()]
        for part in hidden.split(1 << 14):
            counts += teacher.chances(part).sum(0)
    return counts.argsort(descending=True, stable=True)


def drawn_ahead(shards: Shards, workers: int) -> Generator[np.ndarray, None, None]:
    """Batches without end, as many shards under way as keep the workers busy; tables at full length."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with get_context("fork").Pool(workers) as pool:
        numbers = count(1 << 18)
        waiting = deque(pool.apply_async(shards.make, (next(numbers),)) for _ in range(2 * workers))
        while True:
            waiting.append(pool.apply_async(shards.make, (next(numbers),)))
            yield from waiting.popleft().get()


def train(options: argparse.Namespace, device: torch.device) -> None:
    began = time.time()
    teacher = Teacher(options.model, device, options.window)
    shards = Shards(
        tokenizer_file=options.model / "tokenizer.json", seed=options.seed, num_shards=1 << 20,
        batches=4, batch_tokens=options.batch_tokens, shares=tuple(map(mul, SHARES, FACTORS)),
    )  # fmt: skip
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    held = replace(shards, seed=options.seed + 1).make(1 << 19)
    python = replace(shards, seed=options.seed + 2, shares=(1e-9,) * (len(SOURCES) - 1) + (1.0,)).make(
        1 << 19
    )
    stream = drawn_ahead(shards, options.workers)
    torch.manual_seed(options.seed)
    own = common_tokens(teacher, list(held))
    heads = Heads(teacher, own, options.batch_tokens // 3, options.heads)
    optimizer = Optimizer(heads, options.lr)
    LOG.info("%.0f s to begin", time.time() - began)
    start, step = time.time(), 0
    deadline = began + options.seconds
    while (now := time.time()) < deadline and step < options.steps:
        progress = max((now - start) / (deadline - start), step / options.steps)
        windows, losses = teacher.read(next(stream)), {}
        for name in heads.modules():
            loss = heads.loss(windows, name)
            loss.backward()
            losses[name] = loss.detach()
        optimizer.step(min(1.0, (step + 1) / 50) * min(1.0, (1 - progress) / 0.6))
        step += 1
        if step % 50 == 0 or step == options.steps:
            said = ", ".join(f"{name} {float(loss):.3f}" for name, loss in losses.items())
            speed = step * options.batch_tokens / (time.time() - start) / 1e6
            LOG.info("step %d, %.0f s: %s; %.2f M tokens/s", step, time.time() - began, said, speed)
    export(heads, options.model, options.out)
    stream.close()
    for task, batches in {"mixture": held, "python": python}.items():
        for name, head in heads.modules().items():
            head.eval()
            rates = heads.acceptance([teacher.read(codes) for codes in batches[:2]], name)
            length = 1 + sum(rates)
            LOG.info("%s %s: %.2f tokens, %s", task, name, length, " ".join(f"{rate:.1%}" for rate in rates))
    LOG.info("%.0f s in all", time.time() - began)


def export(heads: Heads, model: Path, out: Path) -> None:
    """Write the heads in their public layouts, and MTP's tensors beside sprout's own, with an index of both."""
    own = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layer = {name: own[name] for name in (
        "dtype", "torch_dtype", "head_dim", "hidden_act", "hidden_size", "max_position_embeddings",
        "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size",
    )}  # fmt: skip
    if "eagle3" in heads.wanted:
        eagle3 = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer, "num_hidden_layers": 1,
            "intermediate_size": EAGLE_INNER, "draft_vocab_size": OWN_EAGLE, "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
        }  # fmt: skip
        tensors = plain(heads.eagle3)
        ids = heads.eagle3.own.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        write(out / "sprout-eagle3", eagle3, tensors)
    if "medusa" in heads.wanted:
        medusa = {
            "model_type": "medusa", "medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1,
            "truncated_vocab_size": OWN_MEDUSA, "hidden_size": SPROUT.hidden, "vocab_size": SPROUT.vocab,
            "torch_dtype": "bfloat16",
        }  # fmt: skip
        tensors = {
            name.replace(".weight", ".layers.0.weight") if name.startswith("blocks.") else name: tensor
            for name, tensor in plain(heads.medusa).items()
        }
        tensors["token_map"] = heads.medusa.own.cpu()
        write(out / "sprout-medusa", medusa, tensors)
    if "dflash" in heads.wanted:
        dflash = {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **layer, "attention_bias": False,
            "num_hidden_layers": DFLASH_LAYERS, "intermediate_size": DFLASH_INNER, "tie_word_embeddings": False,
            "num_target_layers": SPROUT.layers, "block_size": DFLASH_BLOCK, "dflash_config": {
                "mask_token_id": SPROUT.vocab, "target_layer_ids": [tap - 1 for tap in TAPS],
            },
        }  # fmt: skip
        write(out / "sprout-dflash", dflash, plain(heads.dflash))
    if "mtp" in heads.wanted:
        export_mtp(heads, model, out / "sprout")


def export_mtp(heads: Heads, model: Path, folder: Path) -> None:
    """Beside sprout's own tensors, with an index of both."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"mtp.{name}": tensor for name, tensor in plain(heads.mtp).items()}
    save(tensors, folder / "mtp.safetensors")
    shard = "model.safetensors"
    places = dict.fromkeys(load_file(str(model / shard)), shard) | dict.fromkeys(tensors, "mtp.safetensors")
    index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def plain(head: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in head.state_dict().items()}


def write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save(tensors, folder / "model.safetensors")


def save(tensors: dict[str, Tensor], file: Path) -> None:
    save_file(tensors, str(file), metadata={"format": "pt"})
    LOG.info("%s: %.2f MB", file, file.stat().st_size / 1e6)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("pellucid/assets/sprout"))
    parser.add_argument("--out", type=Path, default=Path("pellucid/assets"))
    parser.add_argument("--seconds", type=float, default=240.0, help="of all but the last figures")
    parser.add_argument("--heads", nargs="+", default=["eagle3", "mtp", "medusa"], help="or dflash")
    parser.add_argument("--steps", type=int, default=10**9, help="at most")
    parser.add_argument("--batch-tokens", type=int, default=1 << 16)
    parser.add_argument(
        "--window", type=int, default=512, help="tokens over which a head attends while it learns"
    )
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train(parse_options(), device)


if __name__ == "__main__":
    main()
