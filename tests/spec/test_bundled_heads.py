"""The bundled model's own heads draft for it, each in its public layout."""

from __future__ import annotations

import json
from functools import cache

import pytest

from pellucid import LLM, SamplingParams
from pellucid.models.checkpoint import ASSETS

HEADS = {  # tokens that a verification yields at least, of 5 or 4
    "eagle3": ({"model": "sprout-eagle3", "num_speculative_tokens": 4}, 3.0),
    "mtp": ({"method": "mtp", "num_speculative_tokens": 4}, 3.3),
    "medusa": ({"model": "sprout-medusa"}, 1.5),
}


def answer(speculative: dict | None) -> tuple[list[list[int]], float]:
    """Greedy token ids of four questions, and tokens a verification."""
    lines = (ASSETS / "sprout" / "eval" / "json_extract.jsonl").read_text(encoding="utf-8").splitlines()
    items = [item for item in map(json.loads, lines) if not item["enable_thinking"]][:4]
    with LLM("sprout", device="cpu", dtype="float32", speculative_config=speculative) as llm:
        outputs = [
            llm.chat(item["messages"], SamplingParams(temperature=0, max_tokens=item["max_tokens"]),
                     use_tqdm=False, chat_template_kwargs={"enable_thinking": False})[0]
            for item in items
        ]  # fmt: skip
        stats = llm.llm_engine.stats
    length = 1 + stats.num_accepted_tokens / max(1, stats.num_drafts)
    return [output.outputs[0].token_ids for output in outputs], length


@cache
def plainly() -> list[list[int]]:
    return answer(None)[0]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_and_changes_nothing(name: str) -> None:
    config, least = HEADS[name]
    tokens, length = answer({**config, "adaptive": False})
    assert tokens == plainly()
    assert length > least
