"""Tokens are the same before a sleep and behind it, at every level, alone and on several ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid import LLM, SamplingParams
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINES: dict[str, dict[str, Any]] = {
    "alone": {},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}},
    "stages": {"executor": "multiproc", "pipeline_parallel_size": 2},
    "engines": {"data_parallel_size": 2},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def tensors() -> dict[int, weakref.ref[torch.Tensor]]:
    """All that there are in this process."""
    kinds = torch.Tensor, torch.nn.Parameter
    return {id(each): weakref.ref(each) for each in gc.get_objects() if type(each) in kinds}


def size(held: Iterable[weakref.ref[torch.Tensor]]) -> int:
    """Bytes of those that are still there."""
    return sum(tensor.nbytes for ref in held if (tensor := ref()) is not None)


@pytest.mark.parametrize("engines", ENGINES)
def test_sleep_changes_no_token(tiny: Path, engines: str) -> None:
    options = {"dtype": "float32", "device": "cpu", "cpu_kv_cache_gib": 0.01, "max_num_seqs": 4}
    others = tensors() if engines == "alone" else None
    with LLM(str(tiny), **options, **ENGINES[engines]) as llm:
        prompts = ["the quick brown fox", "def f(x)"]

        def tokens() -> list[list[int]]:
            return [[*out.outputs[0].token_ids] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]

        expected = tokens()
        for level in (1, 2):
            held = [] if others is None else [ref for key, ref in tensors().items() if key not in others]
            before = size(held)
            llm.sleep(level)
            assert size(held) <= (0.1 * before if level == 1 else 0), "what sleeps holds KV, or weights"
            assert llm.llm_engine.engine.stats().sleep.level == level
            with pytest.raises(ValueError, match="comes back behind weights"):
                llm.wake_up(["kv_cache"])
            llm.wake_up()
            assert llm.llm_engine.engine.stats().sleep.level == 0
            assert tokens() == expected
        llm.sleep(1)
        with pytest.raises(ValueError, match="sleeps already"):
            llm.sleep(2)
        waiting = llm.llm_engine.add_request(prompts[0], GREEDY)
        with pytest.raises(ValueError, match="1 requests are under way"):
            llm.sleep(1)
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        done: dict[str, list[int]] = {}
        while waiting not in done:
            for output in llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = [*output.outputs[0].token_ids]
        assert done[waiting] == expected[0]
