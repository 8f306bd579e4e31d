"""An engine with a model writes its steps down."""

from __future__ import annotations

from pathlib import Path

from pellucid import LLM, SamplingParams
from pellucid.observe.replay import StepCost, measured, read_trace, replay


def test_a_trace_of_a_model_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(
        device="cpu", num_threads=1, cpu_kv_cache_gib=0.02, max_num_seqs=2, trace_steps=str(path)
    ) as llm:
        outputs = llm.generate(["Once upon a time", "import os", "The sum of"], params)
    recorded = read_trace(path)
    assert measured(recorded).num_tokens == sum(len(output.outputs[0].token_ids) for output in outputs) == 36
    again = replay(recorded, StepCost(recorded.steps))
    assert again.num_tokens == 36 and not again.refused
