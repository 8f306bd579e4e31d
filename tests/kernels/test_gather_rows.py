"""The kernels that gather a step's inputs against their plain references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels import gather_rows as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("queries", [[1], [1] * 33, [5, 5, 5], [1, 1, 300, 7], [512, 1]])
@pytest.mark.parametrize("block_size", [16, 64])
def test_rows_of_any_kind_match(queries: list[int], block_size: int) -> None:
    generator = torch.Generator().manual_seed(len(queries))
    num_slots, width = 40, 2 + 1024 // block_size
    token_ids = torch.randint(0, 1000, (num_slots, 1024), generator=generator, dtype=torch.int32).to(DEVICE)
    num_computed = torch.randint(0, 500, (num_slots,), generator=generator).to(DEVICE)
    table = torch.randint(1, 99, (num_slots, width), generator=generator, dtype=torch.int32).to(DEVICE)
    slots = torch.randperm(num_slots, generator=generator)[: len(queries)].to(DEVICE)
    cu_query = torch.tensor([0, *queries], device=DEVICE).cumsum(0)

    args, sizes = (slots, cu_query, token_ids, num_computed), {"max_query": max(queries)}
    expected = kernels.gather_tokens_ref(*args, num_tokens=sum(queries), **sizes)
    tokens = kernels.gather_tokens(*args, num_tokens=sum(queries), **sizes)
    for name in ("input_ids", "positions", "starts", "seq_lens"):
        got, wanted = getattr(tokens, name), getattr(expected, name)
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), name

    args = (slots, cu_query, expected.positions, table)
    rows, mapping = kernels.gather_blocks(*args, block_size=block_size, **sizes)
    rows_ref, mapping_ref = kernels.gather_blocks_ref(*args, block_size=block_size, **sizes)
    assert torch.equal(rows, rows_ref) and torch.equal(mapping, mapping_ref)
