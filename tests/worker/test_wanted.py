"""Behind the last layer's attention only tokens whose logits are sampled go on, unless others are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pellucid import LLM, SamplingParams
from pellucid.forward import ForwardInput, TileMaps
from pellucid.graphs.launch import EagerLauncher
from pellucid.layers.linear import Linear
from pellucid.models.decoder import Decoder
from pellucid.rows import StepRows
from pellucid.spec.base import Needs
from pellucid.types import RequestOutput
from pellucid.worker.device_step import DeviceStep, Forward
from pellucid.worker.inputs import StepInput
from tests.graphs.test_graphs import worker_of

OPTIONS = {
    "dtype": "float32", "device": "cpu", "block_size": 16, "max_num_seqs": 4, "max_model_len": 96,
    "max_num_batched_tokens": 24, "cpu_kv_cache_gib": 0.01,
}  # fmt: skip
LENGTHS = (60, 5, 30)  # the first and the last come in chunks, one of them alone in a step
PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(length)] for i, length in enumerate(LENGTHS)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)


def forward_of(llm: LLM) -> Forward:
    launcher = worker_of(llm).runner.launcher
    assert isinstance(launcher, EagerLauncher) and isinstance(launcher.step, DeviceStep)
    return launcher.step.forward


def rows_of_products(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Filled with, for every step, how many of its tokens the output projections of all layers had."""
    seen: list[list[tuple[int, int]]] = []
    model = forward_of(llm).model
    assert isinstance(model, Decoder)
    run = Decoder.forward

    def begin(self: Decoder, fwd: ForwardInput) -> Tensor:
        seen.append([])
        return run(self, fwd)

    monkeypatch.setattr(Decoder, "forward", begin)
    for layer in model.layers:
        assert isinstance(layer.o, Linear)

        def forward(x: Tensor, fwd: ForwardInput, o: Linear = layer.o) -> Tensor:
            seen[-1].append((len(x), fwd.num_tokens))
            return Linear.forward(o, x, fwd)

        monkeypatch.setattr(layer.o, "forward", forward)
    return seen


def said(outputs: list[RequestOutput]) -> tuple[list[list[int]], list[float]]:
    """Tokens, and the logprobs of these and of the best ones."""
    chosen = [output.outputs[0] for output in outputs]
    logprobs = [
        each.logprob for one in chosen for token in one.logprobs or () for each in dict(token).values()
    ]
    return [one.token_ids for one in chosen], logprobs


def test_the_last_layer_goes_on_with_tokens_that_are_sampled(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        seen = rows_of_products(llm, monkeypatch)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(seen[0]) > 1 and seen[0][0] == (24, 24), "all tokens of a chunk need KV in every layer"
    assert seen[0][-1] == (1, 24), "nothing of it is sampled, and layers want a row at least"
    assert all(rows[0][0] == rows[0][1] and rows[-1][0] <= len(PROMPTS) for rows in seen)


@pytest.mark.parametrize("needs", [Needs(), Needs(hidden=True)], ids=["sampled", "all"])
def test_what_is_left_out_changes_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch, needs: Needs) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        monkeypatch.setattr(ForwardInput, "wanted", lambda fwd, x: x)
        expected = said(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        monkeypatch.undo()
        llm.reset_prefix_cache()
        forward = forward_of(llm)
        forward.needs = needs

        def gather(rows: StepRows, tiles: TileMaps | None = None) -> StepInput:
            """As if drafts were wanted behind every step."""
            return Forward.gather(forward, replace(rows, counts=replace(rows.counts, num_propose=1)), tiles)

        monkeypatch.setattr(forward, "gather", gather)
        seen = rows_of_products(llm, monkeypatch)
        token_ids, logprobs = said(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert token_ids == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-5)
    assert (seen[0][-1] == seen[0][0]) == needs.hidden


def test_prompt_logprobs_want_every_token(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        seen = rows_of_products(llm, monkeypatch)
        (output,) = llm.generate(PROMPTS[:1], replace(PARAMS, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == LENGTHS[0]
    assert seen[0][-1] == (24, 24)


def test_rows_wanted() -> None:
    x = torch.arange(10.0).view(5, 2)
    none = torch.empty(0, dtype=torch.int64)
    fwd = ForwardInput(
        input_ids=torch.zeros(5, dtype=torch.int32), positions=torch.arange(5), slots=torch.arange(1),
        cu_seqlens_q=none, seq_lens=none, block_tables=(), slot_mappings=(),
        logits_index=torch.tensor([1, 4]),
    )  # fmt: skip
    assert fwd.wanted(x) is x, "nobody has said that some are not"
    some = replace(fwd, all_wanted=False)
    assert torch.equal(some.wanted(x), x[[1, 4]]) and torch.equal(some.sampled(some.wanted(x)), x[[1, 4]])
    nothing = replace(some, logits_index=none)
    assert torch.equal(nothing.wanted(x), x[:1]) and nothing.sampled(nothing.wanted(x)).shape == (0, 2)


@pytest.mark.parametrize("num_propose", [0, 2])
def test_a_step_without_drafts_keeps_nothing_for_the_drafter(num_propose: int) -> None:
    riders = SimpleNamespace(extend=())
    counts = SimpleNamespace(num_propose=num_propose, num_scores=np.zeros(3), riders=riders)
    step = SimpleNamespace(fwd=SimpleNamespace(block_tables=()))
    inputs: Any = SimpleNamespace(slots=None, gather=lambda _: step)
    nobody: Any = None
    rows: Any = SimpleNamespace(counts=counts)
    forward = Forward(nobody, nobody, inputs, needs=Needs(hidden=True, taps=(1,)))
    fwd: Any = forward.gather(rows).fwd
    assert fwd.all_wanted == (num_propose > 0) and fwd.taps.layers == ((1,) if num_propose else ())
