"""Trees that grow as EAGLE-2's: what the options say, and whose are the best nodes.

tests/spec/test_heads.py holds trees of whole heads to a naive search.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid.config import SpeculativeConfig, SpeculativeOptions
from pellucid.forward import ForwardInput
from pellucid.spec.base import Known
from pellucid.spec.grow import Grower, Named, best_of, branches


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"speculative_eagle_topk": 4}, (4, 5, 16)),
        ({"speculative_eagle_topk": 8, "speculative_num_steps": 1}, (8, 1, 8)),
        ({"speculative_eagle_topk": 4, "num_speculative_tokens": 9}, (4, 3, 9)),
        (
            {"speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 9},
            (2, 3, 8),
        ),
        ({"speculative_num_steps": 3}, (1, 0, 3)),
        ({"speculative_num_draft_tokens": 4, "speculative_eagle_topk": 1}, (1, 0, 3)),
    ],
    ids=str,
)
def test_what_is_not_said_follows(given: dict[str, object], sizes: tuple[int, int, int]) -> None:
    """Width, depth of trees, and drafts; SGLang counts the token before them, too."""
    options = SpeculativeOptions(speculative_config={"method": "mtp", **given})
    config = SpeculativeConfig.of(options)
    assert (config.speculative_eagle_topk, config.tree_depth, config.num_speculative_tokens) == sizes


def test_the_best_nodes_of_all_depths_are_the_tree() -> None:
    """Of equals the one that was named first comes first, so none comes before its parent."""
    first = Named(torch.tensor([[5, 6]]), torch.tensor([[-0.1, -2.0]]), torch.tensor([[0, 0]]))
    second = Named(
        torch.tensor([[7, 8, 9, 4]]), torch.tensor([[-0.1, -1.0, -2.0, -9.0]]), torch.tensor([[1, 1, 2, 2]])
    )
    third = Named(torch.tensor([[3, 2]]), torch.tensor([[-0.1, -3.0]]), torch.tensor([[3, 3]]))
    drafts = best_of([first, second, third], 6)
    assert drafts.tokens.tolist() == [[5, 7, 3, 8, 6, 9]]
    assert drafts.parents is not None and drafts.parents.tolist() == [[0, 1, 2, 1, 0, 5]]


def test_nodes_of_a_head_that_is_not_a_number_come_behind_those_above_them() -> None:
    grower = Grower(run=lambda fwd, x: x, logits=lambda x: x, width=2, depth=2)
    zero = torch.zeros(1, 1)
    first = grower._name(torch.tensor([[[1.0, 0.5, 0.0]]]), zero, zero.long())
    broken = torch.tensor([[[torch.nan] * 3, [0.1, 0.2, 0.3]]])
    second = grower._name(broken, first.scores, torch.tensor([[1, 2]]))
    parents = best_of([first, second], 6).parents
    assert parents is not None and (parents < torch.arange(1, 7)).all()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_drafts_of_one_depth_lie_behind_those_before(num_rows: int) -> None:
    """Side by side in memory, too, as kernels read them, even for one row."""
    newest = torch.tensor([20, 5, 33][:num_rows])
    empty = torch.zeros(0, dtype=torch.int64)
    table = torch.arange(12, dtype=torch.int32).view(3, 4)[:num_rows]
    fwd = ForwardInput(
        input_ids=empty, positions=empty, slots=torch.arange(num_rows), cu_seqlens_q=empty, seq_lens=empty,
        block_tables=(table,), slot_mappings=(empty,), logits_index=empty, block_size=16,
    )  # fmt: skip
    known = Known(
        token_ids=torch.zeros(4, 64, dtype=torch.int32), newest=newest, samples=newest > 0,
        host_slots=np.arange(num_rows), has_chunks=False, num_wanted=8,
    )  # fmt: skip
    tokens = torch.arange(2 * num_rows).view(num_rows, 2)
    fed = branches(fwd, known, 3, tokens, torch.ones_like(tokens))
    assert fed.tree is not None and fed.tree.first_drafts.tolist() == newest.tolist()
    for row, place in enumerate(newest.tolist()):
        own = slice(2 * row, 2 * row + 2)
        assert fed.positions[own].tolist() == [place + 3] * 2
        places = [place + 6, place + 7]
        assert fed.slot_mappings[0][own].tolist() == [int(table[row, p // 16]) * 16 + p % 16 for p in places]
        assert fed.seq_lens[row] == place + 8
    for each in (fed.input_ids, fed.positions, fed.seq_lens, fed.tree.ancestors, *fed.slot_mappings):
        assert each.is_contiguous()


def said(method: str = "mtp", topk: int = 4, steps: int = 5, tokens: int = 16, **more: object) -> dict:
    sizes = {"speculative_eagle_topk": topk, "speculative_num_steps": steps, "num_speculative_tokens": tokens}
    return {"method": method, **sizes, **more}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (said(method="ngram"), "ngram grows no trees; .* or use method eagle, eagle3, mtp"),
        (said(topk=9), r"speculative_eagle_topk is 9, must be in \[1, 8\]"),
        (said(steps=0), r"speculative_num_steps is 0, must be in \[1, 64\]"),
        (said(tokens=7), r"num_speculative_tokens is 7; .* must be in \[16, 68\]"),
        (said(tokens=69), r"must be in \[1, 64\]"),
        (said(topk=1, tokens=4), "a chain has a draft a step; make them equal"),
        (said(speculative_token_tree=[[0]] * 16), "one tree for all"),
        (said(speculative_num_draft_tokens=17), "say the same, the first 1 more"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(SpeculativeOptions(speculative_config=config))
