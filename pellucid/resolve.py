"""What will run: the one place for defaults that depend on hardware or model.

`resolve(user, hardware, checkpoint)` is pure: facts discovered later (how many blocks fit) are return values
of those who discover them, not written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index

from pellucid.config import FP8, FP8_CACHES, EngineConfig, LoraConfig, ParallelConfig, SpeculativeConfig
from pellucid.connectors.config import KVEventsConfig, KVTransferConfig
from pellucid.features.base import FEATURES
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.draft import Draft
from pellucid.nodes.place import Node
from pellucid.platform import Platform, check_platform

VLLM_EXECUTORS = {"mp": "multiproc", "uni": "local"}  # its names of ours
KV, EVENTS, LORA = "kv_transfer", "kv_events", "lora"  # features that engines have if told to
MOST_LORAS = 128  # a step's kernels look for each
MOST_RANK = 512
MOST_LISTED = 1 << 20  # 20 MiB for each request that runs


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What will run: the user's wishes, the facts of checkpoint and hardware, every default filled in."""

    user: EngineConfig
    checkpoint: Checkpoint
    platform: Platform
    dtype: str  # of weights and activations: torch's name
    kv_dtype: str  # of the KV cache: torch's name
    max_model_len: int  # tokens
    max_model_len_is_default: bool  # then a small KV cache may lower it
    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    num_threads: int  # of each worker, on a CPU
    executor: str
    stage_layers: tuple[int, ...]  # of each pipeline stage
    replica: int = 0  # which of the data-parallel engines this is
    nodes: tuple[Node, ...] = ()  # the machines, if there are several
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    draft: Checkpoint | None = None  # the proposer's own, if it has one
    # All that requests may ask for: their order gives each its bit, the same one in every process.
    features: tuple[str, ...] = field(
        default_factory=lambda: tuple(each for each in FEATURES if each not in (KV, EVENTS))
    )
    kv_transfer: KVTransferConfig | None = None  # where KV comes from beside this engine's own pool
    kv_events: KVEventsConfig | None = None  # who is told which blocks are there

    @property
    def num_spec(self) -> int:
        """Most drafts a row may carry."""
        return self.speculative.num_speculative_tokens

    @property
    def num_pipeline_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def pipeline_cuts(self) -> tuple[int, ...]:
        """The first layer of each pipeline stage but the first one."""
        return tuple(accumulate(self.stage_layers[:-1]))

    @property
    def max_tokens_of_step(self) -> int:
        """Most tokens of a step, the padding of a recorded one included."""
        return max(self.max_num_batched_tokens, self.max_num_seqs * (1 + self.num_spec))

    @property
    def max_chunk(self) -> int:
        """Most places of a row, and of the drafts behind it."""
        return self.max_num_batched_tokens + self.num_spec + self.speculative.num_extra

    @property
    def num_workers(self) -> int:
        """Processes of one engine."""
        return self.user.parallel.tensor_parallel_size * self.num_pipeline_stages

    @property
    def num_workers_of_node(self) -> int:
        """Processes of all engines on one machine: on a CPU, they share its cores and its memory."""
        parallel = self.user.parallel
        return self.num_workers * parallel.num_engines // parallel.num_nodes

    def table(self) -> str:
        """The resolved choices in one line, for the log."""
        names = (
            "dtype",
            "kv_dtype",
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "depth",
        )
        choices = ", ".join(f"{name} {getattr(self, name)}" for name in names)
        return f"{self.checkpoint.architecture} on {self.platform.name}: {choices}"


def resolve(
    user: EngineConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    draft: Draft | None = None,
    *,
    replica: int = 0,
    nodes: tuple[Node, ...] = (),
) -> Resolved:
    """Fill in every default that depends on hardware or model.  Pure.

    draft: what proposes, read from its checkpoint; None: nothing.  replica: which of the data-parallel
    engines it is for.  nodes: the machines, if there are several.  Raises ValueError,
    naming value, limit and way out, for wishes that cannot be met.
    """
    on_gpu = platform.device == "cuda"
    check_platform(platform)
    _check_supported(user)
    max_num_seqs = _positive("max_num_seqs", user.scheduler.max_num_seqs, 256 if on_gpu else 128)
    max_model_len = _resolve_length(user, checkpoint)
    # On a GPU the decodes of all sequences find room beside full chunks of prompts.
    wish, default = user.scheduler.max_num_batched_tokens, 16384 + max_num_seqs if on_gpu else 2048
    num_batched = _positive("max_num_batched_tokens", wish, default, least=2)  # an answer's and a prompt's
    stage_layers = _resolve_stages(user.parallel, checkpoint.num_layers)
    num_workers = user.parallel.tensor_parallel_size * len(stage_layers)
    num_here = num_workers * user.parallel.num_engines // user.parallel.num_nodes
    num_threads = max(1, platform.num_cores // num_here)
    depth = len(stage_layers) + (1 if on_gpu else 0)
    block_size = user.cache.block_size
    if block_size not in (16, 32, 64, 128, 256):
        raise ValueError(f"block_size is {block_size}, must be 16, 32, 64, 128 or 256 tokens")
    dtype = _resolve_dtype(user.model.dtype, checkpoint)
    kv_transfer, kv_events = KVTransferConfig.of(user.cache), KVEventsConfig.of(user.cache)
    wanted = {LORA: user.lora.enable_lora, KV: kv_transfer is not None, EVENTS: kv_events is not None}
    absent = {name for name, is_wanted in wanted.items() if not is_wanted}
    return Resolved(
        user=user,
        checkpoint=checkpoint,
        platform=platform,
        dtype=dtype,
        kv_dtype=_resolve_kv_dtype(user, dtype, checkpoint, platform),
        max_model_len=max_model_len,
        max_model_len_is_default=user.model.max_model_len is None,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_batched,
        depth=_positive("depth", user.scheduler.depth, depth),
        num_threads=_positive("num_threads", user.device.num_threads, num_threads),
        executor=_resolve_executor(user.device.executor, num_workers),
        replica=replica,
        nodes=nodes,
        stage_layers=stage_layers,
        speculative=_resolve_speculation(user, draft, max_model_len),
        draft=draft and draft.checkpoint,
        features=tuple(name for name in FEATURES if name not in absent),
        kv_transfer=kv_transfer,
        kv_events=kv_events,
    )


def _positive(name: str, value: int | None, default: int, *, least: int = 1) -> int:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}, must be at least {least}")
    return default if value is None else value


def _check_roles(parallel: ParallelConfig) -> None:
    prefill, decode = parallel.prefill_engines, parallel.decode_engines
    if min(prefill, decode) < 0 or (prefill > 0) != (decode > 0):
        raise ValueError(
            f"prefill_engines is {prefill} and decode_engines {decode}: prompts need one of each at least; "
            "leave out both for engines that do all"
        )
    if prefill and parallel.num_nodes > 1:
        raise ValueError(
            f"prefill_engines is {prefill} on {parallel.num_nodes} machines: engines with roles share one; "
            "start a server on each with kv_transfer_config, and `pellucid route` before them"
        )
    if prefill and parallel.data_parallel_size not in (1, prefill + decode):
        raise ValueError(
            f"data_parallel_size is {parallel.data_parallel_size} beside {prefill} prefill and {decode} "
            "decode engines; leave it out, they are counted by themselves"
        )


def _check_shared_experts(user: EngineConfig) -> None:
    """What engines that work in step cannot do beside."""
    parallel = user.parallel
    refused = {
        # Ranks of an engine would have to agree on when they take part in others' steps.
        "tensor_parallel_size": parallel.tensor_parallel_size > 1,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "prefill_engines": parallel.prefill_engines > 0,
        "kv_transfer_config": user.cache.kv_transfer_config is not None,
        "kv_offloading_size": user.cache.kv_offloading_size is not None,
        "enable_lora": user.lora.enable_lora,
        "executor 'ray'": user.device.executor == "ray",
    }
    names = [name for name, is_on in refused.items() if is_on]
    if parallel.shares_experts and names:
        raise ValueError(
            f"enable_expert_parallel with {parallel.num_engines} engines has them work in step, for which "
            f"{' and '.join(names)} cannot be had; leave one of these out, or take "
            "tensor_parallel_size in the place of data_parallel_size"
        )


def _check_supported(user: EngineConfig) -> None:
    parallel = user.parallel
    _positive("tensor_parallel_size", parallel.tensor_parallel_size, 1)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        _positive(name, getattr(parallel, name), 1)
    _check_roles(parallel)
    _check_shared_experts(user)
    check_nodes(parallel)
    if not parallel.worker_timeout > 0:
        raise ValueError(f"worker_timeout is {parallel.worker_timeout:g} s, must be more than 0")
    listed = user.scheduler.max_listed_tokens
    if not 1 <= listed <= MOST_LISTED:
        raise ValueError(f"max_listed_tokens is {listed:,}, must be in [1, {MOST_LISTED:,}]")
    target = user.scheduler.target_itl_ms
    if target is not None and not 0 <= target < float("inf"):
        raise ValueError(f"target_itl_ms is {target}, must be at least 0 (0 is no limit)")
    if not user.scheduler.enable_chunked_prefill:
        raise ValueError(
            "enable_chunked_prefill=False is not supported: prompts are always computed in chunks; "
            "raise max_num_batched_tokens to make the chunks as long as the prompts"
        )
    _check_lora(user.lora)
    num_blocks = user.cache.num_gpu_blocks_override
    if num_blocks not in (None, -1) and num_blocks < 1:
        raise ValueError(f"num_gpu_blocks_override is {num_blocks}, must be at least 1 (or -1 to measure)")
    cpu_gib = user.cache.cpu_kv_cache_gib
    if cpu_gib is not None and not 0 < cpu_gib < math.inf:
        raise ValueError(f"cpu_kv_cache_gib is {cpu_gib}, must be above 0 (GiB)")
    if not 0 < user.cache.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {user.cache.gpu_memory_utilization}, must be in (0, 1]")


def check_nodes(parallel: ParallelConfig) -> None:
    """Raise ValueError if ranks cannot be dealt out to the machines evenly."""
    size, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    if local is not None and (local < 1 or size % local):
        raise ValueError(
            f"data_parallel_size_local is {local}, and data_parallel_size {size}, of which it must be a "
            "part: each machine has as many engines"
        )
    if local and parallel.nnodes not in (1, size // local):
        raise ValueError(
            f"nnodes is {parallel.nnodes}, but {size} engines, {local} on each machine, are {size // local}; "
            "leave one of these out"
        )
    if local and parallel.data_parallel_start_rank % local:
        raise ValueError(
            f"data_parallel_start_rank is {parallel.data_parallel_start_rank}, must be a multiple of "
            f"data_parallel_size_local, {local}"
        )
    if parallel.num_nodes > 1 and parallel.num_engines != size:
        raise ValueError(
            f"nnodes is {parallel.num_nodes}, but engines with roles (prefill_engines) hand KV on "
            "through memory of one machine; run a server on each, see kv_transfer_config"
        )
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * size
    if parallel.nnodes < 1 or num_ranks % parallel.num_nodes:
        raise ValueError(
            f"nnodes is {parallel.nnodes}, and there are {num_ranks} ranks: each machine has equally many; "
            "change nnodes, or a parallel size"
        )
    if not 0 <= parallel.own_node < parallel.num_nodes:
        raise ValueError(f"node_rank is {parallel.own_node}, must be in [0, {parallel.num_nodes})")


def _check_lora(lora: LoraConfig) -> None:
    if not 1 <= lora.max_loras <= MOST_LORAS:
        raise ValueError(f"max_loras is {lora.max_loras}, must be in [1, {MOST_LORAS}]")
    if not 1 <= lora.max_lora_rank <= MOST_RANK:
        raise ValueError(f"max_lora_rank is {lora.max_lora_rank}, must be in [1, {MOST_RANK}]")
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise ValueError(
            f"max_cpu_loras is {lora.max_cpu_loras}, must be at least max_loras, {lora.max_loras}: those on "
            "the device are kept in host memory, too"
        )


def _resolve_stages(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """How many layers each pipeline stage holds: what the user said, else as equal as can be.

    Layers that are left over go to the stages in the middle, then to the first; the last one has the head.
    """
    num_stages, split = parallel.pipeline_parallel_size, parallel.pipeline_split
    if num_stages > num_layers:
        raise ValueError(
            f"pipeline_parallel_size is {num_stages}, but the model has {num_layers} layers; "
            f"use at most {num_layers}"
        )
    if split is not None:
        return _read_split(split, num_stages, num_layers)
    layers, left = [num_layers // num_stages] * num_stages, num_layers % num_stages
    for stage in [*range(1, num_stages - 1), 0][:left]:
        layers[stage] += 1
    return tuple(layers)


def _read_split(split: str | Sequence[int], num_stages: int, num_layers: int) -> tuple[int, ...]:
    """`10,18` as numbers.  Raises ValueError if they do not fit the model and the stages."""
    parts = [part.strip() for part in split.split(",")] if isinstance(split, str) else split
    try:
        layers = tuple(int(part) if isinstance(part, str) else index(part) for part in parts)
    except (TypeError, ValueError):
        raise ValueError(f"pipeline_split is {split!r}, must be whole numbers, as 10,18") from None
    if len(layers) != num_stages or sum(layers) != num_layers or min(layers) < 1:
        raise ValueError(
            f"pipeline_split is {','.join(map(str, layers))}: {len(layers)} stages of {sum(layers)} layers "
            f"together, but pipeline_parallel_size is {num_stages} and the model has {num_layers} layers; "
            "each stage needs at least one"
        )
    return layers


def _resolve_executor(wish: str | None, num_workers: int) -> str:
    wish = VLLM_EXECUTORS.get(wish or "", wish)
    if wish == "local" and num_workers > 1:
        raise ValueError(f"executor is 'local', which runs one worker, not {num_workers}; use 'multiproc'")
    return wish or ("local" if num_workers == 1 else "multiproc")


def _resolve_dtype(wish: str, checkpoint: Checkpoint) -> str:
    if wish == "auto":
        return checkpoint.dtype
    return {"half": "float16", "float": "float32"}.get(wish, wish)


def _resolve_speculation(user: EngineConfig, draft: Draft | None, max_model_len: int) -> SpeculativeConfig:
    config = draft.config if draft else SpeculativeConfig.of(user.speculative)
    size = user.parallel.tensor_parallel_size
    if config.draft_tensor_parallel_size not in (None, size):
        raise ValueError(
            f"draft_tensor_parallel_size is {config.draft_tensor_parallel_size}, must be {size}, as "
            "tensor_parallel_size: the draft model is split over the same ranks"
        )
    model = draft.checkpoint if draft and config.method in ("draft_model", "pard") else None
    if model is not None and max_model_len > model.max_stretched_len:
        raise ValueError(
            f"max_model_len is {max_model_len:,}, but the draft model {model.name} knows "
            f"{model.max_stretched_len:,} positions; lower max_model_len to that"
        )
    return config


def _resolve_kv_dtype(user: EngineConfig, dtype: str, checkpoint: Checkpoint, platform: Platform) -> str:
    wish = user.cache.kv_cache_dtype
    # Plain torch attends over an FP8 cache on any GPU, but so slowly that it has to be asked for.
    has_fp8 = platform.device == "cpu" or platform.reaches(8, 9) or user.device.attention_backend == "torch"
    if wish == "auto":
        return checkpoint.kv_cache_dtype or dtype if has_fp8 else dtype
    if wish in FP8_CACHES:
        # What E5M2 has of a float16 any GPU unpacks.
        if not has_fp8 and FP8_CACHES[wish] == FP8:
            raise ValueError(
                f"kv_cache_dtype is {wish!r}, which needs compute capability 8.9 or newer; the GPU is "
                f"{platform.gpu}; use kv_cache_dtype='fp8_e5m2' or 'auto', or attention_backend='torch', "
                "which is slow"
            )
        return FP8_CACHES[wish]
    if wish != dtype:
        raise ValueError(
            f"kv_cache_dtype is {wish!r}, but the model runs in {dtype}; use {dtype!r}, 'fp8' or 'auto'"
        )
    return dtype


def _resolve_length(user: EngineConfig, checkpoint: Checkpoint) -> int:
    wish, most = user.model.max_model_len, checkpoint.max_stretched_len
    if wish is None:
        return checkpoint.max_position_embeddings
    if not 1 < wish <= most:
        why = f"the model knows {most:,} positions"
        if most == checkpoint.dense_reach:
            why = f"beyond index_topk = {most:,} queries choose among keys, which is not supported"
        raise ValueError(f"max_model_len is {wish:,}, must be in [2, {most:,}]: {why}")
    return wish
