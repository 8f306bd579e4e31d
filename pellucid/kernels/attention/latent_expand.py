# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Keys and values of heads, made of the latents in the paged cache: a product whose rows are gathered.

Rows follow one another, each from where `cu_keys` says.  How many keys they have only the device knows: there
is room for a number that the host knows, and programs behind the last key end at once.

Legend: B rows, S keys of all rows, N heads, H features of a head's key and value, C rank of the latent, R
features that turn.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.attention.paged_attention import PagedRows, shared_memory
from pellucid.kernels.attention.prefill_attention import STEP_POINTERS
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait

ROWS_AT_ONCE = 64  # in which a program looks for its keys' rows


class Tile(NamedTuple):
    """Of the product."""

    keys: int
    outs: int
    step: int  # numbers of latents at a time
    num_warps: int
    num_stages: int


def tile_for(itemsize: int, room: int) -> Tile:
    """itemsize: of what is computed with; room: bytes of shared memory."""
    if itemsize > 2:  # without tensor cores
        return Tile(32, 64, 32, 4, 1)
    stage = (128 + 128) * 64 * itemsize
    return Tile(128, 128, 64, 8, max(1, min(4, room // stage)))


def latent_expand(
    kv_cache: Tensor,
    up: Tensor,
    rows: PagedRows,
    *,
    cu_keys: Tensor,
    row_scale: float = 1.0,
    turned: Tensor,
    out: Tensor,
) -> Tensor:
    """Multiply the latents of kv_cache [num_blocks, block_size, C + R] with up [N, H, C] into out [S, N, H].

    turned: [S, R], gets what turns of each key.  cu_keys: [B] int64, rising, where each row begins there; the
    rest stays as it is.  The cache holds rows / row_scale, in FP8 or in up's dtype.
    """
    num_heads, width, rank = up.shape
    num_keys, rotary_dim = turned.shape
    assert kv_cache.is_contiguous() and kv_cache.shape[2] == rank + rotary_dim, (kv_cache.shape, up.shape)
    assert up.is_contiguous() and out.is_contiguous() and turned.is_contiguous()
    assert out.shape == (num_keys, num_heads, width), (out.shape, num_keys, up.shape)
    assert len(cu_keys) == rows.num_rows, (cu_keys.shape, rows.num_rows)
    tile = tile_for(up.itemsize, shared_memory(up.device))
    latent_expand_kernel[(triton.cdiv(num_heads * width, tile.outs), triton.cdiv(num_keys, tile.keys))](
        kv_cache,
        up,
        turned,
        out,
        rows.block_table,
        rows.seq_lens,
        cu_keys,
        row_scale,
        rows.num_rows,
        num_heads,
        rows.block_table.stride(0),
        WIDTH=width,
        RANK=rank,
        ROTARY=rotary_dim,
        ROTARY_PADDED=triton.next_power_of_2(rotary_dim),
        BLOCK_SIZE=kv_cache.shape[1],
        TILE=tile.keys,
        OUTS=tile.outs,
        STEP=tile.step,
        ROWS=ROWS_AT_ONCE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent(),
    )
    return out


def latent_expand_ref(
    kv_cache: Tensor, up: Tensor, rows: PagedRows, *, row_scale: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """Of each row what is made of its latents [seq_len, N, H], and what turns [seq_len, R]."""
    made = []
    for table, length in zip(rows.block_table, rows.seq_lens.tolist(), strict=True):
        pages = table[: -(-length // kv_cache.shape[1])].long()
        kept = (kv_cache[pages].flatten(0, 1)[:length].float() * row_scale).to(up.dtype)
        latents, turning = kept.tensor_split([up.shape[2]], dim=1)
        made.append((F.linear(latents, up.flatten(0, 1)).unflatten(1, up.shape[:2]), turning))
    return made


# Of a step's rows, and of heads that have room at once, one variant takes any number.
@triton.jit(
    do_not_specialize=["num_rows", "num_heads", "block_table_stride"],
    do_not_specialize_on_alignment=STEP_POINTERS,
)
def latent_expand_kernel(
    cache_ptr,
    up_ptr,
    turned_ptr,
    out_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_keys_ptr,
    row_scale,
    num_rows,
    num_heads,
    block_table_stride,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program some outputs of some keys, which may be of several rows."""
    let_next_start(DEPENDENT)
    num_out = num_heads * WIDTH
    first = tl.program_id(1) * TILE
    key = first + tl.arange(0, TILE)
    row, end = tl.full([TILE], -1, tl.int32), tl.full([], 0, tl.int64)
    wait(DEPENDENT)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        begins = tl.load(cu_keys_ptr + rows, mask=rows < num_rows, other=1 << 40)
        lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
        row += tl.sum((begins[None, :] <= key[:, None]).to(tl.int32), 1)
        end = tl.maximum(end, tl.max(tl.where(lens > 0, begins + lens, 0), 0))
    if first < end:
        known = row >= 0
        place = key - tl.load(cu_keys_ptr + row, mask=known, other=0).to(tl.int32)
        present = known & (place < tl.load(seq_lens_ptr + row, mask=known, other=0))
        page_at = block_table_ptr + row.to(tl.int64) * block_table_stride + place // BLOCK_SIZE
        page = tl.load(page_at, mask=present, other=0).to(tl.int64)
        line = cache_ptr + (page * BLOCK_SIZE + place % BLOCK_SIZE) * (RANK + ROTARY)
        column, k = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, STEP)
        y = tl.zeros((TILE, OUTS), tl.float32)
        for begin in range(0, RANK, STEP):
            inside = begin + k < RANK
            c = tl.load(
                line[:, None] + begin + k[None, :], mask=present[:, None] & inside[None, :], other=0.0
            )
            up_at = up_ptr + column[:, None] * RANK + begin + k[None, :]
            w = tl.load(up_at, mask=(column < num_out)[:, None] & inside[None, :], other=0.0)
            y = tl.dot(c.to(w.dtype), tl.trans(w), y, input_precision="ieee")
        out_at = out_ptr + key.to(tl.int64)[:, None] * num_out + column[None, :]
        made = (y * row_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_at, made, mask=present[:, None] & (column < num_out)[None, :])
        if tl.program_id(0) == 0:
            rotary = tl.arange(0, ROTARY_PADDED)
            inside = present[:, None] & (rotary < ROTARY)[None, :]
            turned = tl.load(line[:, None] + RANK + rotary[None, :], mask=inside, other=0.0)
            turned = (turned.to(tl.float32) * row_scale).to(turned_ptr.dtype.element_ty)
            tl.store(turned_ptr + key.to(tl.int64)[:, None] * ROTARY + rotary[None, :], turned, mask=inside)
