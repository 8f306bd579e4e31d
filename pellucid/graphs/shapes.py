"""What recorded steps have room for: one lattice of shapes, for decodes, verifications and prompt chunks.

A step takes the smallest shape with room.  What it leaves of the tokens is padding, which is in no row: token
0, written to block 0 alone.  What it leaves of the rows is the spare slot's, without tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Tokens of a step, by how many of its short rows come first.  A few decodes are as often as not streams, for
# which prompts are cut into chunks of middle size, so that products have whole tiles
# (schedule/prefill_budget.py).
MIDDLE = (384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048, 2560)
ROOMS = {
    0: (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    32: (96, 128, 192, 256, *MIDDLE),
    64: (128, 192, 256, *MIDDLE),
    256: (512, 768, 1024, 1280, 1792, 2304, 3328, 4352),
}
VERIFYING = 32  # short rows beside chunks where there are drafts, with the tokens of ROOMS[0]
CHUNKS = 32  # of a recording, at most
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
COARSE = 256  # rows between sizes beyond these
FEW_TOKENS = 64  # a step of so many takes about as long as one of fewer


class StepShape(NamedTuple):
    """Short rows first, which decode or verify, then chunks of any length."""

    num_tokens: int
    num_short: int  # rows
    num_chunks: int = 0  # rows; behind them is an empty one, at which tiles without queries look
    max_query: int = 1  # of a row that decodes or verifies
    num_logits: int = 0  # all tokens', or fewer
    max_keys: int | None = None  # that the chunks may have together; None: any number

    @property
    def num_rows(self) -> int:
        return self.num_short + self.num_chunks + (self.num_chunks > 0)

    @property
    def samples_all(self) -> bool:
        """Decodes and verifications alone?  They sample at each of their tokens."""
        return self.num_logits == self.num_tokens

    @property
    def is_plain(self) -> bool:
        """Decodes alone, behind which nobody wants drafts?"""
        return self.num_tokens == self.num_short and self.max_query == 1

    def num_tiles(self, tile_queries: int, *, all_wanted: bool) -> int:
        """Most tiles of so many queries that hold all queries of chunks, or those that are sampled."""
        whole = -(-self.num_tokens // tile_queries) + self.num_chunks + 1
        if all_wanted:
            return whole
        return min(whole, self.num_chunks * -(-self.max_query // tile_queries))


def decode_shapes(
    max_rows: int, max_query: int, max_tokens: int, max_short: int, *, takes_passes: bool = False
) -> dict[StepShape, bool]:
    """For every number of rows: a query each, two, all; and which are recorded by halves, too.

    Of verifications those of a power of two of rows are: drafts beside a grammar are rarer than starts.
    max_query: of a verification, 1 if there are none.  max_tokens: of a step.  max_short: queries of a short
    row; longer ones are chunks to attention.  takes_passes: a recorded step makes a pass of the drafter for
    each draft that a row may have, so two are at most two, behind which one pass is made; else on average.
    """
    shapes: dict[StepShape, bool] = {}
    for num_rows in bucket_sizes(max_rows):
        shapes[StepShape(num_rows, num_rows, num_logits=num_rows)] = True
        if max_query > 1:
            most = max(num_rows, min(num_rows * max_query, max_tokens))
            num_short = num_rows if max_query <= max_short else 0
            rows = {"num_short": num_short, "num_chunks": num_rows - num_short, "max_query": max_query}
            is_power = num_rows & (num_rows - 1) == 0
            two = StepShape(2 * num_rows, num_logits=2 * num_rows, **rows)
            if takes_passes and (is_power or two.num_tokens > FEW_TOKENS):
                shapes[two._replace(num_short=num_rows, num_chunks=0, max_query=2)] = False
            elif not takes_passes and FEW_TOKENS < most > two.num_tokens:
                shapes[two] = False
            by_halves = num_rows == max_rows or is_power
            shapes[StepShape(most, num_logits=most, **rows)] = by_halves
    return shapes


def chunk_shapes(max_tokens: int, max_rows: int, max_query: int, max_short: int) -> list[StepShape]:
    """For steps with prompt chunks.  max_tokens: of the chunks.  The others: as of `decode_shapes`."""
    rooms = ROOMS
    if max_query > 1:
        rooms = {VERIFYING if max_query <= max_short else 0: ROOMS[0]}
    shapes: set[StepShape] = set()
    for most_short, sizes in rooms.items():
        num_short = min(most_short, max_rows)
        for num_tokens in sizes:
            num_chunked = num_tokens - num_short
            if 0 < num_chunked <= max_tokens:
                num_chunks = min(CHUNKS, num_chunked // 8)
                num_logits = num_short * max_query + num_chunks * (1 if num_short else max_query)
                num_logits = min(num_logits, num_tokens - 1)
                shapes.add(StepShape(num_tokens, num_short, num_chunks, max_query, num_logits))
    return sorted(shapes)


def bounded(shapes: Mapping[StepShape, bool], max_keys: int | None) -> dict[StepShape, bool]:
    """The same, of which chunks have so many keys together at most."""
    return {
        shape._replace(max_keys=max_keys if shape.num_chunks else None): by_halves
        for shape, by_halves in shapes.items()
    }


def bucket_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to record: few, and so that padding wastes little."""
    sizes = [*SIZES, *range(SIZES[-1] + COARSE, max_rows, COARSE)]
    return [n for n in sizes if n < max_rows] + [max_rows]
