"""The training mixture and the held-out sets: random documents, packed into batches of token codes.

A code is a token id with two flags: LEARN (this token counts in the loss) and START (a document begins).
Everything is a function of (seed, shard number); nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from chat import Document, Item, document, held_out
from tasks.arithmetic import arithmetic
from tasks.extraction import extract
from tasks.lists import copy, count, reverse, sort
from tasks.lookup import dump, lookup
from tasks.python_text import python_text
from tasks.smalltalk import prose, smalltalk
from tasks.tool_use import tool_answer, tool_call, tool_none, two_calls

LEARN = 1 << 15
START = 1 << 14
ID_MASK = START - 1

CONTEXT = 4096
LONGEST_TABLE = 3200.0
PYTHON_CHARS = 6000
# Tables start short and reach full length after this fraction of the training.
RAMP = 0.25

Draw = Callable[[Random, float], Document]


@dataclass(frozen=True, slots=True)
class Source:
    """One part of the mixture: its share of the text (by characters), and how to draw a document."""

    share: float
    draw: Draw


def _chats(make: Callable[[Random], Item], thinking: float) -> Draw:
    """Make documents of items that are not held out, a fraction of them with worked thinking."""

    def draw(rng: Random, _: float) -> Document:
        item = training_item(rng, make)
        return document(item, thinking=rng.random() < thinking)

    return draw


def _lookups(rng: Random, progress: float) -> Document:
    longest = table_limit(progress)
    item = training_item(rng, lambda r: lookup(r, max_tokens=longest))
    return document(item, thinking=rng.random() < 0.3)


SOURCES = (
    Source(0.18, _chats(arithmetic, 0.5)),
    Source(0.27, _lookups),
    Source(0.13, lambda rng, progress: dump(rng, max_tokens=table_limit(progress))),
    Source(0.15, _chats(tool_call, 0.4)),
    Source(0.02, _chats(tool_answer, 0.4)),
    Source(0.02, _chats(tool_none, 0.4)),
    Source(0.015, _chats(two_calls, 0.4)),
    Source(0.06, _chats(extract, 0.4)),
    Source(0.03, _chats(sort, 0.5)),
    Source(0.03, _chats(count, 0.4)),
    Source(0.015, _chats(copy, 0.3)),
    Source(0.02, _chats(reverse, 0.3)),
    Source(0.03, _chats(smalltalk, 0.4)),
    Source(0.01, lambda rng, _: prose(rng)),
    # Small, because the library is small: a larger share is learned by heart and held-out modules suffer.
    Source(0.02, lambda rng, _: python_text(rng, max_chars=PYTHON_CHARS)),
)


SHARES = tuple(source.share for source in SOURCES)


def table_limit(progress: float) -> float:
    """Give the longest table, in tokens, at this fraction of the training."""
    return LONGEST_TABLE * min(1.0, 0.12 + progress / RAMP)


def training_item(rng: Random, make: Callable[[Random], Item]) -> Item:
    """Draw items until one touches no held-out problem."""
    while True:
        item = make(rng)
        if not any(map(held_out, item.problems)):
            return item


def documents(rng: Random, progress: float, shares: Sequence[float] = SHARES) -> Iterator[Document]:
    """Draw documents for ever, keeping every source near its share of the characters."""
    written = [1.0] * len(SOURCES)
    while True:
        index = min(range(len(SOURCES)), key=lambda i: written[i] / shares[i] * (0.5 + rng.random()))
        drawn = SOURCES[index].draw(rng, progress)
        written[index] += len(drawn.prompt) + len(drawn.completion)
        yield drawn


def encode(tokenizer: Tokenizer, drawn: list[Document]) -> list[np.ndarray]:
    """Turn documents into codes; those longer than the context are left out."""
    texts = [text for each in drawn for text in (each.prompt, each.completion)]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    coded = []
    for prompt, completion in zip(encoded[::2], encoded[1::2], strict=True):
        ids = prompt.ids + completion.ids
        if len(ids) <= CONTEXT:
            codes = np.array(ids, dtype=np.uint16)
            codes[len(prompt.ids) :] |= LEARN
            codes[0] |= START
            coded.append(codes)
    return coded


@dataclass(frozen=True, slots=True)
class Shards:
    """The training data as numbered shards of `batches` batches of `batch_tokens` tokens."""

    tokenizer_file: Path
    seed: int
    num_shards: int
    batches: int
    batch_tokens: int
    shares: tuple[float, ...] = SHARES  # of SOURCES

    def make(self, number: int) -> np.ndarray:
        """Draw shard `number`: codes [batches, batch_tokens]; a batch's last document may be cut short."""
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        rng = Random(f"{self.seed}:{number}")
        stream = documents(rng, number / self.num_shards, self.shares)
        waiting: list[np.ndarray] = []
        rows = []
        for _ in range(self.batches):
            parts, filled = [], 0
            while filled < self.batch_tokens:
                if not waiting:
                    waiting = encode(tokenizer, [next(stream) for _ in range(256)])
                part = waiting.pop()[: self.batch_tokens - filled]
                parts.append(part)
                filled += len(part)
            rows.append(np.concatenate(parts))
        return np.stack(rows)

    def stream(self, first: int, workers: int) -> Iterator[np.ndarray]:
        """Yield shards first, first + 1, ... in order, drawn ahead by `workers` processes."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with get_context("fork").Pool(workers) as pool:
            yield from pool.imap(self.make, range(first, self.num_shards))
