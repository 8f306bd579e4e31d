"""However a model is spread over ranks, in float32 every request's tokens are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.types import SamplingParams
from tests.llm.test_invariance import random_requests, run
from tests.tiny import write_checkpoint

MODELS = {
    "untied": {},
    "one kv head, odd vocabulary": {"num_key_value_heads": 1, "vocab_size": 331},
    "tied, odd vocabulary": {"tie_word_embeddings": True, "vocab_size": 331},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_two_ranks_share_every_layer(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = write_checkpoint(tmp_path / "model", **changes)
    prompts, params = random_requests(24, seed=3)
    assert run(folder, prompts, params, tensor_parallel_size=2, depth=2) == run(folder, prompts, params)


def test_a_pool_that_runs_dry_is_the_same_on_all_ranks(tiny: Path) -> None:
    prompts, params = random_requests(24, seed=4)
    expected = run(tiny, prompts, params)
    dry = {"num_gpu_blocks_override": 16, "depth": 2, "max_num_batched_tokens": 40}
    assert run(tiny, prompts, params, tensor_parallel_size=2, **dry) == expected


def test_sprout_says_the_same() -> None:
    prompts = [[*range(100 + i, 160 + 3 * i)] for i in range(4)]
    params = [SamplingParams(temperature=t, max_tokens=24, seed=7) for t in (0.0, 0.7, 1.0, 0.0)]
    folder = Path("sprout")
    assert run(folder, prompts, params, tensor_parallel_size=2) == run(folder, prompts, params)
