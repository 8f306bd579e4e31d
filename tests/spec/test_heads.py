"""Draft heads in public layouts draft what their papers say, however the engine has cut the text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pellucid import LLM, SamplingParams
from pellucid.sample.output import SampleOutput
from pellucid.spec.base import Drafts, Known, Proposer
from pellucid.spec.tree import parents_of
from tests.llm.test_invariance import BASE, random_requests
from tests.spec import heads
from tests.spec.test_draft_model import worker_of
from tests.spec.toy import want_at_random

NUM = 3


@contextmanager
def seen_drafts(llm: LLM) -> Iterator[list[tuple[list[int], list]]]:
    """What is proposed from now on: known texts, and the drafts behind each; of trees with their parents."""
    seen: list[tuple[list[int], list]] = []
    proposer: Proposer = worker_of(llm.llm_engine.engine).runner.launcher.step.proposer  # type: ignore[attr-defined]
    propose = proposer.propose

    def watch(fwd, sampled: SampleOutput, known: Known, hidden, taps) -> Drafts:
        drafts = propose(fwd, sampled, known, hidden, taps)
        if known.num_wanted:
            for row in known.samples.nonzero()[:, 0].tolist():
                text = known.token_ids[fwd.slots[row], : known.newest[row] + 1].tolist()
                tokens = drafts.tokens[row].tolist()
                if drafts.parents is not None:
                    tokens = [*zip(tokens, drafts.parents[row].tolist(), strict=True)]
                seen.append((text, tokens))
        return drafts

    proposer.propose = watch  # type: ignore[method-assign]
    yield seen


# Greedy requests in small chunks, on a pool that runs dry.
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SMALL = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 20, "enable_prefix_caching": False}


@cache
def plainly(model: Path, **options: object) -> list[list[int]]:
    """Their answers without drafts."""
    with LLM(str(model), **BASE | SMALL | options) as llm:
        outputs = llm.generate(random_requests(12, seed=21)[0], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def theirs(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def check(
    model: Path, config: dict, reference: heads.Reference, weights: heads.Tensors, most: int = NUM, **options
) -> None:
    """With 0 to `most` drafts in a step."""
    config = config | {"adaptive": False}  # a look at plain steps would leave the head without their keys
    with (
        LLM(str(model), **BASE | SMALL | options, speculative_config=config) as llm,
        seen_drafts(llm) as seen,
    ):
        engine: Any = llm.llm_engine.engine
        want_at_random(engine.scheduler, random.Random(3), most)
        outputs = llm.generate(random_requests(12, seed=21)[0], GREEDY, use_tqdm=False)
        assert llm.llm_engine.stats.num_preemptions, "the pool never ran dry"
    assert [o.outputs[0].token_ids for o in outputs] == plainly(model, **options)
    target = load_file(model / "model.safetensors")
    hf = theirs(model)
    assert len(seen) > 50
    with torch.no_grad():
        for text, drafts in random.Random(4).sample(seen, 40):
            states = states_of(hf, text[:-1])
            assert drafts == reference(text, states, target, weights, len(drafts)), f"behind {text}"


def states_of(hf: Any, text: list[int]) -> list[torch.Tensor]:
    """[n, D] each: what enters every layer, what leaves the last, and that behind the norm."""
    streams: list[torch.Tensor] = []
    hook = hf.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    hidden = hf(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return [state[0] for state in (*hidden[:-1], *streams, hidden[-1])]


def test_eagle(tiny: Path, tmp_path: Path) -> None:
    folder = heads.write_eagle(tmp_path)
    weights = torch.load(folder / "pytorch_model.bin")
    check(tiny, {"model": str(folder), "num_speculative_tokens": NUM}, heads.eagle, weights)


OPTIONS = [  # without them, heads of the speculators project and trees draft
    pytest.param({}, marks=pytest.mark.matrix),
    pytest.param({"norm_before_residual": True}, marks=pytest.mark.matrix),
    {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True},
    {"fc_norm": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_eagle3(tiny: Path, tmp_path: Path, options: dict) -> None:
    folder = heads.write_eagle3(tmp_path, **options)
    weights = load_file(folder / "model.safetensors")
    check(tiny, {"model": str(folder), "num_speculative_tokens": NUM}, heads.eagle3(options), weights)


def test_eagle3_of_the_speculators_project(tiny: Path, tmp_path: Path) -> None:
    """Its config nests the layer's, and says how many tokens to draft."""
    folder = heads.write_speculators(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    with LLM(str(tiny), **BASE, speculative_config={"model": str(folder)}) as llm:
        config = llm.llm_engine.resolved.speculative
        assert (config.method, config.num_speculative_tokens) == ("eagle3", 4)
    check(tiny, {"model": str(folder), "num_speculative_tokens": NUM}, heads.eagle3(), weights)


@pytest.mark.parametrize("form", heads.MTP_FORMS)
def test_mtp(tmp_path: Path, form: str) -> None:
    model = heads.write_with_mtp(tmp_path / form, form)
    weights = load_file(model / "mtp.safetensors")
    check(model, {"method": "mtp", "num_speculative_tokens": NUM}, heads.mtp(form), weights)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_trees_grow_as_eagle_2_says(
    tiny: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row and step has another tree; whatever of it stands, the head's KV goes on with that."""
    model, config = heads.drafts_of(f"{method}, trees", tiny, tmp_path)
    files = {"eagle": "eagle-tiny/pytorch_model.bin", "eagle3": "tiny-eagle3/model.safetensors"}
    file = tmp_path / files.get(method, "model/mtp.safetensors")
    weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    reference = {"eagle": heads.eagle, "eagle3": heads.eagle3(), "mtp": heads.mtp("mtp")}[method]
    monkeypatch.setattr(heads, "chain", partial(heads.grown, width=3, depth=4))
    check(model, config | {"speculative_num_steps": 4}, reference, weights, most=9)


@pytest.mark.parametrize("is_exported", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_medusa(tiny: Path, tmp_path: Path, is_exported: bool) -> None:
    folder = heads.write_medusa(tmp_path, is_exported=is_exported)
    file = next(file for file in folder.iterdir() if file.suffix != ".json")
    weights = load_file(file) if is_exported else torch.load(file)
    check(tiny, {"model": str(folder), "num_speculative_tokens": NUM}, heads.medusa, weights)


def test_a_tree_of_medusas(tiny: Path, tmp_path: Path) -> None:
    """Nodes are the heads' likeliest tokens by rank; a chain's text and a tree's are the same."""
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]

    def reference(text, states, target, weights, num) -> list[tuple[int, int]]:
        x = states[-1][len(text) - 2]
        best = [heads.medusa_logits(x, weights, i).argsort(descending=True) for i in range(3)]
        tokens = [int(best[len(path) - 1][path[-1]]) for path in paths]
        return [*zip(tokens, parents_of(paths), strict=True)]

    folder = heads.write_medusa(tmp_path, is_exported=True)
    config = {"model": str(folder), "speculative_token_tree": str(paths)}
    check(tiny, config, reference, load_file(folder / "model.safetensors"))
