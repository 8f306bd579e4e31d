"""Whatever proposes, and however the model is run: in float32 every token is that without drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from pellucid import LLM
from pellucid.engine.core import Engine
from pellucid.spec.drafter import Drafter
from tests.llm.test_invariance import BASE, NGRAM, random_requests
from tests.spec import heads

pytestmark = pytest.mark.usefixtures("forked_members")

WAYS: dict[str, dict[str, object]] = {
    "two ranks": {"tensor_parallel_size": 2, "depth": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "hits and small chunks": {"max_num_batched_tokens": 24, "depth": 2},
    "an FP8 cache": {"kv_cache_dtype": "fp8", "num_gpu_blocks_override": 20},
}
METHODS = ("ngram", "suffix", "draft_model", *heads.METHODS)
# Of which drafter planning is told, where it is none with KV.
DRAFTERS = {
    "none": Drafter.NONE, "ngram": Drafter.READS_TEXT, "suffix": Drafter.READS_TEXTS,
    **dict.fromkeys(("medusa", "medusa, a tree"), Drafter.STATELESS),
}  # fmt: skip
# In a pipeline the last stage has neither other layers' streams nor the model's embedding.
REFUSED = {"dflash": "pipeline stage", "eagle3": "pipeline stage", "mtp": "pipeline stage"}
OFTEN = {  # in every run of the suite, the others with `make test-parallel`
    ("ngram", "an FP8 cache"), ("suffix", "hits and small chunks"), ("draft_model", "two stages"),
    ("pard", "hits and small chunks"), ("eagle", "two stages"), ("eagle3", "two ranks"),
    ("dflash", "an FP8 cache"),
    ("medusa", "hits and small chunks"), ("medusa, a tree", "two ranks"), ("mtp", "hits and small chunks"),
    ("eagle, trees", "two stages"), ("mtp, trees", "hits and small chunks"),
}  # fmt: skip
PAIRS = [
    (method, way)
    for method in METHODS
    for way in WAYS
    if not (way == "two stages" and method.partition(",")[0] in REFUSED)
]


def run(model: Path, method: str = "none", **options: object) -> list[list[list[int]]]:
    """Of 20 requests, twice, the second time with hits: every kind of sampling, logprobs among them."""
    prompts, params = random_requests(20, seed=9)
    with LLM(str(model), **(BASE | options)) as llm:
        engine = llm.llm_engine.engine
        assert isinstance(engine, Engine)
        assert engine.scheduler.options.drafter is DRAFTERS.get(method, Drafter.KEEPS_KV)
        return [
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            for _ in range(2)
        ]


@cache
def plainly(model: Path, kv: object) -> list[list[list[int]]]:
    return run(model, kv_cache_dtype=kv)


def drafts_of(method: str, tiny: Path, tiny_draft: Path, folder: Path) -> tuple[Path, dict[str, object]]:
    own = {
        "ngram": NGRAM,
        "suffix": {"method": "suffix", "num_speculative_tokens": 3},
        "draft_model": {"model": str(tiny_draft), "num_speculative_tokens": 3},
    }
    return (tiny, own[method]) if method in own else heads.drafts_of(method, tiny, folder)


@pytest.mark.parametrize(
    ("method", "way"),
    [pytest.param(*pair, marks=() if pair in OFTEN else pytest.mark.parallel) for pair in PAIRS],
)
def test_tokens_are_those_without(
    tiny: Path, tiny_draft: Path, tmp_path: Path, method: str, way: str
) -> None:
    model, config = drafts_of(method, tiny, tiny_draft, tmp_path)
    expected = plainly(tiny, WAYS[way].get("kv_cache_dtype", "auto"))
    assert run(model, method, **WAYS[way], speculative_config=config | {"adaptive": False}) == expected


@pytest.mark.parametrize("method", REFUSED)
def test_what_a_last_stage_lacks_is_named(tiny: Path, tmp_path: Path, method: str) -> None:
    model, config = heads.drafts_of(method, tiny, tmp_path)
    with pytest.raises(ValueError, match=REFUSED[method]):
        LLM(str(model), **BASE, pipeline_parallel_size=2, speculative_config=config)
