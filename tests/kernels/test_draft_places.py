"""The kernel that finds the places of a drafter's passes against its plain reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.slots.draft_places import Behind, DraftPlaces, draft_places, draft_places_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS, LENGTH = 30, 160


def behind(num_rows: int, num_tables: int, block_size: int, seed: int = 0) -> Behind:
    """Rows of 1 to 5 queries, some of which have not come further than what the step has fed.

    Of several rows the last one has no queries, as padding has, and there is no token behind it.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    queries = numbers(1, 6, num_rows)
    queries[1:][-1:] = 0
    ends = torch.cat([queries.new_zeros(1), queries]).cumsum(0)
    return Behind(
        slots=torch.randperm(NUM_SLOTS, generator=generator)[:num_rows].to(DEVICE),
        newest=numbers(1, 89, num_rows),
        token_ids=numbers(0, 1000, NUM_SLOTS, LENGTH).int(),
        positions=numbers(0, 90, int(ends[-1])),
        cu_seqlens_q=ends.int(),
        block_tables=tuple(
            numbers(1, 99, num_rows, 2 + LENGTH // block_size).int() for _ in range(num_tables)
        ),
        block_size=block_size,
    )


def tensors(places: DraftPlaces) -> list[Tensor]:
    """All of it, in order."""

    def leaves(value: Tensor | tuple) -> list[Tensor]:
        return [value] if isinstance(value, Tensor) else [leaf for part in value for leaf in leaves(part)]

    return leaves(tuple(getattr(places, field.name) for field in dataclasses.fields(places)))


def assert_alike(got: DraftPlaces, expected: DraftPlaces) -> None:
    for one, other in zip(tensors(got), tensors(expected), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("num_rows", [1, 4, 7])
@pytest.mark.parametrize("num_query", [1, 2])
@pytest.mark.parametrize("num_passes", [1, 2, 3, 8, 40])
@pytest.mark.parametrize(("num_tables", "block_size"), [(1, 16), (2, 64)])
def test_the_places_of_every_pass_match(
    num_rows: int, num_query: int, num_passes: int, num_tables: int, block_size: int
) -> None:
    rows = behind(num_rows, num_tables, block_size, seed=num_rows + num_passes)
    got = draft_places(rows, num_query, num_passes)
    assert_alike(got, draft_places_ref(rows, num_query, num_passes))
    for tensor in tensors(got):
        assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0, "kernels would have variants for it"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("num_query", [1, 2])
def test_a_recording_finds_the_places_of_what_has_come_since(num_query: int) -> None:
    rows = behind(23, 2, 16)
    draft_places(rows, num_query, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = draft_places(rows, num_query, 5)
    for _ in range(3):
        graph.replay()
        assert_alike(got, draft_places_ref(rows, num_query, 5))
        rows.newest.add_(1)
        rows.token_ids.copy_(rows.token_ids.roll(1, 0))
