"""Ranks that write into each other's memory get sums and gathers alike to the bit, use after use.

Without GPUs each rank is a process under the interpreter, and the memory a file that they share.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

pytest.importorskip("triton")

from pellucid.kernels.pointwise.rms_norm import NO_POST, Post
from pellucid.kernels.ranks.all_reduce import (
    MAX_ROWS,
    MAX_WORDS,
    Mailbox,
    best_of_ranks,
    best_of_ranks_ref,
    gather_ranks,
    memory_shape,
    sum_add_rms_norm,
    sum_add_rms_norm_ref,
    sum_rows,
    sum_rows_ref,
)
from tests.kernels.compare import assert_rounded_alike

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="is for the interpreter")
DTYPE = torch.float16  # the interpreter cuts bfloat16 off
USES = ((3, 64), (1, 96), (5, 64), (1, 64), (4, 30))  # tokens, features: rows are used unequally often


def mailbox(folder: Path, rank: int, size: int) -> Mailbox:
    """Of a rank; all map the same files."""
    shape = memory_shape(size)
    num = torch.Size(shape).numel()
    memories = [
        torch.from_file(str(folder / str(r)), shared=True, size=num, dtype=torch.int64) for r in range(size)
    ]
    mapped.extend(memories)
    return Mailbox(
        rank=rank,
        memory=memories[rank].view(shape),
        addresses=torch.tensor([memory.data_ptr() for memory in memories]),
        epochs=torch.zeros(MAX_ROWS, dtype=torch.int32),
    )


mapped: list[Tensor] = []  # stays as long as the process


def part_of(rank: int, use: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * use + rank)).to(DTYPE)


def parts_of(size: int, use: int, shape: tuple[int, ...]) -> Tensor:
    return torch.stack([part_of(rank, use, shape) for rank in range(size)])


def check_sums(rank: int, size: int, box: Mailbox) -> None:
    for use, shape in enumerate(USES):
        total = sum_rows(part_of(rank, use, shape), box)
        assert torch.equal(total, sum_rows_ref(parts_of(size, use, shape)))
    assert box.epochs[:6].tolist() == [5, 3, 3, 2, 1, 0]


def check_norms(rank: int, size: int, box: Mailbox) -> None:
    for use, shape in enumerate(USES):
        parts, weight = parts_of(size, use, shape), part_of(50, use, shape[1:])
        residual = part_of(60, use, shape) if use % 2 else None
        expected, expected_stream = sum_add_rms_norm_ref(
            parts, None if residual is None else residual.clone(), weight, 1e-6
        )
        x = part_of(rank, use, shape)
        out, stream = sum_add_rms_norm(x, residual, weight, 1e-6, box)
        assert stream is (x if residual is None else residual)
        assert torch.equal(stream, expected_stream)
        assert_rounded_alike(out, expected)


def check_posts(rank: int, size: int, box: Mailbox) -> None:
    """What is normalized or scaled behind the sum, weights of either width, and no norm behind."""
    shape = (2, 200)
    narrow, wide = part_of(50, 0, shape[1:]), part_of(51, 0, shape[1:]).float()
    cases = ((narrow, Post(wide, 1e-3)), (wide, Post(narrow, 1e-3, 0.3)), (None, Post(wide, 1e-5)))
    for use, (weight, post) in enumerate((*cases, (narrow, Post(scale=0.7)), (None, NO_POST))):
        parts, residual = parts_of(size, use, shape), part_of(60, use, shape)
        expected, expected_stream = sum_add_rms_norm_ref(parts, residual.clone(), weight, 1e-6, post)
        out, stream = sum_add_rms_norm(part_of(rank, use, shape), residual, weight, 1e-6, box, post)
        assert stream is residual and (out is stream) == (weight is None)
        assert_rounded_alike(stream, expected_stream)
        assert_rounded_alike(out, expected)


def check_gathers(rank: int, size: int, box: Mailbox) -> None:
    """Messages of one piece, of several, and of any type."""
    for use, shape in enumerate(((3, 2), (1, 5000), (2, 1100), (6,))):
        parts = [part_of(r, use, shape).double() for r in range(size)]
        assert torch.equal(gather_ranks(parts[rank], box), torch.stack(parts))
    parts = torch.arange(4 * size, dtype=torch.int32).view(size, 4)
    assert torch.equal(gather_ranks(parts[rank], box), parts)


def check_best(rank: int, size: int, box: Mailbox) -> None:
    """Ties, infinities, and as many as there may be."""
    for use, num in enumerate((1, 5, 300, MAX_WORDS // 2)):
        values = torch.stack([part_of(r, use, (num,)).float().round() for r in range(size)])
        values[:, 0] = -torch.inf
        ids = torch.arange(size * num, dtype=torch.int32).view(num, size).T.flip(0).contiguous()
        best = best_of_ranks(values[rank], ids[rank], box)
        assert torch.equal(best, best_of_ranks_ref(values, ids))


def run_rank(rank: int, size: int, folder: str) -> None:
    """All checks with one mailbox: the rows of one kind of use are those of the others."""
    torch.set_num_threads(1)
    box = mailbox(Path(folder), rank, size)
    for check in (check_sums, check_norms, check_posts, check_gathers, check_best):
        check(rank, size, box)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_the_reference(tmp_path: Path, size: int) -> None:
    for rank in range(size):
        with (tmp_path / str(rank)).open("wb") as file:
            file.truncate(8 * torch.Size(memory_shape(size)).numel())
    start_processes(run_rank, (size, str(tmp_path)), nprocs=size, start_method="fork")


def test_what_they_cannot_do_is_left_to_others() -> None:
    def box(size: int) -> Mailbox:
        memory = torch.empty(memory_shape(size), dtype=torch.int64, device="meta")
        return Mailbox(rank=0, memory=memory, addresses=torch.empty(0), epochs=torch.empty(0))

    x = torch.zeros(MAX_ROWS, 2048, dtype=torch.bfloat16)
    assert box(2).can_sum(x) and box(2).can_sum(x[:1])
    assert not box(3).can_sum(x), "what each rank sends counts"
    assert box(3).can_sum(x[: MAX_ROWS // 2])
    unfit = (x.new_zeros(MAX_ROWS + 1, 64), x.new_zeros(1, 8194), x[:0], x[:, :64], x[:, :63].contiguous())
    assert not any(box(2).can_sum(y) for y in (*unfit, x[:1].float(), x[0]))
    assert box(2).can_send(x[0].double()) and not box(2).can_send(x.float())
