"""On a GPU: nearly all memory is given back, and behind a sleep steps are replayed as before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pellucid import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
        "dtype": "float32",
    },
}


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_is_given_back_and_taken_again(engine: str) -> None:
    options = {"max_model_len": 1024, "max_num_seqs": 16, "gpu_memory_utilization": 0.3, "seed": 0}
    with LLM("shape:qwen3-0.6b", **options, **ENGINES[engine]) as llm:
        prompts = [[*range(100 + i, 140 + i)] for i in range(8)]
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

        def tokens() -> list[list[int]]:
            return [[*out.outputs[0].token_ids] for out in llm.generate(prompts, greedy, use_tqdm=False)]

        expected, held = tokens(), torch.cuda.memory_reserved()
        for level in (1, 2, 1):
            llm.sleep(level)
            assert torch.cuda.memory_reserved() < 0.02 * held, level
            llm.wake_up(["weights"])
            llm.wake_up(["kv_cache"])
            assert tokens() == expected, level
            assert torch.cuda.memory_reserved() < 1.02 * held
        assert llm.llm_engine.engine.stats().num_late_compilations == 0
        llm.sleep(1)
        hog = torch.empty(int(0.9 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
        with pytest.raises(ValueError, match="GiB of device memory are lacking"):
            llm.wake_up()
        del hog
        torch.cuda.empty_cache()
        llm.wake_up()
        assert tokens() == expected
