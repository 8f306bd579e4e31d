"""Trees that grow as EAGLE-2's: what the options say, and whose are the best nodes.

tests/spec/test_heads.py holds trees of whole heads to a naive search.
"""

from __future__ import annotations

import pytest
import torch

from pellucid.config import SpeculativeConfig, SpeculativeOptions
from pellucid.spec.grow import Named, best_of


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
