"""One worker: a device, a model on it, its KV cache.  Built in `start`, then it executes plans."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pellucid.dist.collectives import LOOPBACK, Site, connect, disconnect
from pellucid.dist.mesh import Mesh, Stage
from pellucid.executor.base import Capacity, Pending, Seat
from pellucid.features.base import WorkerFacts
from pellucid.features.worker import WorkerFeatures
from pellucid.graphs.launch import CudaRecorder, EagerLauncher, GraphLauncher, Launcher, Step
from pellucid.graphs.shapes import StepShape, bounded, chunk_shapes, decode_shapes
from pellucid.kernels.compile.compilations import LateCompilations, any_compiled, compiled_together
from pellucid.kernels.compile.compilers import Compilers, Share, compilers_for
from pellucid.kernels.sampling.trees import tree_places_kernel, verify_tree_kernel
from pellucid.kernels.sampling.verify_chain import verify_chain_kernel
from pellucid.kernels.slots.advance_slots import advance_kernel, drafts_kernel
from pellucid.kernels.slots.draft_places import draft_places_kernel
from pellucid.kernels.slots.gather_rows import rows_kernel
from pellucid.kv.layout import Layout, choose_kinds, lay_out
from pellucid.lockstep.launcher import LockstepLauncher, spread_layers
from pellucid.lockstep.pace import Pace
from pellucid.models.build import BuiltModel, ModelFactory
from pellucid.observe.profiler import DeviceProfiler, Span
from pellucid.progress import Phases, tell
from pellucid.resolve import Resolved
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import SamplingState
from pellucid.sample.vocabulary import vocabulary
from pellucid.schedule.plan import StepPlan
from pellucid.sleep.state import KV_CACHE, WEIGHTS
from pellucid.sleep.weights import HostWeights
from pellucid.spec.base import DraftShape, Proposer, check_needs
from pellucid.spec.drafter import Drafter, Timings
from pellucid.spec.registry import PROPOSERS, VERIFIERS
from pellucid.spec.timing import time_steps
from pellucid.worker import memory
from pellucid.worker.abridged import Abridged
from pellucid.worker.device_step import DeviceStep, Forward, StageStep, tell_nobody
from pellucid.worker.handover import make_handover
from pellucid.worker.inputs import InputBuilder
from pellucid.worker.layout import ChainLayout, DraftLayout, TreeLayout
from pellucid.worker.results import NoReader, ResultReader
from pellucid.worker.runner import ModelRunner
from pellucid.worker.slots import Slots
from pellucid.worker.warm_up import largest_step, warm_up_steps

if TYPE_CHECKING:
    from pellucid.spec.base import Built

logger = logging.getLogger(__name__)
IMPORTED = time.time()
EVERY_PLAN = 2**62  # no plan has as large an id
# Tokens of a step with chunks, times bytes of weights that a token is multiplied with.
WORTH_RECORDING = 35e12
# Kernels that say where a row stands.
INDEXING = (
    *(rows_kernel, verify_chain_kernel, advance_kernel, drafts_kernel, draft_places_kernel),
    *(tree_places_kernel, verify_tree_kernel),
)


class Worker:
    """The executor's end of a device."""

    def __init__(self, resolved: Resolved, seat: Seat | None = None) -> None:
        self.resolved, self.seat = resolved, seat or Seat()
        self.late, self.pace = LateCompilations(), Pace()
        self._host_weights: HostWeights | None = None  # while they are there alone
        parallel = resolved.user.parallel
        dp, before = 1, 0  # ranks of other engines, if these work in step
        if parallel.shares_experts:
            dp, before = parallel.num_engines, resolved.replica * resolved.num_workers
        self.mesh = Mesh(
            dp=dp,
            pp=resolved.num_pipeline_stages,
            tp=parallel.tensor_parallel_size,
            rank=before + self.seat.rank,
        )
        self.stage = Stage(self.mesh.rank_of("pp"), resolved.pipeline_cuts)
        self.device = choose_device(resolved.platform.device, self.seat.device)

    @property
    def reports(self) -> bool:
        """All ranks of the last stage sample the same tokens; one tells."""
        return self.stage.is_last and self.mesh.rank_of("tp") == 0

    def start(self) -> Capacity:
        """Load this rank's part, agree on what is left for KV cache, and make it."""
        if self.device.type == "cpu":
            torch.set_num_threads(self.resolved.num_threads)
        else:
            torch.cuda.set_device(self.device)
        seat = self.seat
        site = Site(node=seat.node, address=seat.address, first=seat.first or LOOPBACK)
        self.links = connect(
            self.mesh, seat.meet, self.device, entered=seat.entered, waiting=seat.waiting, site=site
        )
        phases = Phases(IMPORTED)
        with self._compilers() as compilers:
            self._tell("loading weights")
            self._build()
            phases.end("weights")
            most_bytes = self._warm_up(compilers, phases)
            phases.end("kernels")
        num_pages = memory.count_pages(self.resolved, self.layout, self._kv_budget(most_bytes))
        num_pages = self.links.world.minimum(num_pages)  # a step needs a page on every rank
        most = -self.links.world.minimum(-self.layout.page_bytes)
        capacity = memory.fit_capacity(self.resolved, self.layout, num_pages)
        self.capacity = replace(capacity, page_bytes=most, drafter=self._drafter)
        self._open_kv()
        phases.end("KV cache")
        if self.device.type != "cpu":
            self._tell("recording CUDA graphs")
        self.runner.launcher.capture()
        phases.end("graphs")
        pages, keeps_kv = self.layout.pages_a_block, self._drafter is Drafter.KEEPS_KV
        timed = time_steps(self.runner, self.resolved, pages, keeps_kv=keeps_kv, is_padded=self._is_recorded)
        self.capacity = replace(self.capacity, timings=Timings(self._is_recorded, tuple(timed)))
        self.pace.begin(self.links, site.address, self.resolved.user.parallel.worker_timeout)
        logger.info("%s; KV cache: %s", phases, self.layout.describe(num_pages))
        self.late.begin()
        return self.capacity

    def _tell(self, doing: str) -> None:
        """What begins now, said by one worker for all."""
        if self.mesh.rank == 0 and self.resolved.replica == 0:
            tell(doing)

    def execute(self, plan: StepPlan) -> Pending:
        return self.runner.execute(plan)

    def start_profile(self) -> None:
        """Note from now on what runs on the device."""
        self._profiler = DeviceProfiler(self.device)
        self._profiler.start()

    def stop_profile(self) -> list[Span]:
        """What has run since."""
        return self._profiler.stop()

    def sleep(self, level: int) -> None:
        """Give memory away: KV, recorded steps, and weights, to the host (1) or for good (2).

        Nothing may be under way.  Weights on a CPU are in host memory already.
        """
        with torch.inference_mode():
            self.runner.handover.apply_feedback(EVERY_PLAN)
        self.runner.launcher.forget()
        self.runner.features.bind(None, self.capacity)
        self._bind_kv(None)
        self._host_weights = None
        if level > 1:
            self._let_go()
        elif self.device.type != "cpu":
            modules = [model.model for model in self.models if isinstance(model.model, nn.Module)]
            self._host_weights = HostWeights(modules, self.device)
        self._free_cached()

    def wake_up(self, tags: Sequence[str]) -> str | None:
        """Take back what `sleep` gave away: "weights" and then "kv_cache".

        Returns why nothing was, on any rank, if there is no room for it any more.
        """
        lacking = -self.links.world.minimum(-self._lacking(tags))  # of the rank that lacks most
        if lacking > 0:
            return (
                f"{lacking / memory.GIB:.2f} GiB of device memory are lacking; end what has taken "
                "them, and wake up again"
            )
        if WEIGHTS in tags:
            self._tell("loading weights")
            if self._host_weights is not None:
                self._host_weights.restore()
                self._host_weights = None
            elif "runner" not in self.__dict__:
                self._build()
        if KV_CACHE in tags:
            self._open_kv()
            if self.device.type != "cpu":
                self._tell("recording CUDA graphs")
            self.runner.launcher.capture()
        return None

    def _lacking(self, tags: Sequence[str]) -> int:
        """Bytes of a GPU that are wanted and not free; below 0 if all are."""
        if self.device.type == "cpu":
            return 0
        wanted = (1 + self.capacity.num_pages) * self.layout.page_bytes if KV_CACHE in tags else 0
        if WEIGHTS in tags:
            wanted += self.weight_bytes if self._host_weights is None else self._host_weights.nbytes
        return wanted - torch.cuda.mem_get_info()[0]

    def shutdown(self) -> None:
        """Give the memory back; a second time there is nothing to give."""
        self._let_go()
        self.pace.close()
        self.late.end()
        self._free_cached()
        disconnect()

    def _let_go(self) -> None:
        """Forget all that `_build` has made."""
        if "runner" in self.__dict__:
            self.runner.handover.close()
            self.runner.features.shutdown()
        for name in ("runner", "models", "abridged"):
            self.__dict__.pop(name, None)

    def _free_cached(self) -> None:
        """Give the device what nobody holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _build(self) -> None:
        """Make the model, the proposer with what it has of models, and the runner for both."""
        resolved, factory = self.resolved, ModelFactory(self.resolved, self.device, self.links)
        method = resolved.speculative.method
        proposer = PROPOSERS.load(method).of(resolved.speculative)
        target = factory.build_target(tree_depth=proposer.shape.tree_depth)
        state = SamplingState(
            resolved.max_num_seqs + 1,
            target.vocab_size,
            self.device,
            max_listed=resolved.user.scheduler.max_listed_tokens,
        )
        sampler = Sampler(state, vocabulary(self.links.tp, target.vocab_size))
        own = proposer.load(target, factory, sampler)
        self.models: tuple[Built, ...] = (target, *own)
        keeps_kv = any(model.caches for model in own)
        self._drafter = Drafter.KEEPS_KV if keeps_kv else proposer.needs.drafter
        self.weight_bytes = target.weight_bytes
        check_needs(proposer.needs, method, target.model, num_stages=self.mesh.pp)
        # Ranks that share layers must run the same ones, so there all are run.
        shares_layers = self.links.tp.size * self.links.dp.size > 1
        models = (model.model for model in self.models if not shares_layers)
        self.abridged = Abridged(model for model in models if isinstance(model, nn.Module))
        self.layout = self._lay_out()
        max_len = resolved.max_model_len + resolved.num_spec
        sizes = resolved.max_num_seqs, max_len, self.layout, resolved.block_size
        slots = Slots(*sizes, self.device, proposer.shape)
        inputs = InputBuilder(slots, self._draft_layout(target, slots))
        forward = Forward(target.model, target.backend, inputs, needs=proposer.needs)
        channels, inlet = self.links.channels, target.inlet
        if inlet is not None:
            inlet.make_room(resolved.max_tokens_of_step, self.device)
        reader = ResultReader(self.late) if self.reports else NoReader()
        handover = make_handover(channels, self.stage, inlet, inputs, reader, depth=resolved.depth)
        step = self._make_step(forward, sampler, proposer)
        features = self._make_features(target, sampler, slots)
        shapes = self._recorded_shapes(target, proposer.shape)
        self._is_recorded = len(shapes) > 0
        launcher = self._make_launcher(EagerLauncher(step, inputs), shapes, state, features)
        self.runner = ModelRunner(
            slots, state, inputs, launcher, handover, features, num_stages=self.mesh.pp, proposer=proposer
        )

    def _lay_out(self) -> Layout:
        """The KV pages of this worker, of which all models have their parts."""
        everywhere = [cache for model in self.models for cache in model.caches]
        layers = [layer for model in self.models for layer in model.attention_layers]
        kinds = choose_kinds(everywhere, self.resolved.block_size)
        layout = lay_out(kinds, [layer.spec.cache for layer in layers])
        for layer, place in zip(layers, layout.places, strict=True):
            layer.table = place.table
        return layout

    def _draft_layout(self, target: BuiltModel, slots: Slots) -> DraftLayout:
        if not slots.shape.tree_depth:
            return ChainLayout()
        layers, backend, size = target.attention_layers, target.backend, self.resolved.block_size
        return TreeLayout(slots, layers=layers, backend=backend, block_size=size)

    def _make_step(self, forward: Forward, sampler: Sampler, proposer: Proposer) -> Step[Any, Any]:
        """What this pipeline stage does of a step."""
        if not self.stage.is_last:
            return StageStep(forward)
        speculative, shape = self.resolved.speculative, proposer.shape
        verifier = VERIFIERS.load(speculative.rejection_sample_method).of(speculative, sampler, shape)
        tell = tell_nobody if self.stage.is_first else forward.slots.tell
        return DeviceStep(forward, sampler, proposer, verifier, tell)

    def _make_features(self, target: BuiltModel, sampler: Sampler, slots: Slots) -> WorkerFeatures:
        facts = WorkerFacts(
            vocab_size=target.vocab_size,
            device=self.device,
            slots=slots,
            sampler=sampler,
            head=lambda hidden, *more: sampler.vocabulary.whole(target.model.logits(hidden, *more)),
            shape=slots.shape,
            lora_banks=target.lora_banks,
            modules=target.modules,
            adaptable=target.adaptable,
            read_own=target.read_own,
            rename=target.model.rename,
            ignored=target.model.ignored,
            resolved=self.resolved,
            rank=self.seat.rank,
            say=self.seat.say,
        )
        return WorkerFeatures.of(self.resolved.features, facts)

    def _make_launcher(
        self, eager: EagerLauncher[Any, Any], shapes: dict[StepShape, bool], state: SamplingState,
        features: WorkerFeatures,
    ) -> Launcher[Any]:  # fmt: skip
        """Graphs, if there are shapes to record."""
        recorder = partial(CudaRecorder, self.abridged)
        launcher = GraphLauncher(eager, shapes, state, features, recorder) if shapes else eager
        layers = spread_layers(self.models[0].model, self.links.dp.size)
        return LockstepLauncher(launcher, shapes, layers, self.pace, recorder) if layers else launcher

    def _recorded_shapes(self, target: BuiltModel, shape: DraftShape) -> dict[StepShape, bool]:
        """On a GPU, unless the user or an attention backend will have none; and whether by halves, too."""
        resolved, device = self.resolved, self.resolved.user.device
        backends = [model.backend for model in self.models]
        max_short = min(backend.max_graph_query for backend in backends)
        max_query, has_maps = 1 + shape.num_drafts, all(backend.supports_tile_maps for backend in backends)
        if self.device.type == "cpu" or device.enforce_eager or max_query > max_short and not has_maps:
            return {}
        max_rows, max_tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
        # Stages of a pipeline pad alike, and the drafter is on the last one.
        takes_passes = self._drafter is Drafter.KEEPS_KV and self.mesh.pp == 1 and not shape.tree_depth
        shapes = decode_shapes(max_rows, max_query, max_tokens, max_short, takes_passes=takes_passes)
        if self.mesh.dp > 1:
            return {shape: True for shape, has_halves in shapes.items() if has_halves}
        if device.record_chunks and has_maps and self.mesh.pp == 1 and not shape.tree_depth:
            # Beyond, the device takes longer than launching does.
            longest = int(WORTH_RECORDING / target.token_bytes)
            longest = min(resolved.max_model_len + resolved.num_spec, max_tokens, longest)
            shapes |= dict.fromkeys(chunk_shapes(longest, max_rows, max_query, max_short), True)
        most = (backend.max_graph_keys for backend in backends if backend.max_graph_keys is not None)
        return bounded(shapes, min(most, default=None))

    def _kv_budget(self, most_bytes: int) -> int:
        """Bytes for KV cache: on a GPU what the largest step leaves, which takes `most_bytes`."""
        if self.device.type == "cpu":
            return memory.cpu_budget(self.resolved, self.layout)
        torch.cuda.empty_cache()
        budget = memory.gpu_budget(self.resolved.user.cache.gpu_memory_utilization, most_bytes)
        return budget - self.runner.launcher.measure() - self.runner.handover.reserve

    def _compilers(self) -> AbstractContextManager[Compilers | None]:
        """On a GPU, processes that help to compile: they get ready while weights are loaded."""
        if self.device.type == "cpu":
            return nullcontext()
        parallel, num_ranks = self.resolved.user.parallel, self.resolved.num_workers
        rank = self.resolved.replica * num_ranks + self.seat.rank
        share = Share(rank, num_ranks * parallel.num_engines)
        return compilers_for(str(self.resolved.user), len(os.sched_getaffinity(0)) // share.size, share)

    def _warm_up(self, compilers: Compilers | None, phases: Phases) -> int:
        """On a GPU, compile what steps of all kinds need, so that no kernel is once requests have come.

        Returns the most bytes that torch has reserved for a step.
        """
        if self.device.type == "cpu":
            return 0
        self._tell("compiling and warming up kernels")
        self._bind_kv(0)
        features = self.runner.features
        given = self.resolved, self.layout.pages_a_block, features.eager_bits | features.forward_bits
        with compiled_together(self.device, running=self._running(), compilers=compilers):
            with self.abridged():
                for plan in warm_up_steps(*given):
                    self._try(plan)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._try(largest_step(*given))
            most_bytes = torch.cuda.max_memory_reserved()
            phases.end("warm-up")
        return most_bytes

    def _running(self) -> tuple[object, ...]:
        """Kernels that run in the warm-up: none, unless something else may run that goes by where rows stand.

        That is what an earlier engine of this process has compiled; and a backend that cannot be recorded may
        ask for rows' lengths, and take memory by them.
        """
        asks = any(model.backend.max_graph_query == 0 for model in self.models)
        return INDEXING if asks or any_compiled() else ()

    def _try(self, plan: StepPlan) -> None:
        """Run a step that is no sequence's, and forget it."""
        self.runner.execute(plan).wait()  # and make nothing of what it yields, which may be a great deal
        self.runner.handover.apply_feedback(plan.id)  # nothing is under way any more
        self.runner.slots.retire(plan.rows.slots.tolist())
        self.runner.features.retire(plan.rows.slots.tolist())

    def _open_kv(self) -> None:
        """Make the KV cache that requests will use."""
        pool = self._bind_kv(self.capacity.num_pages)
        self.runner.features.bind(pool.view(-1, self.layout.page_bytes), self.capacity)

    def _bind_kv(self, num_pages: int | None) -> torch.Tensor:
        """Make so many pages and the padding page 0, zeros, and give every layer its view of them.

        None: not even that page.  Returns their bytes, flat.
        """
        layout = self.layout
        owners = [(model.backend, layer) for model in self.models for layer in model.attention_layers]
        for _, layer in owners:
            layer.kv_cache = torch.empty(0)  # the old pages go before the new ones come
        if num_pages is None:
            return torch.empty(0)
        pool = zeros((1 + num_pages) * layout.page_bytes, self.device)
        for (backend, layer), (table, unit) in zip(owners, layout.places, strict=True):
            _, factor, num_bytes = layout.tables[table]
            num_blocks = 1 + num_pages * factor  # up to its part of the last page: for all layers alike
            shape = backend.kv_layout(layer.spec, num_blocks)
            part = pool[unit * layout.unit_bytes :][: num_blocks * num_bytes]
            layer.kv_cache = part.view(layer.spec.kv_dtype or layer.spec.dtype).view(shape)
        return pool


def choose_device(kind: str, index: int | None) -> torch.device:
    """This rank's own.  index: of its GPU; None is where torch is.

    Raises ValueError if the machine has too few.
    """
    if kind == "cpu":
        return torch.device(kind)
    if index is None:
        return torch.device(kind, torch.cuda.current_device())  # set_device wants an index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"{index + 1} GPUs are asked for, but torch sees {torch.cuda.device_count()}; lower "
            "tensor_parallel_size, pipeline_parallel_size or data_parallel_size, or see CUDA_VISIBLE_DEVICES"
        )
    return torch.device(kind, index)


def zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from pages that the system hands out when first written, so it takes no time."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
