# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""What `decode_attention` does with a chunk: few queries attend over tiles of keys in the paged cache.

FP8 values are read in pairs, as 16-bit words: tensor cores want values turned around, which the hardware does
for 16 bits and not for 8, and a conversion to float16 yields two values.  Reading an FP8 cache is a matter of
instructions as much as of memory.  Tensor cores take no fewer than 16 rows but 8 columns, so few queries
become columns, which halves all work but the conversions.

The reference is the whole kernel's, `decode_attention_ref`.

Legend: M packed queries of a row (query m // G with head m % G of the KV head's G), H head dim.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from pellucid.kernels.attention.scores import capped, first_key

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter knows no assembly


@triton.jit
def attend_tiles(
    q_at,  # [M], pointers
    asked,  # [M], whether there is such a query
    pages,  # of the first tile
    pages_ptr,  # this row's block table
    num_pages,  # it has room for
    cache_ptr,
    kv_head,
    begin,  # the first tile's first key
    step,  # tiles from one to the next
    seq_len,
    position,  # [M], of each packed row's query
    ancestors,  # [M], its bits
    first_draft,  # of this row
    scale,
    cap,  # of scores, to base 2
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    REACH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    FP8: tl.constexpr,  # the type that is read in pairs, or None
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attend over every step-th tile.  Returns (accumulator [M, H], maximum [M], sum of weights [M]).

    The result is accumulator / sum, and a query that sees nothing has a sum of zero.
    """
    # Of the cache's elements, which are pairs if they are FP8.
    EACH: tl.constexpr = 2 if FP8 is not None else 1
    WIDTH: tl.constexpr = HEAD_DIM // EACH
    HALF: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * WIDTH  # a block's keys; its values follow
    place = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PADDED // EACH)
    inside = (dim < WIDTH)[None, :]
    q_at = q_at[:, None] + dim[None, :] * EACH
    q = tl.load(q_at, mask=asked[:, None] & inside, other=0.0)
    if FP8 is not None:
        dtype: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
        q_odd = tl.load(q_at + 1, mask=asked[:, None] & inside, other=0.0).to(dtype)
        q = q.to(dtype)
        odd = tl.zeros([M, DIM_PADDED // 2], dtype=tl.float32)
    # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    # Summed over keys behind the loop: within, warps would have to wait for one another.
    total = tl.zeros([M, TILE], dtype=tl.float32)
    accumulator = tl.zeros([M, DIM_PADDED // EACH], dtype=tl.float32)
    cache_ptr += kv_head * BLOCK_SIZE * WIDTH
    for start in range(begin, seq_len, step * TILE):
        key = start + place
        # Places behind the end may hold anything, NaN too, which a weight of zero would not silence.
        present = key < seq_len
        line = lines_of(place, start, pages, 2 * HALF, WIDTH, BLOCK_SIZE, REACH)
        # Those of the next tile are always under way.
        pages = pages_of(pages_ptr, start + step * TILE, num_pages, BLOCK_SIZE, len(pages))
        at = cache_ptr + line[:, None] + dim[None, :]
        k = tl.trans(tl.load(at, mask=present[:, None] & inside, other=0))
        v = tl.load(at + HALF, mask=present[:, None] & inside, other=0)
        if FP8 is not None:
            k_even, k_odd = fp8_values(k, FP8)
            scores = tl.dot(q, k_even.to(dtype), input_precision="ieee")
            scores = tl.dot(q_odd, k_odd.to(dtype), scores, input_precision="ieee")
        else:
            scores = tl.dot(q, k, input_precision="ieee")
        visible = visible_keys(key[None, :], position[:, None], ancestors[:, None], first_draft, REACH, TREE)
        scores = scores * scale
        if CAPPED:
            scores = capped(scores, cap)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink[:, None] + weights
        accumulator = accumulator * shrink[:, None]
        weights = weights.to(q.dtype)
        if FP8 is not None:
            v_even, v_odd = fp8_values(v, FP8)
            odd = odd * shrink[:, None]
            accumulator = tl.dot(weights, v_even.to(dtype), accumulator, input_precision="ieee")
            odd = tl.dot(weights, v_odd.to(dtype), odd, input_precision="ieee")
        else:
            accumulator = tl.dot(weights, v, accumulator, input_precision="ieee")
        maximum = new_maximum
    if FP8 is not None:
        accumulator = tl.interleave(accumulator, odd)
    return accumulator, maximum, tl.sum(total, 1)


@triton.jit
def attend_columns(
    q_at, asked, pages, pages_ptr, num_pages, lines, cache_ptr, kv_head, begin, step, seq_len, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    REACH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The same of rows with one query each, with heads as columns of the products.

    lines: a descriptor of the cache as lines [TILE, H], by which the TMA unit copies whole tiles.  The last
    keys of a row are loaded, for what lies behind them may be anything.  None: all keys are.
    """
    VALUES: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE  # lines from a block's keys to its values
    place = tl.arange(0, TILE)
    dim = tl.arange(0, HEAD_DIM)
    q = tl.load(q_at[None, :] + dim[:, None], mask=asked[None, :], other=0.0)
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([TILE, M], dtype=tl.float32)
    accumulator = tl.zeros([HEAD_DIM, M], dtype=tl.float32)
    if lines is None:
        cache_ptr += kv_head * BLOCK_SIZE * HEAD_DIM
        for start in range(begin * TILE if REACH == 0 else begin, seq_len, step * TILE):
            present = start + place < seq_len
            line = lines_of(place, start, pages, 2 * VALUES * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, REACH)
            pages = pages_of(pages_ptr, start + step * TILE, num_pages, BLOCK_SIZE, len(pages))
            at = cache_ptr + line[:, None] + dim[None, :]
            k = tl.load(at, mask=present[:, None], other=0.0)
            # Turned around by where they are read: what `tl.trans` yields would not be read ahead.
            at = cache_ptr + VALUES * HEAD_DIM + line[None, :] + dim[:, None]
            v = tl.load(at, mask=present[None, :], other=0.0)
            scores = tl.where(present[:, None], tl.dot(k, q) * scale, float("-inf"))
            maximum, total, accumulator = fold_in(scores, v, maximum, total, accumulator)
    else:
        last = seq_len // TILE  # the tile that is not whole, if there is one
        for tile in range(begin, last, step):
            line = pages[0] * (2 * VALUES) + kv_head * BLOCK_SIZE + tile * TILE % BLOCK_SIZE
            pages = pages_of(pages_ptr, (tile + step) * TILE, num_pages, BLOCK_SIZE, 1)
            k, v = lines.load([line, 0]), lines.load([line + VALUES, 0])
            scores = tl.dot(k, q) * scale
            maximum, total, accumulator = fold_in(scores, tl.trans(v), maximum, total, accumulator)
        if ((last - begin) % step == 0) & (last * TILE < seq_len):
            at = cache_ptr + (pages[0].to(tl.int64) * (2 * VALUES) + kv_head * BLOCK_SIZE) * HEAD_DIM
            at = at + (last * TILE % BLOCK_SIZE + place)[:, None] * HEAD_DIM + dim[None, :]
            present = last * TILE + place < seq_len
            k = tl.load(at, mask=present[:, None], other=0.0)
            v = tl.load(at + VALUES * HEAD_DIM, mask=present[:, None], other=0.0)
            scores = tl.where(present[:, None], tl.dot(k, q) * scale, float("-inf"))
            maximum, total, accumulator = fold_in(scores, tl.trans(v), maximum, total, accumulator)
    return tl.trans(accumulator), maximum, tl.sum(total, 0)


@triton.jit
def fold_in(scores, v, maximum, total, accumulator):
    """A tile's scores [TILE, M] and values [H, TILE] into (maximum, sums of weights, accumulator)."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 0))
    weights = tl.exp2(scores - new_maximum[None, :])
    shrink = tl.exp2(maximum - new_maximum)
    total = total * shrink[None, :] + weights
    accumulator = tl.dot(v, weights.to(v.dtype), accumulator * shrink[None, :])
    return new_maximum, total, accumulator


@triton.jit
def attend_fp8_columns(
    q_at, asked, pages, pages_ptr, num_pages, cache_ptr, kv_head, begin, step,
    seq_len, position, ancestors, first_draft, scale, cap,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, REACH: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr, FP8: tl.constexpr, TREE: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """The same of few queries over an FP8 cache, with queries as columns of the products."""
    WIDTH: tl.constexpr = HEAD_DIM // 2
    HALF: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * WIDTH  # a block's keys; its values follow
    place = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PADDED // 2)
    inside = dim < WIDTH
    q_at = q_at[None, :] + dim[:, None] * 2
    q = tl.load(q_at, mask=inside[:, None] & asked[None, :], other=0.0).to(tl.float16)
    q_odd = tl.load(q_at + 1, mask=inside[:, None] & asked[None, :], other=0.0).to(tl.float16)
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([TILE, M], dtype=tl.float32)
    even = tl.zeros([DIM_PADDED // 2, M], dtype=tl.float32)
    odd = tl.zeros([DIM_PADDED // 2, M], dtype=tl.float32)
    cache_ptr += kv_head * BLOCK_SIZE * WIDTH
    for start in range(begin, seq_len, step * TILE):
        key = start + place
        present = key < seq_len
        line = lines_of(place, start, pages, 2 * HALF, WIDTH, BLOCK_SIZE, REACH)
        pages = pages_of(pages_ptr, start + step * TILE, num_pages, BLOCK_SIZE, len(pages))
        at = cache_ptr + line[:, None] + dim[None, :]
        k = tl.load(at, mask=present[:, None] & inside[None, :], other=0)
        # Turned around by where they are read: what `tl.trans` yields would not be read ahead.
        at = cache_ptr + HALF + line[None, :] + dim[:, None]
        v = tl.load(at, mask=present[None, :] & inside[:, None], other=0)
        k_even, k_odd = fp8_values(k, FP8)
        scores = tl.dot(k_even, q)
        scores = tl.dot(k_odd, q_odd, scores)
        visible = visible_keys(key[:, None], position[None, :], ancestors[None, :], first_draft, REACH, TREE)
        scores = scores * scale
        if CAPPED:
            scores = capped(scores, cap)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        weights = tl.exp2(scores - new_maximum[None, :])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink[None, :] + weights
        weights = weights.to(tl.float16)
        v_even, v_odd = fp8_values(v, FP8)
        even = tl.dot(v_even, weights, even * shrink[None, :])
        odd = tl.dot(v_odd, weights, odd * shrink[None, :])
        maximum = new_maximum
    accumulator = tl.interleave(tl.trans(even), tl.trans(odd))
    return accumulator, maximum, tl.sum(total, 0)


@triton.jit
def sight_of(
    row, token, asked, position, seq_len, positions_ptr, ancestors_ptr, first_drafts_ptr, TREE: tl.constexpr
):
    """Positions and ancestors of the queries at `token`, and where their row's drafts begin.

    position: theirs unless drafts are a tree; then no key is a draft, and ancestors are any.
    """
    if TREE:
        first_draft = tl.load(first_drafts_ptr + row)
        position = tl.load(positions_ptr + token, mask=asked, other=0)
        return position, tl.load(ancestors_ptr + token, mask=asked, other=0), first_draft
    else:
        return position, position, seq_len


@triton.jit
def visible_keys(key, position, ancestors, first_draft, REACH: tl.constexpr, TREE: tl.constexpr):
    """Which keys which queries see: keys on one axis, queries with their ancestors on the other."""
    distance = position - key
    visible = distance >= 0
    if REACH != 0:
        visible = visible & (key >= first_key(position, REACH))
    if TREE:
        draft = key - first_draft
        bits = ancestors >> tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)
        seen = ((bits & 1) != 0) & (draft < 64)
        visible = tl.where(draft >= 0, seen, visible)
    return visible


@triton.jit
def lines_of(
    place, start, pages,
    BLOCK: tl.constexpr, LINE: tl.constexpr, BLOCK_SIZE: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Where the keys of a tile lie in the cache [TILE].  BLOCK, LINE: elements of a block, of a key."""
    page = pages[0]
    if REACH != 0:  # the tile begins anywhere in its first page
        place = start % BLOCK_SIZE + place
    for i in tl.static_range(1, len(pages)):
        page = tl.where(place < i * BLOCK_SIZE, page, pages[i])
    offset = place % BLOCK_SIZE if len(pages) > 1 else start % BLOCK_SIZE + place
    return page.to(tl.int64) * BLOCK + offset * LINE


@triton.jit
def pages_of(pages_ptr, key, num_pages, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """The pages of the tile that begins with a key."""
    first, last = key // BLOCK_SIZE, num_pages - 1
    page = tl.load(pages_ptr + tl.minimum(first, last))
    pages = (page,)
    for i in tl.static_range(1, PAGES):
        pages = pages + (tl.load(pages_ptr + tl.minimum(first + i, last)),)
    return pages


@triton.jit
def fp8_values(pairs, FP8: tl.constexpr):
    """The first and the second of each pair of FP8 values, in float16, which holds them exactly."""
    if FP8 == "e5m2":  # the upper halves of float16s
        if INTERPRETED:
            first = (pairs << 8).to(tl.float16, bitcast=True)
            second = (pairs & -256).to(tl.float16, bitcast=True)
        else:  # two pairs a register
            first, second = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
                "=r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    elif INTERPRETED:
        first = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # two pairs a register: first the firsts, then the seconds
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 sorted;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second
