"""A rank's share of the embeddings, against plain torch; the shares add up to the whole table's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.pointwise.embedding import embed_codes, embed_codes_ref, embed_share, embed_share_ref
from pellucid.quant.online import FORMATS
from pellucid.quant.rounding import rounded
from pellucid.quant.tables import coded_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dim", [64, 1030])
@pytest.mark.parametrize("embed", [embed_share, embed_share_ref])
def test_shares_add_up_to_the_table(embed, dim: int, dtype: torch.dtype) -> None:  # noqa: ANN001
    table = torch.randn(20, dim, device=DEVICE)
    ids = torch.tensor([0, 19, 9, 10, 3, 10], dtype=dtype, device=DEVICE)
    shares = [embed(ids, table[first : first + 10], first) for first in (0, 10)]
    assert torch.equal(shares[0] + shares[1], table[ids.long()])
    assert not shares[0][[1, 3, 5]].any() and not shares[1][[0, 2, 4]].any()


@pytest.mark.parametrize("way", FORMATS)
def test_rows_of_codes_are_their_numbers(way: str) -> None:
    weight = torch.randn(20, 96, device=DEVICE)
    weight[3] = 0
    format = FORMATS[way](96)
    numbers = rounded(weight, format).dequantized()
    ids = torch.tensor([0, 19, 9, 10, 3, 10], dtype=torch.int32, device=DEVICE)
    for embed in (embed_codes, embed_codes_ref):
        for dtype in (torch.float32, torch.float16):  # the interpreter cuts bfloat16 off
            shares = [
                embed(ids, coded_table(weight[first : first + 10], format), first, dtype) for first in (0, 10)
            ]
            assert torch.equal(shares[0] + shares[1], numbers.to(dtype)[ids.long()])
            assert not shares[0][[1, 3, 5]].any() and not shares[1][[0, 2, 4]].any()


def test_no_tokens_are_no_rows() -> None:
    assert embed_share(torch.empty(0, dtype=torch.int32), torch.zeros(4, 64), 0).shape == (0, 64)
