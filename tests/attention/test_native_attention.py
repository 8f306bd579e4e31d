"""Attention in native code against naive attention and torch's, and its promise that a row is alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.attention.base import AttentionSpec, QKNorm, choose_backend
from pellucid.attention.native import NativeAttention
from pellucid.attention.torch import TorchAttention
from pellucid.native.library import library
from pellucid.platform import Platform
from tests.attention.paged import Rows, make_rows

pytestmark = pytest.mark.skipif(library() is None, reason="no native code here")
CPU = Platform(device="cpu", name="CPU", memory_total=1, memory_free=1, num_cores=1)
MIXED = [(1, 1), (1, 40), (1, 33), (4, 37), (4, 40), (1, 100), (20, 20), (30, 75)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attend(rows: Rows, backend: TorchAttention | None = None) -> Tensor:
    backend = backend or NativeAttention()
    rows.fwd.attn = (backend.metadata(rows.fwd, 0),)
    return backend.forward(rows.qkv, rows, rows.fwd)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 16), ((7, 1), 64), ((4, 4), 128), ((6, 2), 256)])
def test_mixed_rows_match_naive_attention(
    heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    rows = make_rows(MIXED, heads=heads, head_dim=head_dim, window=window, dtype=dtype)
    expected = rows.expected()
    out = attend(rows).double()[: len(expected)]
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("rotary", [None, (64, False), (32, False), (24, False), (64, True), (24, True)])
@pytest.mark.parametrize("wide", [None, False, True])
def test_norms_rotation_and_the_cache_are_torchs(rotary: tuple[int, bool] | None, wide: bool | None) -> None:
    def made() -> Rows:
        rows = make_rows(MIXED, dtype=torch.bfloat16, head_dim=64, stale=0.0)
        if rotary is not None:
            angles = torch.arange(128.0)[:, None] * torch.rand(rotary[0] // 2)
            cos, sin = angles.cos(), angles.sin()
            table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
            rows.rope, rows.interleaved = table.unsqueeze(2).contiguous(), rotary[1]
        if wide is not None:
            weight = torch.rand(6, 64) + 0.5
            rows.qk_norm = QKNorm(weight if wide else weight.bfloat16(), 1e-6)
        return rows

    torch.manual_seed(1)
    ours = made()
    torch.manual_seed(1)
    theirs = made()
    out, expected = attend(ours), attend(theirs, TorchAttention())
    torch.testing.assert_close(ours.kv_cache, theirs.kv_cache, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=2e-2)


def test_a_row_gives_the_same_bits_alone_and_in_company() -> None:
    crowd = make_rows(MIXED[:6] * 6, dtype=torch.bfloat16, head_dim=64)
    together = attend(crowd)
    starts = crowd.fwd.cu_seqlens_q.tolist()
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        single = make_rows([(crowd.query_lens[row], crowd.seq_lens[row])], dtype=torch.bfloat16, head_dim=64)
        single.q, single.k, single.v = crowd.q[start:end], crowd.k[start:end], crowd.v[start:end]
        single.kv_cache = crowd.kv_cache
        single.fwd.block_tables = (crowd.fwd.block_tables[0][row : row + 1],)
        single.fwd.slot_mappings = (crowd.fwd.slot_mappings[0][start:end],)
        assert torch.equal(together[start:end], attend(single)), f"row {row} noticed its company"


def test_padding_rows_get_zeros() -> None:
    rows = make_rows(MIXED, dtype=torch.bfloat16, num_padding=3)
    assert attend(rows)[-3:].eq(0).all()


def spec(**changes: object) -> AttentionSpec:
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "block_size": 16}
    return AttentionSpec(**(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"head_dim": 72},
        {"head_dim": 512},
        {"kv_dtype": torch.float8_e4m3fn},
        {"softcap": 30.0},
        {"sinks": True},
        {"tree_depth": 3},
    ],
)
def test_what_it_does_not_serve_is_torchs(changes: dict[str, object]) -> None:
    assert type(choose_backend(None, [spec()], CPU)) is NativeAttention
    assert type(choose_backend(None, [spec(**changes)], CPU)) is TorchAttention
    with pytest.raises(ValueError, match="use attention_backend='torch'"):
        choose_backend("native", [spec(**changes)], CPU)
