"""A vocabulary shared out over ranks: the draw and the logits are those of one that holds it all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pellucid.dist.collectives import SingleRank
from pellucid.dist.vocab_share import vocab_share
from pellucid.kernels.ranks.all_reduce import Mailbox
from pellucid.sample.vocabulary import SplitVocabulary


class Round:
    """Where ranks in threads lay down what they gather."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


class ThreadGroup(SingleRank):
    """One rank of several, each in a thread."""

    def __init__(self, rank: int, size: int, table: Round) -> None:
        self.rank, self.size, self.table = rank, size, table

    def gather(self, x: Tensor) -> Tensor:
        self.table.parts[self.rank] = x
        self.table.barrier.wait()
        gathered = torch.stack(self.table.parts)
        self.table.barrier.wait()  # all have read before any lays down its next part
        return gathered


def on_every_rank(
    logits: Tensor, size: int, ask: Callable[[SplitVocabulary, Tensor], Tensor]
) -> list[Tensor]:
    """Each rank's answer, given its share of the logits, padded with numbers that would win."""
    vocab_size, table = logits.shape[1], Round(size)
    share = vocab_share(vocab_size, size)
    padded = torch.cat([logits, torch.full((len(logits), share * size - vocab_size), 1e9)], dim=1)

    def answer(rank: int) -> Tensor:
        part = padded[:, rank * share : (rank + 1) * share]
        return ask(SplitVocabulary(ThreadGroup(rank, size, table), vocab_size), part)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(answer, range(size)))


@pytest.mark.parametrize("vocab_size,size", [(8, 2), (331, 2), (331, 4), (512, 4), (5, 4)])
def test_every_rank_finds_the_same_best_token(vocab_size: int, size: int) -> None:
    logits = torch.randn(40, vocab_size).round(decimals=1)
    logits[:5] = 0.0  # a tie of all: the lowest id
    for found in on_every_rank(logits, size, lambda v, part: v.argmax(v.trim(part))):
        assert torch.equal(logits.gather(1, found[:, None])[:, 0], logits.amax(1))
        assert torch.equal(found, (logits == logits.amax(1, keepdim=True)).int().argmax(1))


def test_a_rank_that_holds_padding_alone_answers_in_the_way_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draw of the others finds float32 values, whatever the logits are; those go through the mailbox."""
    asked: list[tuple[torch.dtype, torch.dtype]] = []

    def best(values: Tensor, ids: Tensor, mailbox: Mailbox) -> Tensor:
        asked.append((values.dtype, ids.dtype))
        return ids

    monkeypatch.setattr("pellucid.sample.vocabulary.best_of_ranks", best)
    group = ThreadGroup(3, 4, Round(4))
    group.table.barrier.abort()  # nobody else is there to gather
    group.mailbox = Mailbox(rank=3, memory=torch.empty(0), addresses=torch.empty(0), epochs=torch.empty(0))
    split = SplitVocabulary(group, 5)
    split.argmax(split.trim(torch.zeros(2, 2, dtype=torch.bfloat16)))
    assert asked == [(torch.float32, torch.int32)]


@pytest.mark.parametrize("vocab_size,size", [(8, 2), (331, 4), (5, 4)])
def test_gathered_logits_are_all_logits_in_order(vocab_size: int, size: int) -> None:
    logits = torch.randn(3, vocab_size)
    assert all(torch.equal(w, logits) for w in on_every_rank(logits, size, lambda v, part: v.whole(part)))
