"""Attention in plain torch: the backend of CPUs, and the oracle of every other backend.

Rows fall into two shapes.  Short rows (decodes, verifications) of equal width run together, their query heads
packed into the query rows; long rows (prompt chunks) run alone, in tiles of queries.  Either way a row's
arithmetic has a shape that depends on that row only, so its result does not depend on its company.

Legend: T tokens, B rows, Q queries a row, S keys, N query heads, K KV heads, G query heads a KV head, H head
dim, M query rows once the heads of a group are packed (G * Q).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pellucid.attention.base import AttentionLayer, AttentionSpec
from pellucid.forward import ForwardInput, TreeMask
from pellucid.kernels.attention.fp8_cache import is_fp8, limit_of
from pellucid.kernels.attention.qkv_rope import qkv_heads
from pellucid.platform import Platform
from pellucid.transfer import upload

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_SHORT_QUERY = 8  # queries of a row that is worth batching with others
MAX_BATCH_BYTES = 4 << 20  # keys and values that short rows gather at once: they stay in a CPU's cache
QUERY_TILE = 512  # queries of a long row that attend at once: bounds the mask and the work above the diagonal


class TorchAttention:
    """Gather each row's blocks from the paged cache, then torch's scaled_dot_product_attention over them."""

    max_graph_query: ClassVar[int] = 0
    supports_tile_maps: ClassVar[bool] = False
    max_graph_keys: ClassVar[int | None] = None
    supports_trees: ClassVar[bool] = True

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        """None if this backend can serve `spec` on this hardware, else the reason in words."""
        if spec.dtype not in DTYPES:
            return f"computes in float32, bfloat16 or float16, not {spec.dtype}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads do not divide into {spec.num_kv_heads} KV heads"
        return None

    @staticmethod
    def describe(spec: AttentionSpec, platform: Platform) -> str:
        """What attends, for the log."""
        return "torch's operations" + (", slower than Triton's kernels" if platform.device == "cuda" else "")

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]; on the second axis keys, then values."""
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def metadata(self, fwd: ForwardInput, table: int) -> TorchMetadata:
        """Read lengths and tables to the host, once a step; what a layer's shape adds follows on demand."""
        return TorchMetadata(
            query_lens=fwd.cu_seqlens_q.diff().tolist(),
            seq_lens=fwd.seq_lens.tolist(),
            block_table=fwd.block_tables[table].cpu().numpy(),
            slot_mapping=fwd.slot_mappings[table].cpu().numpy(),
            device=fwd.seq_lens.device,
            sight=CAUSAL if fwd.tree is None else TreeSight.of(fwd.positions, fwd.tree),
        )

    def forward(self, qkv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> Tensor:
        """Write k, v of qkv [T, (N + 2K) * H] to the cache, then attend with q.  Returns [T, N * H].

        Tokens that belong to no row, as padding does, get zeros.
        """
        metadata = fwd.attn[layer.table]
        assert isinstance(metadata, TorchMetadata)
        _, _, num_kv_heads, _, head_dim = layer.kv_cache.shape
        how = {"norm": layer.qk_norm, "rope": layer.rope, "interleaved": layer.interleaved}
        q, k, v = qkv_heads(qkv, fwd.positions, num_kv_heads, head_dim, **how)
        work = metadata.work_for(layer, q)
        clear(layer.kv_cache, work.begun)
        write(k, v, layer, work.write_lines)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for batch in work.short:
            batch.attend(q, layer, out)
        for row in work.long:
            row.attend(q, layer, out)
        if layer.v_scale != 1:
            out *= layer.v_scale
        return out.flatten(1)

    def write(self, kv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> None:
        """Write k, v of kv [T, 2K * H] to the cache."""
        metadata = fwd.attn[layer.table]
        assert isinstance(metadata, TorchMetadata)
        _, _, num_kv_heads, _, head_dim = layer.kv_cache.shape
        norm = None if layer.qk_norm is None else layer.qk_norm.of_last(num_kv_heads)
        how = {"norm": norm, "rope": layer.rope, "interleaved": layer.interleaved}
        _, k, v = qkv_heads(kv, fwd.positions, num_kv_heads, head_dim, **how)
        shape = Shape.of(layer, k)
        clear(layer.kv_cache, metadata.begun(shape))
        write(k, v, layer, metadata.write_lines(shape))

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values from places [B, n] to others; all are read before any is written."""
        cache, size = plain(kv_cache), kv_cache.shape[3]
        cache[targets // size, :, :, targets % size] = cache[sources // size, :, :, sources % size]


@dataclass(slots=True, kw_only=True)
class TorchMetadata:
    """One step's rows with one block table, on the host: numpy, because the arrays are small."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: np.ndarray  # [B, M]
    slot_mapping: np.ndarray  # [T]
    device: torch.device
    sight: Sight
    works: dict[Shape, Work] = field(default_factory=dict)

    def work_for(self, layer: AttentionLayer, q: Tensor) -> Work:
        """The step's work for layers of this shape: made for the first of them, shared by the rest."""
        return self.work_of(Shape.of(layer, q))

    def work_of(self, shape: Shape) -> Work:
        """The same, of layers whose shape is known."""
        work = self.works.get(shape)
        if work is None:
            work = self.works[shape] = self.make_work(shape)
        return work

    def make_work(self, shape: Shape) -> Work:
        """Sort the rows into batches of short rows and single long ones."""
        short: dict[tuple[int, int], list[RowSpan]] = defaultdict(list)
        long: list[LongRow] = []
        for row in self.spans(shape):
            if row.num_query > MAX_SHORT_QUERY:
                long.append(self.long_row(row, shape))
            else:
                short[row.num_query, row.num_blocks].append(row)
        batches = []
        for (_, num_blocks), rows in short.items():
            size = max(1, MAX_BATCH_BYTES // (num_blocks * shape.block_bytes))
            batches += [self.short_rows(rows[i : i + size], shape) for i in range(0, len(rows), size)]
        return Work(begun=self.begun(shape), write_lines=self.write_lines(shape), short=batches, long=long)

    def spans(self, shape: Shape) -> Iterator[RowSpan]:
        """Each row that has tokens, with the blocks that its first query can still see."""
        token = 0
        for index, (num_query, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if num_query and seq_len:
                assert num_query <= seq_len, f"row {index} has {num_query} queries in {seq_len} tokens"
                reach = seq_len - int(shape.first_keys(np.array(seq_len - num_query)))
                yield RowSpan(
                    index=index,
                    token=token,
                    num_query=num_query,
                    seq_len=seq_len,
                    first_block=(seq_len - reach) // shape.block_size,
                    num_blocks=-(-seq_len // shape.block_size) - (seq_len - reach) // shape.block_size,
                )
            token += num_query

    def begun(self, shape: Shape) -> Tensor | None:
        """Blocks whose first token this step writes and whose last it does not.

        They are cleared, since a short row reads its last block whole: a place behind its end has weight
        zero, but zero times a NaN that the block's former owner left there is NaN.
        """
        block, offset = np.divmod(self.slot_mapping, shape.block_size)
        begun = np.setdiff1d(block[offset == 0], block[offset == shape.block_size - 1])
        return upload(begun, self.device) if len(begun) else None

    def write_lines(self, shape: Shape) -> Tensor:
        """[2 * T * K]: where keys and values go in the cache seen as [blocks * 2 * K * block_size, H]."""
        block, offset = np.divmod(self.slot_mapping[:, None], shape.block_size)
        side, head = np.arange(shape.sides)[:, None, None], np.arange(shape.num_kv_heads)
        page = (block * shape.sides + side) * shape.num_kv_heads + head
        return upload((page * shape.block_size + offset).ravel(), self.device)

    def pages(self, rows: list[RowSpan], shape: Shape) -> Tensor:
        """[2 * B * K * blocks]: the visible blocks of equally wide rows, as pages of one head."""
        seen = [self.block_table[row.index, row.first_block :][: row.num_blocks] for row in rows]
        blocks = np.array(seen, dtype=np.int64)[:, None]
        side, head = np.arange(shape.sides)[:, None, None, None], np.arange(shape.num_kv_heads)[:, None]
        return upload(((blocks * shape.sides + side) * shape.num_kv_heads + head).ravel(), self.device)

    def short_rows(self, rows: list[RowSpan], shape: Shape) -> ShortRows:
        """A batch of rows that agree in num_query and num_blocks."""
        num_query, num_keys = rows[0].num_query, rows[0].num_blocks * shape.block_size
        facts = [(row.index, row.token, row.seq_len, row.first_block) for row in rows]
        index, token, end, first_block = np.array(facts).T[..., None]
        queries = np.arange(num_query)
        keys = first_block * shape.block_size + np.arange(num_keys)
        tokens = token + queries
        bias = self.bias(self.sight.hidden(tokens, end - num_query + queries, keys, index, shape), shape)
        return ShortRows(
            tokens=upload(tokens.ravel(), self.device),
            num_query=num_query,
            pages=self.pages(rows, shape),
            bias=bias.repeat(1, shape.group_size, 1)[:, None],
        )

    def long_row(self, row: RowSpan, shape: Shape) -> LongRow:
        """One row in tiles of queries, each with no more keys than its last query sees."""
        prefix, first_key = row.seq_len - row.num_query, row.first_block * shape.block_size
        pages = self.pages([row], shape)
        if prefix == 0 and not shape.first_keys(np.array(row.seq_len - 1)):
            # No drafts among them, which follow a token with KV: the row is plainly causal.
            plain = Tile(slice(row.token, row.token + row.num_query), slice(0, row.seq_len), None)
            return LongRow(pages=pages, tiles=[plain])
        tiles = []
        for start in range(0, row.num_query, QUERY_TILE):
            stop = min(start + QUERY_TILE, row.num_query)
            oldest = int(shape.first_keys(np.array(prefix + start)))
            places, keys = np.arange(prefix + start, prefix + stop), np.arange(oldest, prefix + stop)
            tokens = np.arange(row.token + start, row.token + stop)
            hidden = self.sight.hidden(tokens, places, keys, np.array([row.index]), shape)
            tiles.append(
                Tile(
                    queries=slice(row.token + start, row.token + stop),
                    keys=slice(oldest - first_key, prefix + stop - first_key),
                    bias=self.bias(hidden, shape),
                )
            )
        return LongRow(pages=pages, tiles=tiles)

    def bias(self, hidden: np.ndarray, shape: Shape) -> Tensor:
        """[..., Q, S]: 0 where a query sees a key, -inf where it is hidden."""
        bias = torch.zeros(hidden.shape, dtype=shape.dtype, device=self.device)
        return bias.masked_fill_(upload(hidden, self.device), -torch.inf)


class Sight(Protocol):
    """Who sees whom."""

    def hidden(
        self, tokens: np.ndarray, places: np.ndarray, keys: np.ndarray, row: np.ndarray, shape: Shape
    ) -> np.ndarray:
        """[..., Q, S] bool: the keys at places [..., S] of the row that a query may not see.

        tokens: [..., Q], the queries among the step's T; places: [..., Q], theirs.  row: [..., 1] of B.
        """
        ...


class Causal:
    """A query sees itself and what lies before it, from the first key on that layers of this shape see."""

    def hidden(
        self, tokens: np.ndarray, places: np.ndarray, keys: np.ndarray, row: np.ndarray, shape: Shape
    ) -> np.ndarray:
        is_later = keys[..., None, :] > places[..., :, None]
        if shape.sees_all:
            return is_later
        return is_later | (keys[..., None, :] < shape.first_keys(places)[..., :, None])


CAUSAL = Causal()


@dataclass(frozen=True, slots=True)
class TreeSight:
    """The same, but of drafts a query sees those alone that it has a bit for; see TreeMask."""

    positions: np.ndarray  # [T]
    ancestors: np.ndarray  # [T]
    first_drafts: np.ndarray  # [B]

    @classmethod
    def of(cls, positions: Tensor, tree: TreeMask) -> Self:
        tensors = (positions, tree.ancestors, tree.first_drafts)
        return cls(*(tensor.cpu().numpy() for tensor in tensors))

    def hidden(
        self, tokens: np.ndarray, places: np.ndarray, keys: np.ndarray, row: np.ndarray, shape: Shape
    ) -> np.ndarray:
        hidden = CAUSAL.hidden(tokens, self.positions[tokens], keys, row, shape)
        draft = keys - self.first_drafts[row]
        bits = self.ancestors[tokens][..., :, None] >> draft.clip(0, 63)[..., None, :]
        is_unseen = (bits & 1 == 0) | (draft > 63)[..., None, :]
        return np.where((draft >= 0)[..., None, :], is_unseen, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a layer adds to a step's metadata: layers that agree in it share their work."""

    num_kv_heads: int
    group_size: int  # query heads a KV head
    block_size: int  # tokens
    block_bytes: int  # of all KV heads' keys and values
    window: int | None
    dtype: torch.dtype  # of the queries
    sides: int = 2  # of a block: keys and values; 1: what stands for both
    chunk: int | None = None

    @classmethod
    def of(cls, layer: AttentionLayer, heads: Tensor) -> Self:
        """heads: [T, num, H], its queries or keys."""
        _, _, num_kv_heads, block_size, _ = layer.kv_cache.shape
        return cls(
            num_kv_heads=num_kv_heads,
            group_size=heads.shape[1] // num_kv_heads,
            block_size=block_size,
            block_bytes=layer.kv_cache[0].nbytes,
            window=layer.window,
            chunk=layer.chunk,
            dtype=heads.dtype,
        )

    @property
    def sees_all(self) -> bool:
        """Whether queries see what lies before them to the beginning."""
        return self.window is None and self.chunk is None

    def first_keys(self, places: np.ndarray) -> np.ndarray:
        """The first key that a query at each place sees, of the same shape."""
        if self.chunk is not None:
            return places // self.chunk * self.chunk
        return np.maximum(places - (self.window - 1), 0) if self.window is not None else np.zeros_like(places)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """A row and the stretch of its block table that it can see."""

    index: int  # of B
    token: int  # its first query in T
    num_query: int
    seq_len: int  # tokens
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the layers of one shape and window share in a step."""

    begun: Tensor | None  # blocks to clear before
    write_lines: Tensor  # [2 * T * K], where each key and value lies in the cache seen as lines of H
    short: list[ShortRows]
    long: list[LongRow]


@dataclass(slots=True, kw_only=True)
class ShortRows:
    """Rows with Q queries and equally many visible blocks, attending in one call."""

    tokens: Tensor  # [B * Q], their queries
    num_query: int
    pages: Tensor  # [2 * B * K * blocks], where their pages lie in the cache seen as pages of one head
    bias: Tensor  # [B, 1, G * Q, S], 0 where a query sees a key and -inf elsewhere

    def attend(self, q: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """Attend with these rows' part of q [T, N, H] and write the same part of out."""
        _, _, num_kv_heads, _, head_dim = layer.kv_cache.shape
        num_rows = self.bias.shape[0]
        keys, values = gather(layer.kv_cache, self.pages, q.dtype).view(
            2, num_rows, num_kv_heads, -1, head_dim
        )
        q_BQKGH = q.index_select(0, self.tokens).view(num_rows, self.num_query, num_kv_heads, -1, head_dim)
        q_BKMH = q_BQKGH.permute(0, 2, 3, 1, 4).reshape(num_rows, num_kv_heads, -1, head_dim)
        bias = self.bias
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, num_kv_heads, -1, 1).expand(-1, -1, -1, self.num_query)
            keys, values, bias = with_sinks(keys, values, bias, sinks.flatten(2)[..., None])
        o_BKMH = attend(q_BKMH, keys, values, bias, layer)
        o_BKGQH = o_BKMH.view(num_rows, num_kv_heads, -1, self.num_query, head_dim)
        out.index_copy_(0, self.tokens, o_BKGQH.permute(0, 3, 1, 2, 4).reshape(-1, *out.shape[1:]))


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries of a long row and the keys they may see, both as ranges within the row's arrays."""

    queries: slice  # of T
    keys: slice  # of the gathered keys
    bias: Tensor | None  # [queries, keys]; None is plainly causal


@dataclass(slots=True, kw_only=True)
class LongRow:
    """One row with many queries."""

    pages: Tensor  # [2 * K * blocks]
    tiles: list[Tile]

    def attend(self, q: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """Attend with this row's part of q [T, N, H] and write the same part of out."""
        _, _, num_kv_heads, _, head_dim = layer.kv_cache.shape
        num_heads = q.shape[1]
        keys, values = gather(layer.kv_cache, self.pages, q.dtype).view(2, num_kv_heads, 1, -1, head_dim)
        for tile in self.tiles:
            # KV heads are the batch; a stride of zero repeats them for their query heads without a copy.
            q_QKGH = q[tile.queries].view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            q_KGQH = q_QKGH.permute(1, 2, 0, 3)
            shape, bias = (*q_KGQH.shape[:2], -1, -1), tile.bias
            seen, theirs = keys[:, :, tile.keys], values[:, :, tile.keys]
            if layer.sinks is not None:
                if bias is None:
                    bias = q.new_full((q_KGQH.shape[2], seen.shape[2]), float("-inf")).triu(1)
                sinks = layer.sinks.view(num_kv_heads, -1, 1, 1)
                seen, theirs, bias = with_sinks(seen, theirs, bias, sinks)
            o_KGQH = attend(q_KGQH, seen.expand(shape), theirs.expand(shape), bias, layer)
            out[tile.queries] = o_KGQH.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layer: AttentionLayer) -> Tensor:
    """Attend with q [.., .., M, H] over keys and values [.., .., S, H].

    bias: 0 where a query sees a key and -inf elsewhere; None is plainly causal.
    """
    scale = layer.scale * layer.k_scale
    if layer.softcap is None:
        return scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, scale=scale)
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / layer.softcap)) * layer.softcap
    if bias is None:
        bias = q.new_full(scores.shape[-2:], float("-inf")).triu(1)
    return (scores + bias).softmax(-1).to(v.dtype) @ v


def with_sinks(keys: Tensor, values: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key and a value of zeros more, whose score is the sink of the query's head.

    keys, values: [.., S, H].  bias: [.., M, S].  sinks: [.., M or 1, 1], of as many axes as there are.
    """
    lead = torch.broadcast_shapes(bias.shape[:-1], sinks.shape[:-1])
    bias = torch.cat((bias.expand(*lead, -1), sinks.to(bias.dtype).expand(*lead, 1)), -1)
    return pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1)), bias


def clear(kv_cache: Tensor, blocks: Tensor | None) -> None:
    """Fill these blocks with zeros.  None: none."""
    if blocks is not None:
        plain(kv_cache).index_fill_(0, blocks, 0)


def write(k: Tensor, v: Tensor, layer: AttentionLayer, lines: Tensor) -> None:
    """Put k, v [T, K, H] at `lines` of the cache seen as [blocks * 2 * K * block_size, H]."""
    cache, head_dim = layer.kv_cache, k.shape[-1]
    if limit := limit_of(cache.dtype):
        k = (k.float() * (1 / layer.k_scale)).clamp_(-limit, limit)
        v = (v.float() * (1 / layer.v_scale)).clamp_(-limit, limit)
    kv = plain(torch.stack((k, v)).to(cache.dtype))
    plain(cache).view(-1, head_dim).index_copy_(0, lines, kv.view(-1, head_dim))


def gather(kv_cache: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy `pages` out of the cache seen as [blocks * 2 * K, block_size * H]; they come out head-major."""
    lines = plain(kv_cache).view(-1, kv_cache.shape[-2] * kv_cache.shape[-1])
    return lines.index_select(0, pages).view(kv_cache.dtype).to(dtype)


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or the bytes of an FP8 one, which torch does not index."""
    return tensor.view(torch.uint8) if is_fp8(tensor.dtype) else tensor
