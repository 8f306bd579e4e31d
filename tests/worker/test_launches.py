"""How many kernels a recorded step launches beside the model's: each of them costs more than its work.

Counted on the CPU, where each fused kernel is a dozen of torch's and stands for the launches it has on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid import LLM
from pellucid.graphs.shapes import StepShape
from pellucid.graphs.static_rows import StaticRows
from pellucid.spec import ngram, passes, verify
from pellucid.spec.draft_model import DraftModelProposer
from pellucid.spec.synthetic import SyntheticVerifier
from pellucid.worker.device_step import DeviceStep
from tests.graphs.test_graphs import OPTIONS, graphed, worker_of


class Launches(TorchDispatchMode):
    """Collects what would be launched on a GPU: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._is_counting = True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        returns, made = func._schema.returns, func(*args, **(kwargs or {}))
        may_be_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        is_view = may_be_view and not is_copy(made, args[0])
        if self._is_counting and not is_view and "empty" not in func.name():
            self.names.append(func.name())
        return made

    @contextmanager
    def as_if(self, names: list[str]) -> Iterator[None]:
        """What is launched in here counts as this."""
        was, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = was
            if was:
                self.names += names

    def wrap(self, run: Callable[..., Any], *names: str) -> Callable[..., Any]:
        """The same function, which counts as this."""

        def counted(*args: object, **kwargs: object) -> object:
            with self.as_if(list(names)):
                return run(*args, **kwargs)

        return counted


def is_copy(made: object, of: object) -> bool:
    """Whether what may be a view of a tensor, as `to` and `flatten` may, is none."""
    both = isinstance(made, torch.Tensor) and isinstance(of, torch.Tensor)
    return both and made.untyped_storage().data_ptr() != of.untyped_storage().data_ptr()


FUSED = ["gather_rows", "draw_block", "draw_token", "verify_chain", "advance_slots"]


Part = tuple[object, str, list[str]]  # an object, the name of what it calls, and what that counts as


def parts_of(step: DeviceStep) -> list[Part]:
    """What is one kernel on a GPU, or the model's own."""
    model, forward = step.model, step.forward
    return [
        (verify, "verify_chain_ref", ["verify_chain"]),
        (forward.inputs, "_gather", ["gather_rows"]),
        (forward.slots, "_advance", ["advance_slots"]),
        (forward.slots, "_write_drafts", ["write_drafts"]),
        (step.sampler, "draw", ["draw_block", "draw_token"]),
        (forward.backend, "metadata", []),
        (model, "logits", []),
        (forward, "model", []),
    ]


def launched(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, more: Callable[[DeviceStep], list[Part]]
) -> list[str]:
    """What a recorded step of four rows launches, but for `more` parts."""
    launcher = graphed(worker_of(llm))
    step, launches = launcher.eager.step, Launches()
    assert isinstance(step, DeviceStep)
    for owner, name, names in parts_of(step) + more(step):
        monkeypatch.setattr(owner, name, launches.wrap(getattr(owner, name), *names))
    num_spec = worker_of(llm).resolved.num_spec
    shape = StepShape(4 * (1 + num_spec), 4, 0, 1 + num_spec, 4 * (1 + num_spec))
    rows = StaticRows(shape, launcher.eager.inputs.slots.spare, torch.device("cpu")).view()
    with torch.inference_mode(), launches:
        step.finish(rows, step.begin(rows))
    return launches.names


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_recorded_step_is_a_handful_of_launches_beside_the_model(
    tiny: Path, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = {
        "speculative_config": {"model": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    }
    with LLM(str(tiny), **OPTIONS, **(drafts if num_drafts else {})) as llm:
        names = launched(llm, monkeypatch, lambda _: [(ngram, "prompt_lookup_ref", ["prompt_lookup"])])
    assert names == FUSED + ["prompt_lookup", "write_drafts"] * (num_drafts > 0)


def test_a_draft_is_a_draw_beside_its_model_and_chance_one_launch_more(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_chance = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}
    spec = {"model": str(tiny_draft), "num_speculative_tokens": 3, "adaptive": False} | by_chance

    def more(step: DeviceStep) -> list[Part]:
        assert isinstance(step.proposer, DraftModelProposer) and isinstance(step.verifier, SyntheticVerifier)
        draft = step.proposer.draft
        return [
            (draft.built.backend, "metadata", []),
            (draft.built.model, "forward", []),
            (draft.built.model, "logits", []),
            (passes, "draft_places_ref", ["draft_places"]),
            (step.verifier, "_take", ["take_by_chance"]),
        ]

    with LLM(str(tiny), **OPTIONS, speculative_config=spec) as llm:
        assert len(worker_of(llm).layout.tables) == 1
        names = launched(llm, monkeypatch, more)
    draw = ["draw_block", "draw_token"]
    chain = ["draft_places"] + 3 * draw + ["aten::stack", "write_drafts"]
    assert names == ["gather_rows", *draw, "take_by_chance", "verify_chain", "advance_slots", *chain]
