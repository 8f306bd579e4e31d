"""The builder: slices for every rank, caches, shared rotary tables, schemes that refuse to merge."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pellucid.attention.base import Heads, Scores
from pellucid.dist.mesh import WHOLE_MODEL, Stage
from pellucid.kv.layout import LayerCache
from pellucid.layers.attention import Attention
from pellucid.layers.latent import LatentHeads
from pellucid.layers.linear import Linear, Unmerged
from pellucid.layers.norm import NormSpec
from pellucid.layers.weight import Weight
from pellucid.models.builder import BuildContext, Builder
from pellucid.models.decoder import Decoder
from pellucid.quant.base import WHOLE, Coords, Piece
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.online import Online
from pellucid.quant.quantization import Quantization
from pellucid.quant.schemes.base import Kind
from pellucid.quant.unquantized import Unquantized
from tests.layers.test_rotary import make_rope

DIM = 12


def make_builder(
    coords: Coords = WHOLE,
    quantization: Quantization | None = None,
    stage: Stage = WHOLE_MODEL,
    stacked: Mapping[str, tuple[str, ...]] = Decoder.stacked,
) -> Builder:
    context = BuildContext(
        quantization=quantization or Online(),
        stacked=stacked,
        dtype=torch.float32,
        kv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
        block_size=16,
        max_model_len=64,
        coords=coords,
        stage=stage,
    )
    return Builder(context).at("model.layers.0")


def fill(layer: Linear | Unmerged, tensors: Mapping[str, Tensor]) -> None:
    """Give every weight of the layer the tensors it names."""
    for weight in layer.parameters():
        assert isinstance(weight, Weight)
        weight.allocate()
        for part, source in enumerate(weight.sources):
            weight.load(part, tensors[source])


def qkv_tensors(heads: Heads) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    prefix = "model.layers.0.self_attn"
    tensors: dict[str, Tensor] = {}
    for name, num in (("q_proj", heads.num), ("k_proj", heads.num_kv), ("v_proj", heads.num_kv)):
        tensors[f"{prefix}.{name}.weight"] = torch.randn(num * heads.dim, DIM, generator=generator)
        tensors[f"{prefix}.{name}.bias"] = torch.randn(num * heads.dim, generator=generator)
    return tensors


def qkv_of(coords: Coords, heads: Heads, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, heads, dim] as this rank computes them."""
    layer = make_builder(coords).at("self_attn").qkv("qkv_proj", DIM, heads, bias=True)
    fill(layer, qkv_tensors(heads))
    num = heads.num // coords.size
    num_kv = max(1, heads.num_kv // coords.size)
    q, k, v = layer(x).view(len(x), -1, heads.dim).split((num, num_kv, num_kv), dim=1)
    return q, k, v


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("num_kv", [1, 2, 8])
def test_every_rank_computes_its_heads_and_the_kv_heads_they_need(size: int, num_kv: int) -> None:
    heads, x = Heads(8, num_kv, 4), torch.randn(3, DIM)
    q, k, v = qkv_of(WHOLE, heads, x)
    per_kv = heads.num // num_kv
    for rank in range(size):
        local_q, local_k, local_v = qkv_of(Coords(rank, size), heads, x)
        mine = range(rank * heads.num // size, (rank + 1) * heads.num // size)
        needed = sorted({head // per_kv for head in mine})
        torch.testing.assert_close(local_q, q[:, list(mine)])
        torch.testing.assert_close(local_k, k[:, needed])
        torch.testing.assert_close(local_v, v[:, needed])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_tensor_of_the_checkpoint_may_hold_all_merged_parts(size: int) -> None:
    heads, x, apart = Heads(8, 2, 4), torch.randn(3, DIM), qkv_tensors(Heads(8, 2, 4))
    fused = {
        f"model.layers.0.self_attn.qkv_proj.{suffix}": torch.cat(
            [apart[f"model.layers.0.self_attn.{name}.{suffix}"] for name in ("q_proj", "k_proj", "v_proj")]
        )
        for suffix in ("weight", "bias")
    }
    for rank in range(size):
        coords = Coords(rank, size)
        layer = make_builder(coords, stacked={}).at("self_attn").qkv("qkv_proj", DIM, heads, bias=True)
        fill(layer, fused)
        expected = make_builder(coords).at("self_attn").qkv("qkv_proj", DIM, heads, bias=True)
        fill(expected, apart)
        assert torch.equal(layer(x), expected(x))


def test_a_piece_is_whole_elements_of_its_tensor() -> None:
    assert Piece(64, 32, 128).within(2) == (4, 8)  # an element stands for 16 outputs
    assert Piece(0, 48, 96).within(48) == (0, 96)
    with pytest.raises(ValueError, match="outputs 16 to 48 of 64 are not whole elements"):
        Piece(16, 32, 64).within(1)


@pytest.mark.parametrize("size", [2, 4])
def test_partial_sums_of_a_row_layer_add_up(size: int) -> None:
    x = torch.randn(3, DIM)
    tensors = {
        "model.layers.0.o_proj.weight": torch.randn(5, DIM),
        "model.layers.0.o_proj.bias": torch.randn(5),
    }

    def partial_sum(coords: Coords) -> Tensor:
        layer = make_builder(coords).row("o_proj", DIM, 5, bias=True)
        fill(layer, tensors)
        return layer(x.chunk(coords.size, dim=1)[coords.rank])

    total = sum(partial_sum(Coords(rank, size)) for rank in range(size))
    torch.testing.assert_close(total, partial_sum(WHOLE))


@pytest.mark.parametrize(("heads", "size"), [(Heads(6, 6, 4), 4), (Heads(12, 3, 4), 2)])
def test_heads_that_do_not_divide_over_the_ranks_are_refused(heads: Heads, size: int) -> None:
    with pytest.raises(ValueError, match="heads cannot be split over . ranks; use a divisor"):
        make_builder(Coords(0, size)).qkv("qkv_proj", DIM, heads)


class NeverMerge:
    """Merged matrices would not be served alike."""

    def method(self, paths: tuple[str, ...], kind: Kind) -> Unquantized | None:
        return Unquantized() if len(paths) == 1 else None

    def stored(self, path: str, kind: Kind) -> LayerFormat | None:
        return None


def test_so_are_those_over_latents() -> None:
    heads = LatentHeads(num=7, nope=4, rope=2, value=4, rank=6, q_rank=None)
    with pytest.raises(ValueError, match="7 heads cannot be split over 2 ranks"):
        make_builder(Coords(0, 2)).latent(DIM, heads, NormSpec(1e-6))


def test_what_no_method_serves_alike_is_not_merged() -> None:
    heads, x = Heads(4, 2, 4), torch.randn(3, DIM)
    merged = make_builder().at("self_attn").qkv("qkv_proj", DIM, heads, bias=True)
    apart = make_builder(quantization=NeverMerge()).at("self_attn").qkv("qkv_proj", DIM, heads, bias=True)
    assert isinstance(apart, Unmerged)
    for layer in (merged, apart):
        fill(layer, qkv_tensors(heads))
    torch.testing.assert_close(apart(x), merged(x))


def test_every_layer_says_what_it_keeps() -> None:
    b = make_builder()
    for heads, window in ((Heads(4, 2, 8), None), (Heads(4, 1, 8), 5)):
        b.attention("a", heads, Scores(scale=1.0, window=window))
    block = 2 * 16 * 8 * 2  # keys and values of a head, of 2 bytes
    assert b.caches() == (LayerCache(2 * block, None), LayerCache(block, 5))


def test_a_backend_is_asked_for_every_kind_of_layer_once() -> None:
    b = make_builder()
    for name, window in (("a", None), ("b", 5), ("c", 9), ("d", 5)):
        b.attention(name, Heads(4, 2, 8), Scores(scale=1.0, window=window))
    assert [spec.window for spec in b.attention_needs()] == [None, 5, 9]


def test_layers_with_equal_rotary_numbers_share_one_table() -> None:
    b = make_builder()
    assert b.at("a").rope(make_rope(8)) is b.at("b").rope(make_rope(8))
    assert b.rope(make_rope(8)) is not b.rope(make_rope(4))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_stage_knows_what_all_layers_keep(index: int) -> None:
    b = make_builder(stage=Stage(index, (1, 2)))

    def layer(i: int, at: Builder) -> Attention:
        scores = Scores(scale=1.0, window=(7, 5, None)[i])
        return at.attention("attn", Heads(4, (1, 2, 1)[i], 8), scores)

    (mine,) = b.layers(3, layer)
    assert isinstance(mine, Attention) and b.attention_layers == [mine]
    assert [cache.window for cache in b.caches()] == [7, 5, None]
    assert mine.spec.cache == b.caches()[index]
    assert mine.k_scale_weight is not None and not mine.k_scale_weight.is_meta
