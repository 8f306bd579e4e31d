"""Everything that can be configured: frozen dataclasses, one per concern, and `resolve`, the one place for defaults.

Field order is importance; each field's text becomes `--help`.  `resolve(user, hardware, checkpoint)` is pure: facts
discovered later (how many blocks fit) are return values of those who discover them, not written here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pellucid.models.checkpoint import Checkpoint
    from pellucid.platform import Platform


def option(default: object, text: str, choices: tuple[str, ...] | None = None, alias: tuple[str, ...] = ()) -> object:
    """A config field with its line of help."""
    return field(default=default, metadata={"help": text, "choices": choices, "alias": alias})  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is read."""

    model: str = option("sprout", "local folder, hub id, shape:NAME (dummy weights), or sprout, the bundled model")
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer, if not the model's")
    skip_tokenizer_init: bool = option(False, "serve token ids only; load no tokenizer")
    dtype: str = option("auto", "auto (the checkpoint's), bfloat16, float16 or float32", ("auto", "bfloat16", "float16", "float32"))
    max_model_len: int | None = option(None, "most tokens of a request, prompt and answer; default the model's own")
    load_format: str = option("auto", "auto (safetensors) or dummy (random weights, for benchmarks)", ("auto", "safetensors", "dummy"))
    revision: str | None = option(None, "branch, tag or commit on the hub")
    hub: str = option("huggingface", "where ids that are no local folder come from", ("huggingface", "modelscope"))
    download_dir: str | None = option(None, "where downloads are kept; default the hub's own cache")
    generation_config: str = option("auto", "auto: the checkpoint's sampling defaults; none: the engine's own", ("auto", "none"))
    seed: int = option(0, "seed of the noise of requests that bring none, and of dummy weights")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(64, "tokens a block, 16 to 256; prefix hits come in units of it", alias=("kvcache_block_size",))
    enable_prefix_caching: bool = option(True, "share the KV of equal prompt beginnings")
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory this engine may use")
    num_gpu_blocks_override: int | None = option(None, "blocks of KV cache, instead of measuring", alias=("num_kvcache_blocks",))
    cpu_kv_cache_gib: float | None = option(None, "KV cache on a CPU, in GiB; default a quarter of free memory, at most 8")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold and who goes first."""

    max_num_seqs: int | None = option(None, "most requests running at once; default 256 on a GPU, 128 on a CPU")
    max_num_batched_tokens: int | None = option(None, "most tokens a step; default 16384 on a GPU, 2048 on a CPU")
    scheduling_policy: str = option("fcfs", "fcfs, or priority (lower first)", ("fcfs", "priority"))
    depth: int | None = option(None, "plans under way at once: 1 plain, 2 overlaps host and device; default 2 on a GPU")
    check_invariants: bool = option(False, "verify every block's owner after every step (slow)")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where and how the forward runs."""

    device: str = option("auto", "auto, cuda or cpu", ("auto", "cuda", "cpu"))
    attention_backend: str | None = option(None, "triton or torch; default the best that supports the model here")
    enforce_eager: bool = option(False, "no CUDA graphs, no torch.compile")
    compile: bool = option(False, "torch.compile the small leaf operations (CPU)")
    num_threads: int | None = option(None, "CPU threads; default the physical cores")
    executor: str = option("local", "how plans reach the workers")
    quantization: str | None = option(None, "quantization scheme; default the checkpoint's")
    disable_log_stats: bool = option(False, "no statistics in the log")


SECTIONS = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "device": DeviceConfig}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user asked for.  `EngineConfig.from_options(max_model_len=4096, ...)` sorts flat options."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @classmethod
    def from_options(cls, options: dict[str, object]) -> EngineConfig:
        """Sort flat options (vLLM's names; nano-vllm's are accepted) into sections.

        Raises ValueError for an unknown option, naming the nearest one.
        """
        owner = {name: (section, f.name) for section, config in SECTIONS.items() for f in fields(config)
                 for name in (f.name, *f.metadata["alias"])}
        chosen: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
        for name, value in options.items():
            if name not in owner:
                near = difflib.get_close_matches(name, owner, n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown option {name!r}{hint}")
            section, canonical = owner[name]
            if canonical in chosen[section]:
                raise ValueError(f"option {name!r} says again what {canonical!r} says; give one of them")
            chosen[section][canonical] = value
        return cls(**{section: SECTIONS[section](**values) for section, values in chosen.items()})  # type: ignore[arg-type]
