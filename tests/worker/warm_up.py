"""Warm steps up as on a GPU, on a machine without one: each kernel is launched, noted, and does not run.

`python -m tests.worker.warm_up FOLDER`, in a process of its own because of the interpreter.  What kernels
should have written is zero, and torch's own kernels look where that says: the CPU raises where it is out of
range, where a GPU would take the whole process down.  Prints a line for each case, with the number of
variants that were noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime import driver

from pellucid import LLM
from pellucid.kernels.compile.compilations import Collected, noted_by
from pellucid.kernels.sampling.verify_chain import take_by_chance, verify_chain
from pellucid.kernels.slots.advance_slots import advance_slots, write_drafts
from pellucid.kernels.slots.draft_places import draft_places
from pellucid.kernels.slots.gather_rows import gather_rows
from pellucid.kernels.slots.prompt_lookup import prompt_lookup
from pellucid.layers.leaf import FUSED
from pellucid.sample.draw import FusedDraw
from pellucid.worker.warm_up import largest_step, warm_up_steps
from pellucid.worker.worker import Worker
from tests.kernels.compile_together import Pretended
from tests.spec.toy import tree_config
from tests.tiny import write_checkpoint
from tests.worker.pipeline import LazyPipeline

OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 5, "max_num_batched_tokens": 20}
# What takes the place of what on a GPU.
KERNELS: dict[str, Any] = {
    "pellucid.worker.inputs.gather_rows_ref": gather_rows,
    "pellucid.worker.slots.advance_slots_ref": advance_slots,
    "pellucid.worker.slots.write_drafts_ref": write_drafts,
    "pellucid.spec.verify.verify_chain_ref": verify_chain,
    "pellucid.spec.synthetic.take_by_chance_ref": take_by_chance,
    "pellucid.spec.ngram.prompt_lookup_ref": prompt_lookup,
    "pellucid.spec.passes.draft_places_ref": draft_places,
    "pellucid.sample.sampler.choose_draw": FusedDraw,
    "pellucid.sample.noise._on_gpu": lambda numbers: True,
    "pellucid.models.build.choose_leaf": lambda device: FUSED,
    "pellucid.attention.triton.TritonAttention.supports": lambda spec, platform: None,
    "pellucid.worker.worker.time_steps": lambda *args, **more: (),  # there is nothing to time
}
Drafts = Callable[[Path], dict[str, object]]
STAGES = {"executor": "lazy", "pipeline_parallel_size": 2, "num_gpu_blocks_override": 400}
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}


def ngram(**more: object) -> Drafts:
    return lambda folder: {"method": "ngram", "num_speculative_tokens": 3, **more}


def model(**more: object) -> Drafts:
    """The model drafts for itself."""
    return lambda folder: {"model": str(folder), "num_speculative_tokens": 3, **more}


def parallel(folder: Path) -> dict[str, object]:
    return {"model": str(write_checkpoint(folder / "pard", pard_token=1)), "num_speculative_tokens": 3}


def tree(folder: Path) -> dict[str, object]:
    return tree_config((0, 0, 1, 1, 2), [list(range(40))])


# What drafts, and other options.
CASES: dict[str, tuple[Drafts | None, dict[str, object]]] = {
    "no drafts": (None, {}),
    "shortest texts": (None, {"max_model_len": 2}),
    "ngram": (ngram(), {}),
    "ngram standard": (ngram(rejection_sample_method="standard"), {}),
    "ngram synthetic": (ngram(**SYNTHETIC), {}),
    "model": (model(), {}),
    "model standard": (model(rejection_sample_method="standard"), {}),
    "model synthetic": (model(**SYNTHETIC), {}),
    "parallel model": (parallel, {}),
    "model of shortest texts": (model(), {"max_model_len": 2}),
    "tree": (tree, {}),
    "stages": (None, STAGES),
    "stages ngram": (ngram(), STAGES),
    "stages model": (model(), STAGES),
    "stages tree": (tree, STAGES),
}


def main() -> None:
    folder = write_checkpoint(Path(sys.argv[1]))
    driver.set_active(Pretended())  # type: ignore[arg-type]
    for name, (drafts, more) in CASES.items():
        options: dict[str, Any] = {"attention_backend": "triton", **OPTIONS, **more}
        if drafts is not None:
            options["speculative_config"] = drafts(folder)
        collected = Collected((), None)
        with kernels(), LLM(str(folder), **options) as llm, noted_by(collected):
            warm_up(workers_of(llm))
        sys.stdout.write(f"{name}: {len(collected.noted)}\n")


@contextmanager
def kernels() -> Iterator[None]:
    """As on a GPU."""
    with ExitStack() as stack:
        for place, kernel in KERNELS.items():
            stack.enter_context(patch(place, kernel))
        yield


def workers_of(llm: LLM) -> list[Worker]:
    executor: Any = llm.llm_engine.engine.executor
    return executor.workers if isinstance(executor, LazyPipeline) else [executor.worker]


@torch.inference_mode()
def warm_up(workers: list[Worker]) -> None:
    """All steps, one stage after another."""
    given = workers[0].resolved, workers[0].layout.pages_a_block, workers[0].runner.features.eager_bits
    for plan in [*warm_up_steps(*given), largest_step(*given)]:
        for result in [worker.runner.execute(plan) for worker in workers]:
            result.result()
        for worker in workers:
            worker.runner.handover.apply_feedback(plan.id)
            worker.runner.slots.retire(plan.rows.slots.tolist())


if __name__ == "__main__":
    main()
