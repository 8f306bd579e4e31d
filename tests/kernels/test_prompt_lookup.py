"""The kernel that looks up what followed a text's last tokens against its plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.slots import prompt_lookup as file
from pellucid.kernels.slots.prompt_lookup import prompt_lookup, prompt_lookup_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def texts(num_rows: int, width: int, num_kinds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids of a few kinds, so that much occurs before; slots in any order; lengths from 1 to all."""
    generator = torch.Generator().manual_seed(width + num_kinds)
    token_ids = torch.randint(0, num_kinds, (num_rows + 3, width), generator=generator).int()
    slots = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
    lengths = torch.randint(1, width + 1, (num_rows,), generator=generator)
    lengths[0], lengths[-1] = 1, width
    return token_ids.to(DEVICE), slots.to(DEVICE), lengths.to(DEVICE) - 1


LENGTHS, SIZES, WIDTHS = (
    [(1, 1), (1, 3), (2, 5), (3, 3), (2, 40)],
    [(1, 32), (7, 32), (4, 2048)],
    [1, 24, 130],
)


@pytest.mark.parametrize(
    ("shortest", "longest", "num", "block", "width"),
    [
        pytest.param(*lengths, *sizes, width, marks=() if (i + j + k) % 3 == 0 else pytest.mark.matrix)
        for i, lengths in enumerate(LENGTHS)
        for j, sizes in enumerate(SIZES)
        for k, width in enumerate(WIDTHS)
    ],
)
def test_the_same_is_found(
    shortest: int, longest: int, num: int, block: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "BLOCK", block)
    for num_kinds in (1, 3, 40):
        args, sizes = texts(9, width, num_kinds), {"num": num, "shortest": shortest, "longest": longest}
        drafts = prompt_lookup(*args, **sizes)
        assert drafts.dtype == torch.int32 and torch.equal(drafts, prompt_lookup_ref(*args, **sizes))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_long_texts_are_looked_through_in_a_recording() -> None:
    args, sizes = texts(70, 40_000, 30), {"num": 4, "shortest": 2, "longest": 5}
    prompt_lookup(*args, **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = prompt_lookup(*args, **sizes)
    for _ in range(3):
        graph.replay()
        assert torch.equal(drafts, prompt_lookup_ref(*args, **sizes))
        args[2].sub_(1).clamp_(min=1)
