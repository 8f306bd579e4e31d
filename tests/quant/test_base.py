"""Where checkpoint tensors go: every rank's slices together are the whole, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.dist.vocab_share import vocab_share
from pellucid.quant.base import (
    Coords,
    LinearShape,
    OnFirstRank,
    Place,
    Replicated,
    ScalarPerPart,
    Split,
    matrix,
    packed,
    vector,
)


def shape_of(in_features: int, *out_partitions: int, split: Split = "out") -> LinearShape:
    return LinearShape(
        in_features=in_features, out_partitions=out_partitions, split=split, dtype=torch.float32
    )


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def placed(place: Place, shape: tuple[int, ...], parts: list[Tensor], coords: Coords) -> Tensor:
    param = torch.full(shape, torch.nan)
    for part, tensor in enumerate(parts):
        place(param, part, tensor, coords)
    return param


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_out_the_outputs_of_every_merged_matrix(size: int) -> None:
    up, gate = numbered(8, 3), numbered(16, 3) + 100
    place = matrix(shape_of(3, 8 // size, 16 // size))
    ranks = [placed(place, (24 // size, 3), [up, gate], Coords(rank, size)) for rank in range(size)]
    assert torch.equal(torch.cat([rank[: 8 // size] for rank in ranks]), up)
    assert torch.equal(torch.cat([rank[8 // size :] for rank in ranks]), gate)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_out_the_inputs_of_a_row_layer(size: int) -> None:
    weight = numbered(5, 8)
    place = matrix(shape_of(8 // size, 5, split="in"))
    ranks = [placed(place, (5, 8 // size), [weight], Coords(rank, size)) for rank in range(size)]
    assert torch.equal(torch.cat(ranks, dim=1), weight)


def test_a_transposed_matrix_is_sliced_along_its_own_axes() -> None:
    q, k = numbered(3, 8), numbered(3, 4) + 100
    place = matrix(shape_of(3, 4, 2), out_axis=1, in_axis=0)
    second = placed(place, (3, 6), [q, k], Coords(1, 2))
    assert torch.equal(second, torch.cat((q[:, 4:], k[:, 2:]), dim=1))


def test_packed_outputs_are_counted_in_elements() -> None:
    """Eight outputs to an int32, [in, out / 8], as AWQ packs them."""
    q, k = numbered(3, 8), numbered(3, 4) + 100  # 64 and 32 outputs
    place = packed(shape_of(3, 32, 16), out_per=8, out_axis=1, in_axis=0)
    second = placed(place, (3, 6), [q, k], Coords(1, 2))
    assert torch.equal(second, torch.cat((q[:, 4:], k[:, 2:]), dim=1))


def test_a_column_bias_is_sliced_like_its_outputs() -> None:
    q, k = numbered(8), numbered(4) + 100
    second = placed(vector(shape_of(3, 4, 2)), (6,), [q, k], Coords(1, 2))
    assert second.tolist() == [4, 5, 6, 7, 102, 103]


def test_scales_of_rows_are_whole_on_every_rank_of_a_row_layer() -> None:
    scales = numbered(5)
    assert torch.equal(placed(vector(shape_of(4, 5, split="in")), (5,), [scales], Coords(1, 2)), scales)


def test_a_row_bias_is_added_by_the_first_rank_alone() -> None:
    bias = numbered(4) + 1
    assert torch.equal(placed(OnFirstRank(), (4,), [bias], Coords(0, 2)), bias)
    assert not placed(OnFirstRank(), (4,), [bias], Coords(1, 2)).any()


def test_one_scalar_for_each_part() -> None:
    parts = [torch.tensor(0.5), torch.tensor([0.25]), torch.tensor(2.0)]
    assert placed(ScalarPerPart(), (3,), parts, Coords(1, 2)).tolist() == [0.5, 0.25, 2.0]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (matrix(shape_of(3, 4)), r"\(8, 3\)"),
        (matrix(shape_of(3, 4, split="in")), r"\(4, 6\)"),
        (Replicated(), r"\(4, 3\)"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(place: Place, expected: str) -> None:
    with pytest.raises(ValueError, match=r"has shape \(7, 3\), this model expects " + expected):
        placed(place, (4, 3), [numbered(7, 3)], Coords(0, 2))


@pytest.mark.parametrize("vocab,size", [(331, 2), (331, 4), (5, 4), (512, 2)])
def test_a_vocabulary_is_padded_with_zeros_to_equal_shares(vocab: int, size: int) -> None:
    table, share = numbered(vocab, 3) + 1, vocab_share(vocab, size)
    place = matrix(shape_of(3, share))
    ranks = [placed(place, (share, 3), [table], Coords(rank, size, vocab)) for rank in range(size)]
    whole = torch.cat(ranks)
    assert torch.equal(whole[:vocab], table)
    assert not whole[vocab:].any()
    for other in (vocab - 1, vocab + 1, size * share + 1):
        with pytest.raises(ValueError, match="has shape"):
            placed(place, (share, 3), [numbered(other, 3)], Coords(0, size, vocab))
