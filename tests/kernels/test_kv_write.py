"""Writing the cache: the kernel against its reference, the reference against what must be read back."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.kv_write import kv_write, kv_write_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = [17, 64, 3 * 16 + 15, 5 * 16]


@pytest.mark.parametrize("writer", [kv_write, kv_write_ref])
def test_each_token_lands_in_its_place_and_nothing_else_changes(writer) -> None:  # noqa: ANN001
    k, v = torch.randn(2, 4, 3, 8, device=DEVICE)
    cache = torch.zeros(6, 2, 3, 16, 8, device=DEVICE)
    writer(k, v, cache, torch.tensor(PLACES, device=DEVICE))
    for token, place in enumerate(PLACES):
        page = cache[place // 16, :, :, place % 16]
        assert torch.equal(page[0], k[token]) and torch.equal(page[1], v[token])
        page.zero_()
    assert cache.eq(0).all()


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"), [(1, 16, 16), (8, 80, 64), (3, 128, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_matches_its_reference(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    packed = torch.randn(20, 4 * num_kv_heads, head_dim, device=DEVICE).to(dtype)
    _, k, v = packed.split((2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    places = torch.randperm(4 * block_size, device=DEVICE)[:20]
    cache = torch.zeros(4, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=DEVICE)
    expected = cache.clone()
    kv_write(k, v, cache, places)
    kv_write_ref(k, v, expected, places)
    assert torch.equal(cache, expected)


def test_tokens_of_padding_may_share_a_place() -> None:
    k, v = torch.randn(2, 5, 2, 8, device=DEVICE)
    cache = torch.zeros(3, 2, 2, 16, 8, device=DEVICE)
    kv_write(k, v, cache, torch.tensor([20, 0, 0, 0, 21], device=DEVICE))
    assert torch.equal(cache[1, 0, :, 4:6], k[[0, 4]].transpose(0, 1))
    assert cache[1:, :, :, 6:].eq(0).all()


def test_no_tokens_write_nothing() -> None:
    empty = torch.empty(0, 2, 8, device=DEVICE)
    kv_write(
        empty,
        empty,
        torch.zeros(1, 2, 2, 16, 8, device=DEVICE),
        torch.empty(0, dtype=torch.long, device=DEVICE),
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not round to FP8 as GPUs do")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache_is_written_as_the_reference_does(dtype: torch.dtype) -> None:
    k, v = (100 * torch.randn(2, 4, 3, 8, device=DEVICE)).to(dtype)
    k[0, 0, 0] = 1e4
    cache = torch.zeros(6, 2, 3, 16, 8, device=DEVICE).to(torch.float8_e4m3fn)
    expected = cache.clone()
    for write, to in ((kv_write, cache), (kv_write_ref, expected)):
        write(k, v, to, torch.tensor(PLACES, device=DEVICE), k_scale=2.0, v_scale=0.5)
    assert torch.equal(cache.float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache_holds_scaled_and_saturated_numbers(dtype: torch.dtype) -> None:
    k, v = (100 * torch.randn(2, 4, 3, 8, device=DEVICE)).to(dtype)
    k[0, 0, 0] = 1e4
    cache = torch.zeros(6, 2, 3, 16, 8, device=DEVICE).to(torch.float8_e4m3fn)
    kv_write_ref(k, v, cache, torch.tensor(PLACES, device=DEVICE), k_scale=2.0, v_scale=0.5)
    written = cache[1, :, :, 1].float()
    assert written[0, 0, 0] == 448.0
    torch.testing.assert_close(written[0, 1:], k[0, 1:].float() / 2, rtol=2**-4, atol=2**-9)
    torch.testing.assert_close(written[1], (v[0].float() * 2).clamp(-448, 448), rtol=2**-4, atol=2**-9)
