"""The kernels of trees against their plain references, and these against trees as numbers."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.sampling.trees import tree_places, tree_places_ref, verify_tree, verify_tree_ref
from pellucid.kernels.slots.gather_rows import gather_rows_ref
from pellucid.rows import StepRows, Trees
from pellucid.worker.inputs import trailing
from tests.kernels.test_gather_rows import DEVICE, NUM_SLOTS, held, rows_of
from tests.trees import ancestor_bits, depths_of, paths_of


def random_trees(rng: np.random.Generator, slots: Tensor, num_drafts: int, depth: int) -> Trees:
    """No draft is deeper than `depth`."""
    rows = []
    for _ in range(NUM_SLOTS):
        depths, parents = [0], list[int]()
        for _ in range(num_drafts):
            parents.append(int(rng.choice([node for node, d in enumerate(depths) if d < depth])))
            depths.append(depths[parents[-1]] + 1)
        rows.append(parents)
    return Trees(torch.tensor(rows, dtype=torch.int8, device=DEVICE), slots, depth)


def step_of(queries: list[int], drafts: list[int], padding: int) -> StepRows:
    """Rows with a logit for each draft and the token before them."""
    logits = [1 + num if queries[row] else 0 for row, num in enumerate(drafts)]
    step = rows_of(queries, drafts, logits, padding)
    index = torch.zeros_like(step.logits_index)
    index[: sum(logits)] = torch.tensor(trailing(np.cumsum(queries), np.array(logits)))
    return replace(step, logits_index=index)


@pytest.mark.parametrize("padding", [0, 150])
@pytest.mark.parametrize(
    ("queries", "drafts", "depth"),
    [
        ([1, 6, 4], [0, 5, 3], 3),
        ([300, 5, 1, 0], [0, 4, 0, 0], 4),
        ([65, 400, 129], [64, 64, 64], 64),
        ([3, 2], [2, 1], 1),
    ],
)
def test_tokens_are_where_their_trees_say(
    queries: list[int], drafts: list[int], depth: int, padding: int
) -> None:
    step = step_of(queries, drafts, padding)
    rows = gather_rows_ref(step, held(1, 16, seed=3))
    trees = random_trees(np.random.default_rng(4), rows.slots, max(drafts), depth)
    expected, got = tree_places_ref(step, rows, trees), tree_places(step, rows, trees)
    for each in fields(expected):
        ours, theirs = getattr(got, each.name), getattr(expected, each.name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), each.name
    token = logit = 0
    for row, (num_query, num_drafts) in enumerate(zip(queries, drafts, strict=True)):
        parents = tuple(trees.parents[rows.slots[row]].tolist())
        root = token + num_query - 1 - num_drafts
        for node in range(num_drafts + 1 if num_query else 0):
            at, path = root + node, paths_of(parents)[node]
            position = int(rows.roots[row]) + depths_of(parents)[node]
            assert got.positions[at] == position and got.ancestors[at] == ancestor_bits(parents)[node]
            assert got.logit_positions[logit] == position + 1 and got.logit_roots[logit] == rows.roots[row]
            assert got.paths[logit].tolist() == path + [0] * (depth - len(path))
            logit += 1
        assert torch.equal(got.positions[token:root], rows.places[token:root])
        assert not got.ancestors[token:root].any()
        token += num_query


@pytest.mark.parametrize(("num_drafts", "depth"), [(1, 1), (5, 2), (17, 4), (64, 64)])
def test_the_same_paths_stand(num_drafts: int, depth: int) -> None:
    rng, seen = np.random.default_rng(num_drafts), set[int]()
    for num_rows in (1, 13, 13, 13):
        counts = torch.tensor(rng.integers(0, num_drafts + 2, num_rows), device=DEVICE)
        counts[0] = num_drafts + 1
        cu_logits = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
        # Tokens of two kinds, so that drafts often stand; rows without logits, and without room.
        chosen, inputs, room, samples = (
            torch.tensor(rng.integers(0, high, num), device=DEVICE)
            for high, num in ((2, int(counts.sum())),) * 2 + ((depth + 3, num_rows), (5, num_rows))
        )
        slots = torch.tensor(rng.permutation(NUM_SLOTS)[:num_rows], device=DEVICE)
        trees = random_trees(rng, slots, num_drafts, depth)
        args = (chosen.int(), inputs.int(), cu_logits, room - 1, samples > 0)
        expected = verify_tree_ref(*args, trees=trees, max_drafts=num_drafts)
        got = verify_tree(*args, trees=trees, max_drafts=num_drafts)
        max_new = 1 + min(depth, num_drafts)
        parts = [flat.split([num_rows * max_new, num_rows]) for flat, _ in (got, expected)]
        (tokens, num_new), (tokens_ref, num_new_ref) = parts
        assert torch.equal(num_new, num_new_ref)
        counted = torch.arange(max_new, device=DEVICE) < num_new[:, None]
        assert torch.equal(tokens.view(-1, max_new)[counted], tokens_ref.view(-1, max_new)[counted])
        assert torch.equal(got[1][counted], expected[1][counted])
        seen |= set(num_new.tolist())
    assert len(seen) >= min(4, 2 + depth)
