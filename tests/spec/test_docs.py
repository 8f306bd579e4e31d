"""What docs/speculation.md writes runs as it stands there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pellucid import LLM, SamplingParams
from pellucid.config import EngineConfig, SpeculativeConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.draft import open_draft
from pellucid.spec.registry import PROPOSERS, VERIFIERS
from tests.llm.test_invariance import BASE

PAGE = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_first_example_drafts() -> None:
    (example,) = (block for block in BLOCKS if block.startswith("llm = LLM("))
    names: dict[str, LLM] = {}
    exec("from pellucid import LLM\n" + example, names)
    with names["llm"] as llm:
        assert llm.llm_engine.resolved.speculative.method == "draft_model"


def test_the_example_with_a_grammar_drafts() -> None:
    pytest.importorskip("xgrammar")
    (example,) = (block for block in BLOCKS if '"method": "grammar"' in block)
    names: dict[str, int] = {}
    exec(example, names)
    assert names["forced"] > 0


def test_configs_are_of_methods_that_there_are() -> None:
    found = re.findall(r"--speculative-config '({.*?})'", PAGE, flags=re.DOTALL)
    assert len(found) >= 3
    for text in found:
        config = EngineConfig.from_options({"speculative_config": json.loads(text)})
        draft = open_draft(config, Checkpoint.open(config.model))
        assert draft.config.method in PROPOSERS and draft.config.rejection_sample_method in VERIFIERS


def test_keys_are_those_of_the_table() -> None:
    table = PAGE.split("| key | default |")[1].split("\n\n")[0]
    listed = set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE))
    assert listed == set(SpeculativeConfig.__dataclass_fields__)


def test_the_proposer_of_the_guide_drafts_and_changes_nothing(tiny: Path) -> None:
    (example,) = (block for block in BLOCKS if "class EchoProposer" in block)
    module = ModuleType("echo_of_the_guide")
    exec(example, module.__dict__)
    sys.modules[module.__name__] = module
    PROPOSERS.register("echo", "echo_of_the_guide:EchoProposer")
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[7, 7, 7, 7], [1, 2, 3], list(range(5, 60))]

    def texts(**options: object) -> list[list[int]]:
        with LLM(str(tiny), **BASE, **options) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]

    drafts = {"method": "echo", "num_speculative_tokens": 3, "adaptive": False}
    assert texts(speculative_config=drafts) == texts()


@pytest.mark.parametrize("name", ["disable_padded_drafter_batch", "use_local_argmax_reduction"])
def test_keys_of_vllm_that_mean_nothing_are_taken(name: str) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    options = EngineConfig.from_options({"speculative_config": {**config, name: True}})
    assert SpeculativeConfig.of(options.speculative) == SpeculativeConfig(**config)  # type: ignore[arg-type]


def test_keys_of_vllm_that_cannot_be_obeyed_are_refused() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "kv_cache_dtype": "fp8"}
    options = EngineConfig.from_options({"speculative_config": config})
    with pytest.raises(ValueError, match="say --kv-cache-dtype for both"):
        SpeculativeConfig.of(options.speculative)
