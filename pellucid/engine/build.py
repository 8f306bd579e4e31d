"""From a configuration to a running engine: open the checkpoint, resolve, start workers, make the loop."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pellucid.config import EngineConfig
from pellucid.connectors.base import KV_CONNECTORS
from pellucid.engine.core import Engine
from pellucid.executor.base import EXECUTORS, Capacity, Executor, MeetAt, alone
from pellucid.features.host import HostFeatures
from pellucid.kernels.compile.compilers import Share, end_early, start_early
from pellucid.kv.manager import KVManager
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.draft import open_draft
from pellucid.nodes.place import Node
from pellucid.observe.trace import StepTrace
from pellucid.platform import detect, has_gpu
from pellucid.resolve import Resolved, resolve
from pellucid.schedule.prefill_budget import LearnedPrefillBudget, PrefillBudget, UnlimitedPrefill
from pellucid.schedule.scheduler import Scheduler, SchedulerOptions

logger = logging.getLogger(__name__)
# A step of so many tokens takes twice as long as reading the weights does: of an H200 and 8B parameters in 16
# bits; of a CPU a guess, which counts where steps have not been timed.
CHEAP_TOKENS = {"cuda": 256, "cpu": 27}
E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine(Generic[E_co]):
    """An engine that is ready, or what stands for several, with what was decided on the way."""

    engine: E_co
    resolved: Resolved
    capacity: Capacity


def start_engine(
    config: EngineConfig, *, replica: int = 0, nodes: tuple[Node, ...] = (), meet: MeetAt = alone
) -> RunningEngine[Engine]:
    """Start everything below text.

    replica: which of the data-parallel engines this is.  nodes: the machines, if there are several.
    meet: how ranks of other engines are found, if this one works in step with others.  Raises ValueError
    for what the user can mend: model, options, memory.
    """
    if config.device.device != "cpu" and has_gpu() and not config.parallel.shares_model:
        num_engines = config.parallel.num_engines
        start_early(str(config), len(os.sched_getaffinity(0)) // num_engines, Share(replica, num_engines))
    try:
        return _start(config, replica, nodes, meet)
    finally:
        end_early()


def _start(
    config: EngineConfig, replica: int, nodes: tuple[Node, ...], meet: MeetAt
) -> RunningEngine[Engine]:
    began = time.perf_counter()
    checkpoint = Checkpoint.open(config.model)
    draft = open_draft(config, checkpoint)
    platform = detect(config.device.device, config.parallel.first_gpu(replica))
    resolved = resolve(config, platform, checkpoint, draft, replica=replica, nodes=nodes)
    logger.info("%s", resolved.table())
    executor = EXECUTORS.load(resolved.executor)()
    in_step = config.parallel.shares_experts
    capacity = executor.start(resolved, meet) if in_step else executor.start(resolved)
    try:
        engine = _make_engine(resolved, executor, capacity)
        if (path := config.scheduler.trace_steps) is not None:
            path += f".{replica}" if config.parallel.num_engines > 1 else ""
            engine.trace = StepTrace(Path(path), engine.scheduler, engine.stats)
    except BaseException:  # Ctrl-C, too: workers hold memory that others may want
        executor.shutdown()
        raise
    if resolved.speculative.is_synthetic:
        rates = ", ".join(f"{rate:.0%}" for rate in resolved.speculative.acceptance_rates)
        logger.warning(
            "synthetic acceptance (%s): drafts stand by chance, the text is not the model's", rates
        )
    logger.info("ready after %.1f s", time.perf_counter() - began)
    return RunningEngine(engine=engine, resolved=resolved, capacity=capacity)


def _make_engine(resolved: Resolved, executor: Executor, capacity: Capacity) -> Engine:
    user = resolved.user
    options = SchedulerOptions(
        max_model_len=capacity.max_model_len,
        num_slots=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        pp=resolved.num_pipeline_stages,
        num_spec=capacity.num_spec,
        tree_depth=resolved.speculative.tree_depth,
        num_extra=resolved.speculative.num_extra,
        cheap_tokens=CHEAP_TOKENS[resolved.platform.device] if resolved.speculative.is_adaptive else 0,
        drafter=capacity.drafter,
        timings=capacity.timings,
        policy=user.scheduler.scheduling_policy,
    )
    kv = KVManager(
        capacity.kinds,
        capacity.num_pages,
        num_slots=options.num_slots,
        max_len=options.max_len,
        max_chunk=options.max_chunk,
        enable_prefix_caching=user.cache.enable_prefix_caching,
    )
    features = HostFeatures.of(resolved)
    scheduler = Scheduler(options, kv, _prefill_budget(resolved), features)
    features.bind(scheduler, capacity)
    engine = Engine(
        scheduler,
        executor,
        depth=resolved.depth,
        check_invariants=user.scheduler.check_invariants,
        speculative=resolved.speculative,
    )
    if user.parallel.shares_experts:
        engine.rest.forbid("other engines need its experts; stop the engines, and start them again")
    transfer = resolved.kv_transfer
    if transfer is not None and not KV_CONNECTORS.load(transfer.kv_connector).may_sleep:
        engine.rest.forbid(f"its KV is lent by {transfer.kv_connector}; stop the engine, and start it again")
    return engine


def _prefill_budget(resolved: Resolved) -> PrefillBudget:
    """In a pipeline a stream's next token takes as many steps as there are stages."""
    target = resolved.user.scheduler.target_itl_ms
    if target is None:
        return LearnedPrefillBudget()
    if not target:
        return UnlimitedPrefill()
    return LearnedPrefillBudget(target / 1000 / resolved.num_pipeline_stages)
