"""An engine with a model writes its steps down."""

from __future__ import annotations

from pathlib import Path

from pellucid import LLM, SamplingParams
from pellucid.observe.replay import StepCost, measured, read_trace, replay


def test_a_trace_of_a_model_runs_again(tmp_path: Path) -> None:
    """With what the answers got and no more, though steps are planned ahead of stops and preemptions."""
    path = tmp_path / "trace.jsonl"
    prompts = ["Once upon a time", "import os", "The sum of"]
    with LLM(
        device="cpu", num_threads=1, cpu_kv_cache_gib=0.02, max_num_seqs=4, trace_steps=str(path), depth=2,
        block_size=16, num_gpu_blocks_override=6, max_model_len=80,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    ) as llm:  # fmt: skip
        same = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
        outputs = llm.generate(prompts, same, use_tqdm=False)
        again = (
            {"logit_bias": {40: 90.0}, "stop_token_ids": [40], "min_tokens": num} for num in (10, 12, 17)
        )
        outputs += llm.generate(
            prompts,
            [SamplingParams(max_tokens=40, ignore_eos=True, **each) for each in again],
            use_tqdm=False,
        )
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert llm.llm_engine.stats.num_sampled_tokens == sum(lengths)
        assert llm.llm_engine.stats.num_preemptions > 0
    recorded = read_trace(path)
    assert [*recorded.num_generated.values()] == lengths
    assert measured(recorded).num_tokens == sum(lengths)
    replayed = replay(recorded, StepCost(recorded.steps))
    assert replayed.num_tokens == sum(lengths) and not replayed.refused
