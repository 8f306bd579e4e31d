"""Ragged rows over a shuffled paged cache, and attention written the obvious way to judge backends by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pellucid.attention.base import QKNorm
from pellucid.forward import ForwardInput, TreeMask
from tests.trees import ancestor_bits, depths_of, paths_of


@dataclass(kw_only=True)
class Rows:
    """Some rows of one step, and the layer that they go through: no norm, no rope.

    `history` holds each row's true keys and values [seq_len, 2, K, H] in order.
    """

    query_lens: list[int]
    seq_lens: list[int]
    num_heads: int
    history: list[Tensor]
    q: Tensor  # [T, N, H]
    k: Tensor  # [T, K, H]
    v: Tensor  # [T, K, H]
    kv_cache: Tensor  # holds all keys and values but this step's
    fwd: ForwardInput
    scale: float
    window: int | None = None
    chunk: int | None = None
    table: int = 0
    k_scale: float = 1.0
    sinks: Tensor | None = None
    softcap: float | None = None
    v_scale: float = 1.0
    qk_norm: QKNorm | None = None
    rope: Tensor | None = None
    interleaved: bool = False
    is_last: bool = False
    parents: tuple[int, ...] = ()  # of the trees that `num_drafts` drafts of each row are
    num_drafts: list[int] | None = None
    is_mutual: bool = False  # the queries of each row see each other

    @property
    def qkv(self) -> Tensor:
        """The packed projection [T, (N + 2K) * H]."""
        return torch.cat((self.q, self.k, self.v), dim=1).flatten(1)

    def expected(self) -> Tensor:
        """Naive attention in float64.  [T, N * H]"""
        starts = [sum(self.query_lens[:i]) for i in range(len(self.query_lens))]
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        facts = zip(starts, self.query_lens, self.seq_lens, self.history, strict=True)
        for row, (start, num_query, seq_len, kv) in enumerate(facts):
            sees = torch.zeros(num_query, seq_len, dtype=torch.bool)
            for i in range(num_query):
                sees[i, self.seen(row, seq_len - num_query + i)] = True
            keys, values = kv.double().cpu().unbind(1)
            q = self.q[start : start + num_query].double().cpu()
            out[start : start + num_query] = attend_row(
                q, keys, values, sees, self.scale, sinks=self.sinks, softcap=self.softcap
            )
        return out.flatten(1)

    def seen(self, row: int, place: int) -> list[int]:
        """The places that the query at a place of a row sees."""
        if self.is_mutual:
            return [*range(max(0, place + 1 - (self.window or place + 1)), self.seq_lens[row])]
        num_drafts = self.num_drafts[row] if self.num_drafts else 0
        root = self.seq_lens[row] - num_drafts - 1
        path = paths_of(self.parents)[max(0, place - root)]
        position = min(place, root) + len(path)
        oldest = 0 if self.window is None else max(0, position - self.window + 1)
        oldest = oldest if self.chunk is None else position // self.chunk * self.chunk
        return [*range(oldest, min(place, root) + 1), *(root + draft for draft in path)]

    def open(self) -> Rows:
        """Let all queries of each row see each other."""
        self.is_mutual, device = True, self.q.device
        bits = [(1 << num) - 1 for num in self.query_lens for _ in range(num)]
        firsts = [seq_len - num for num, seq_len in zip(self.query_lens, self.seq_lens, strict=True)]
        first_drafts = torch.tensor(firsts, dtype=torch.int32, device=device)
        self.fwd.tree = TreeMask(torch.tensor(bits, device=device), first_drafts)
        return self

    def plant(self, parents: tuple[int, ...], num_drafts: list[int]) -> Rows:
        """Let the last `num_drafts` queries of each row be the first drafts of such trees."""
        self.parents, self.num_drafts = parents, num_drafts
        depths, bits, ancestors = depths_of(parents), ancestor_bits(parents), []
        for query_len, seq_len, num in zip(self.query_lens, self.seq_lens, num_drafts, strict=True):
            assert num < query_len, f"{num} drafts among {query_len} queries"
            first, root = len(ancestors), seq_len - num - 1
            nodes = [max(0, place - root) for place in range(seq_len - query_len, seq_len)]
            ancestors += [bits[node] for node in nodes]
            shift = torch.tensor([depths[node] - node for node in nodes], device=self.q.device)
            self.fwd.positions[first : len(ancestors)] += shift
        padding = len(self.q) - len(ancestors)
        first_drafts = [seq_len - num for seq_len, num in zip(self.seq_lens, num_drafts, strict=True)]
        self.fwd.tree = TreeMask(
            torch.tensor(ancestors + [0] * padding, device=self.q.device),
            torch.tensor(first_drafts + [1] * padding, dtype=torch.int32, device=self.q.device),
        )
        return self


def attend_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sees: Tensor,
    scale: float,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Queries [Q, N, H] over the keys and values [S, K, H] that each sees [Q, S], head by head."""
    group_size = q.shape[1] // keys.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ keys[:, head // group_size].T * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~sees, -torch.inf)
        sink = -torch.inf if sinks is None else float(sinks[head])
        weights = torch.softmax(pad(scores, (0, 1), value=sink), dim=1)[:, :-1]
        out[:, head] = weights @ values[:, head // group_size]
    return out


def make_rows(
    lens: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    num_padding: int = 0,
    spare_columns: int = 2,
    stale: float = torch.nan,
) -> Rows:
    """Rows of (num_query, seq_len) tokens, blocks shuffled over a cache.

    stale: what is found in the cache where nothing was written.
    num_padding: rows with one query and no sequence behind the others, as a graph's bucket has.
    """
    random = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    query_lens, seq_lens = [q for q, _ in lens], [s for _, s in lens]
    history = [torch.randn(s, 2, num_kv_heads, head_dim, generator=random).to(dtype) for s in seq_lens]
    widths = [-(-s // block_size) for s in seq_lens]
    num_blocks = sum(widths) + 4
    shuffled = torch.randperm(num_blocks - 1, generator=random) + 1
    table = torch.zeros(len(lens) + num_padding, max(widths, default=0) + spare_columns, dtype=torch.int32)
    cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), stale, dtype=dtype)
    slots, positions, new = [], [], []
    for i, (num_query, seq_len) in enumerate(lens):
        table[i, : widths[i]] = shuffled[sum(widths[:i]) : sum(widths[: i + 1])]
        at = torch.arange(seq_len)
        block, offset = table[i, at // block_size].long(), at % block_size
        old = seq_len - num_query
        cache[block[:old], :, :, offset[:old]] = history[i][:old]
        slots.append((block * block_size + offset)[old:])
        positions.append(at[old:])
        new.append(history[i][old:])
    pad = torch.zeros(num_padding, dtype=torch.long)
    fresh = torch.cat([*new, torch.zeros(num_padding, 2, num_kv_heads, head_dim, dtype=dtype)])
    query_lens_all = query_lens + [1] * num_padding
    q = torch.randn(sum(query_lens_all), num_heads, head_dim, generator=random).to(dtype)
    fwd = ForwardInput(
        input_ids=torch.zeros(len(q), dtype=torch.int32, device=device),
        positions=torch.cat([*positions, pad]).to(device),
        slots=torch.arange(len(query_lens_all), device=device),
        cu_seqlens_q=torch.tensor([0, *query_lens_all]).cumsum(0).int().to(device),
        seq_lens=torch.tensor([*seq_lens, *pad.tolist()], dtype=torch.int32, device=device),
        block_tables=(table.to(device),),
        slot_mappings=(torch.cat([*slots, pad]).to(device),),
        logits_index=torch.zeros(0, dtype=torch.long, device=device),
        query_lens=query_lens_all,
        max_query=max(query_lens_all),
    )
    return Rows(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=num_heads,
        history=history,
        q=q.to(device),
        k=fresh[:, 0].to(device),
        v=fresh[:, 1].to(device),
        kv_cache=cache.to(device),
        fwd=fwd,
        scale=head_dim**-0.5,
        window=window,
        chunk=chunk,
    )
