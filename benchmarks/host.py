"""What the host does around a device: whole runs of `LLM.generate` on a device that answers at once.

    python benchmarks/host.py --loads
    python benchmarks/host.py [--requests N] [--input-len N] [--ragged N] [--output-len N] [--queue N]
        [--cold MIB] [--profile]

All of the engine is real, the worker's host part included, but for the step on the device, which gives a
random token to every row that samples.  Where the host would wait for the device it goes through some memory,
so that its caches are as cold as behind a wait; no figure counts that time.  Times of the parts are of the
steps in which every request decodes and none ends; *before* is from the call of `generate` to the first
plan's launch, *prompts* from there to the last chunk's, *decodes* to the last launch, and *after* from there
to the return.  With --queue so many more requests wait all the while, for blocks.  --loads shows what the
scheduler alone takes in other loads (loads.py).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TypeVar

import numpy as np
import torch
from loads import show as show_loads

from pellucid.engine.core import Engine
from pellucid.executor.base import EXECUTORS, Capacity, Hear
from pellucid.executor.local import LocalTicket
from pellucid.features.worker import WorkerFeatures
from pellucid.forward import TileMaps
from pellucid.graphs.launch import EagerLauncher, GraphLauncher
from pellucid.graphs.shapes import decode_shapes
from pellucid.kernels.compile.compilations import LateCompilations
from pellucid.kv.kinds import Full
from pellucid.kv.layout import LayerCache, lay_out
from pellucid.llm import LLM
from pellucid.resolve import Resolved
from pellucid.rows import StepRows
from pellucid.sample.state import SamplingState
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan
from pellucid.worker.handover import NoHandover
from pellucid.worker.inputs import InputBuilder
from pellucid.worker.layout import ChainLayout
from pellucid.worker.results import Packed, ResultReader
from pellucid.worker.runner import ModelRunner
from pellucid.worker.slots import Slots

NUM_BLOCKS, BLOCK = 16_384, 64  # as large as on a GPU
NUM_YIELDS = 1021  # other tokens in each of so many steps
T = TypeVar("T")
PARTS = ("plan", "submit", "unpack", "commit", "outputs", "step")


class Clock:
    """Of all figures; it stands still while the device would be at work."""

    def __init__(self) -> None:
        self.now = time.perf_counter
        self._stood = 0.0

    def __call__(self) -> float:
        return self.now() - self._stood

    @contextmanager
    def stopped(self) -> Iterator[None]:
        since = self.now()
        yield
        self._stood += self.now() - since


CLOCK = Clock()


class NoDeviceExecutor:
    """A worker's host part, before a device that needs no time."""

    num_blocks = NUM_BLOCKS

    def start(self, resolved: Resolved) -> Capacity:
        cpu, max_rows = torch.device("cpu"), resolved.max_num_seqs
        layout = lay_out((Full(resolved.block_size),), [LayerCache(1, None)])
        slots = Slots(max_rows, resolved.max_model_len, layout, resolved.block_size, cpu)
        state = SamplingState(max_rows + 1, resolved.checkpoint.vocab_size, cpu)
        inputs = InputBuilder(slots, ChainLayout())
        shapes = decode_shapes(max_rows, 1, resolved.max_num_batched_tokens, max_short=1)
        features = WorkerFeatures({}, max_rows + 1)
        step = NoStep(max_rows, resolved.checkpoint.vocab_size)
        eager = EagerLauncher(step, inputs)
        launcher = GraphLauncher(eager, shapes, state, features, lambda: Recorder(step))
        launcher.capture()
        handover = NoHandover(ResultReader(LateCompilations()))
        self._runner = ModelRunner(slots, state, inputs, launcher, handover, features)
        return Capacity(kinds=layout.kinds, num_pages=self.num_blocks, max_model_len=resolved.max_model_len)

    def submit(self, plan: StepPlan) -> LocalTicket:
        return NoDeviceTicket(self._runner.execute(plan))

    def call(self, name: str, *args: object) -> object:
        raise NotImplementedError(name)

    def check(self) -> None:
        """Nothing can fail."""

    def listen(self, hear: Hear) -> None:
        """Nobody speaks."""

    @property
    def lines(self) -> tuple[()]:
        return ()

    def shutdown(self) -> None:
        """Nothing to give back."""


class NoDeviceTicket(LocalTicket):
    """A plan whose step has long ended; what is waited for is what else passes through the caches."""

    others = np.zeros(0, dtype=np.uint8)

    def wait(self) -> None:
        with CLOCK.stopped():
            np.add(self.others, 1, out=self.others)
        super().wait()


class NoStep:
    """What a device would do, but for a token to every row that samples."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        tokens = np.random.default_rng(0).integers(0, vocab_size, (NUM_YIELDS, max_rows), dtype=np.int32)
        self._tokens = cycle(list(torch.from_numpy(tokens)))

    def begin(self, rows: StepRows, tiles: TileMaps | None = None) -> None:
        """There is no forward."""

    def finish(self, rows: StepRows, begun: None) -> Packed:
        num_new = (rows.num_sampled > 0).to(torch.int32)
        shapes = ((len(num_new), 1), (len(num_new),))
        flat = torch.cat([num_new, num_new])
        return self.repeat(Packed(flat=flat, shapes=shapes))

    def among(self, yielded: Packed, places: np.ndarray) -> Packed:
        return replace(yielded, places=places)

    def alone(self, rows: StepRows, begun: None) -> None:
        """There is no forward."""

    def num_bytes(self, begun: None) -> int:
        return 0

    def repeat(self, packed: Packed) -> Packed:
        """The same with other tokens; in memory of its own, for a device's yield is copied where it lies."""
        with CLOCK.stopped():
            flat, num_rows = packed.flat.clone(), len(packed.flat) // 2
            flat[:num_rows] = next(self._tokens)[:num_rows]
            return replace(packed, flat=flat)


class Recorder:
    """A recording costs no more than its yield."""

    def __init__(self, step: NoStep) -> None:
        self._step = step

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        yielded = run()
        return partial(self._step.repeat, yielded) if isinstance(yielded, Packed) else lambda: yielded


class Watch:
    """Notes when the engine's parts are at work."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.llm_engine.engine
        assert isinstance(engine, Engine), "one engine, in this process"
        self.spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.num_rows: list[tuple[int, int]] = []  # of each plan: rows, tokens
        self.pauses: list[float] = []  # of the garbage collector
        self._wrap(engine, "step", "engine")
        self._wrap(engine.scheduler, "next_plan", "plan")
        self._wrap(engine.scheduler, "commit", "commit")
        self._wrap(engine.executor, "submit", "submit")
        self._wrap(llm.llm_engine, "step", "step")
        self._wrap(LocalTicket, "result", "unpack")
        gc.callbacks.append(self._collected)

    def _wrap(self, owner: object, name: str, part: str) -> None:
        call, spans = getattr(owner, name), self.spans[part]

        def timed(*args: object) -> object:
            began = CLOCK()
            result = call(*args)
            spans.append((began, CLOCK()))
            if isinstance(result, StepPlan):
                self.num_rows.append((len(result.rows), result.num_tokens))
            return result

        setattr(owner, name, timed)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        now = CLOCK()
        self.pauses.append(now if phase == "start" else now - self.pauses.pop())

    def clear(self) -> None:
        for spans in self.spans.values():
            spans.clear()
        self.num_rows.clear()
        self.pauses.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-0.6b", help="one with a tokenizer makes text, too")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--ragged", type=int, default=0, help="most tokens by which prompts are shorter")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--queue", type=int, default=0, help="requests that find no blocks while others run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", type=int, default=32, help="MiB that pass through the caches each step")
    parser.add_argument("--profile", action="store_true", help="show where a run's time goes, too")
    parser.add_argument("--cpu-time", action="store_true", help="of the thread alone: on a busy machine")
    parser.add_argument("--loads", action="store_true", help="the scheduler alone, in other loads, instead")
    args = parser.parse_args()
    if args.loads:
        show_loads([256, 1024])
        return
    CLOCK.now = time.thread_time if args.cpu_time else time.perf_counter
    NoDeviceTicket.others = np.zeros(args.cold << 20, dtype=np.uint8)
    if args.queue:  # no more blocks than those that run will need
        NoDeviceExecutor.num_blocks = args.requests * num_blocks(args.input_len + args.output_len)
    EXECUTORS.register("no device", f"{__name__}:NoDeviceExecutor")
    llm = LLM(
        args.model, executor="no device", device="cpu", dtype="float32", depth=2, block_size=BLOCK,
        max_num_seqs=max(256, args.requests + args.queue), max_num_batched_tokens=16_640,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = rng.integers(args.input_len - args.ragged, args.input_len, args.requests, endpoint=True)
    vocab_size = min(10_000, llm.llm_engine.vocab_size)
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in lengths]
    sampling = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=args.output_len) for _ in prompts]
    if args.queue:  # each wants one block more than is free when all others have begun
        free = NoDeviceExecutor.num_blocks - args.requests * num_blocks(args.input_len - args.ragged)
        prompts += [[1] * (BLOCK * free + 1)] * args.queue
        sampling += [SamplingParams(temperature=0.6, max_tokens=1)] * args.queue
    if args.profile:
        profile(llm, prompts, sampling)
        return
    watch = Watch(llm)
    for _ in range(args.repeat):
        llm.reset_prefix_cache()
        watch.clear()
        began = CLOCK()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        ended = CLOCK()
        ran = outputs[: args.requests]
        assert all(len(output.outputs[0].token_ids) == args.output_len for output in ran)
        show(watch, began, ended, args.requests)
        del outputs, ran


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def profile(llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
    llm.generate(prompts[:1], sampling[0], use_tqdm=False)
    with cProfile.Profile() as profiler:
        llm.generate(prompts, sampling, use_tqdm=False)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def show(watch: Watch, began: float, ended: float, num_requests: int) -> None:
    """One run: where its time goes, and the steps."""
    steady = [i for i, rows in enumerate(watch.num_rows) if rows == (num_requests, num_requests)]
    submits = watch.spans["submit"]
    chunks = [i for i, (rows, tokens) in enumerate(watch.num_rows) if tokens > rows]
    print(
        f"whole {1e3 * (ended - began):7.1f} ms: before {1e3 * (submits[0][0] - began):6.1f}, "
        f"prompts {1e3 * (submits[chunks[-1]][1] - submits[0][0]):6.1f}, "
        f"{len(submits)} steps, decodes {1e3 * (submits[-1][1] - submits[chunks[-1]][1]):7.1f}, "
        f"after {1e3 * (ended - submits[-1][1]):5.1f}; "
        f"{len(watch.pauses)} collections of {1e3 * sum(watch.pauses):5.1f} in all"
    )
    if len(steady) < 8:
        return
    seconds = {part: [end - since for since, end in spans] for part, spans in watch.spans.items()}
    inner = seconds["step"][: len(seconds["engine"])]
    seconds["outputs"] = [a - b for a, b in zip(inner, seconds["engine"], strict=True)]
    first, last = steady[2], steady[-2]
    for name, summary in (("median", statistics.median), ("mean", statistics.mean), ("most", max)):
        figures = {part: 1e6 * summary(seconds[part][first:last]) for part in PARTS}
        parts = "  ".join(f"{part} {micros:5.0f}" for part, micros in figures.items())
        print(f"{name:>6}  {parts}  us a step")


if __name__ == "__main__":
    main()
