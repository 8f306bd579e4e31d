"""Everything that can be configured: frozen dataclasses, one per concern.

Field order is importance; each field's text becomes `--help`.  What is not said is None, until resolve.py
decides.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from pellucid.no_effect import ENGINE, SPECULATIVE, UNSERVED, UNSERVED_SPECULATIVE, tell_ignored


def option(default: object, text: str, choices: tuple[str, ...] = (), alias: tuple[str, ...] = ()) -> Any:
    """A config field with its line of help, its choices, and other names it is known by."""
    return field(default=default, metadata={"help": text, "choices": choices, "alias": alias})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is read."""

    model: str = option(
        "sprout", "local folder, hub id, shape:NAME (dummy weights), or sprout, the bundled model"
    )
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer, if not the model's")
    skip_tokenizer_init: bool = option(False, "serve token ids only; load no tokenizer")
    dtype: str = option(
        "auto",
        "auto (the checkpoint's), bfloat16, float16 or float32",
        ("auto", "bfloat16", "float16", "float32", "half", "float"),
    )
    max_model_len: int | None = option(
        None, "most tokens of a request, prompt and answer; default the model's own"
    )
    trust_remote_code: bool = option(False, "accepted for compatibility; code from a checkpoint is never run")
    load_format: str = option(
        "auto",
        "auto (safetensors, else torch's .bin), pt (torch's .bin or .pt) or dummy (random weights, for "
        "benchmarks); the names of formats, which auto finds by itself, mean auto",
        ("auto", "safetensors", "pt", "gguf", "bitsandbytes", "dummy"),
    )
    revision: str | None = option(None, "branch, tag or commit on the hub")
    hub: str = option(
        "huggingface", "where ids that are no local folder come from", ("huggingface", "modelscope")
    )
    download_dir: str | None = option(None, "where downloads are kept; default the hub's own cache")
    generation_config: str = option(
        "auto", "auto: the checkpoint's sampling defaults; none: the engine's own", ("auto", "none")
    )
    seed: int = option(0, "seed of the noise of requests that bring none, and of dummy weights")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(
        64, "tokens a block, 16 to 256; prefix hits come in units of it", alias=("kvcache_block_size",)
    )
    enable_prefix_caching: bool = option(True, "share the KV of equal prompt beginnings")
    kv_cache_dtype: str = option(
        "auto",
        "fp8 (or fp8_e4m3), fp8_e5m2, or the model's dtype; auto: what the checkpoint was calibrated for",
        ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32"),
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory this engine may use")
    num_gpu_blocks_override: int | None = option(
        None, "pages of KV cache, instead of measuring; -1 measures", alias=("num_kvcache_blocks",)
    )
    cpu_kv_cache_gib: float | None = option(
        None, "KV cache on a CPU, in GiB; default a quarter of free memory, at most 8"
    )
    kv_offloading_size: float | None = option(
        None,
        "GiB of host memory, of all ranks, that keep KV which the cache has no room for",
        alias=("kv_offload",),
    )
    kv_offloading_path: str | None = option(
        None, "a folder that keeps KV behind host memory, and over restarts; default none"
    )
    kv_offloading_disk_size: float = option(64.0, "most GiB of files in kv_offloading_path")
    kv_offloading_backend: str = option("native", "native, the only one", ("native",))
    kv_transfer_config: Mapping[str, object] | str | None = option(
        None, 'where KV comes from and goes to, JSON: {"kv_connector": ...}; see docs/parallel.md'
    )
    kv_events_config: Mapping[str, object] | str | None = option(
        None, 'who is told which blocks are cached, JSON: {"enable_kv_cache_events": true}'
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold and who goes first."""

    max_num_seqs: int | None = option(
        None, "most requests running at once; default 256 on a GPU, 128 on a CPU"
    )
    max_num_batched_tokens: int | None = option(
        None, "most tokens a step; default 16384 and max_num_seqs more on a GPU, 2048 on a CPU"
    )
    target_itl_ms: float | None = option(
        None,
        "milliseconds between a stream's tokens while prompts are computed beside it: sizes their chunks; "
        "0 no limit; default about 3.5 to 5.7 times what a step without prompts takes, at least 4.8",
    )
    enable_chunked_prefill: bool = option(True, "prompts are computed in chunks beside decodes; always on")
    max_listed_tokens: int = option(
        4096,
        "most tokens that a request may list in each of logit_bias, bad_words and, with min_tokens, "
        "stop_token_ids; each of max_num_seqs has memory for so many, 20 bytes a token",
    )
    scheduling_policy: str = option("fcfs", "fcfs, or priority (lower first)", ("fcfs", "priority"))
    depth: int | None = option(
        None,
        "plans under way at once: 1 plain, 2 overlaps host and device; a pipeline takes one for each stage; "
        "default the pipeline stages, and one more on a GPU",
    )
    trace_steps: str | None = option(
        None, "a file for what each step does, without texts: for the X-ray, and for `pellucid replay`"
    )
    check_invariants: bool = option(False, "verify every block's owner after every step (slow)")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where and how the forward runs."""

    device: str = option("auto", "auto, cuda or cpu", ("auto", "cuda", "cpu"))
    attention_backend: str | None = option(
        None, "triton or torch; default the best that supports the model here"
    )
    enforce_eager: bool = option(False, "run every step kernel by kernel, without CUDA graphs")
    record_chunks: bool = option(
        True, "record CUDA graphs of small prompt chunks, too: less host time, a longer start"
    )
    num_threads: int | None = option(None, "CPU threads; default the physical cores")
    executor: str | None = option(
        None,
        "how plans reach workers: local, multiproc (uni, mp) or ray; default local for one, else multiproc",
        alias=("distributed_executor_backend",),
    )
    quantization: Mapping[str, object] | str | None = option(
        None,
        "fp8, int8, int4, nf4 or mxfp4 quantize plain weights as they load, also by kinds and names of "
        'layers, as {"linear": "int4", "head": "int8", "ignore": ["re:.*down_proj"]}; '
        "default the checkpoint's own scheme",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Over how many devices the model is spread."""

    tensor_parallel_size: int = option(1, "GPUs that share each layer")
    pipeline_parallel_size: int = option(1, "pipeline stages, which share the layers among them")
    pipeline_split: str | Sequence[int] | None = option(
        None, "layers of each pipeline stage, as 10,18; default as equal as can be"
    )
    enable_expert_parallel: bool = option(
        False,
        "GPUs that share each layer, and data-parallel engines, have whole experts, each some of a layer's, "
        "not slices or copies of all",
    )
    data_parallel_size: int = option(1, "whole copies of the model, each with GPUs and processes of its own")
    prefill_engines: int = option(
        0, "whole copies that compute prompts to the first token, and hand them to the decode engines"
    )
    decode_engines: int = option(0, "whole copies that go on from there; both, instead of data_parallel_size")
    worker_timeout: float = option(
        300.0,
        "seconds that a step may take before the engine ends and names the worker that hangs",
        alias=("distributed_timeout_seconds",),
    )

    nnodes: int = option(1, "machines, each with as many ranks; the others run `pellucid agent`")
    node_rank: int = option(0, "which of them this is; the server or script runs on 0")
    master_addr: str = option(
        "127.0.0.1", "address of the node of rank 0, for the others", alias=("data_parallel_address",)
    )
    master_port: int = option(29501, "port there, at which they join", alias=("data_parallel_rpc_port",))
    node_addr: str | None = option(
        None, "this node's address, if it is not rank 0; default the one from which it reaches that"
    )
    data_parallel_size_local: int | None = option(
        None, "engines on each machine, instead of nnodes; the same on all"
    )
    data_parallel_start_rank: int = option(0, "the first engine of this machine, instead of node_rank")

    @property
    def num_nodes(self) -> int:
        """Machines."""
        local = self.data_parallel_size_local
        return self.data_parallel_size // local if local and self.nnodes == 1 else self.nnodes

    @property
    def own_node(self) -> int:
        """Which of them this is."""
        local = self.data_parallel_size_local
        return self.node_rank or (self.data_parallel_start_rank // local if local else 0)

    @property
    def head(self) -> tuple[str, int]:
        """Where the node of rank 0 is reached."""
        return self.master_addr, self.master_port

    @property
    def shares_model(self) -> bool:
        """Does an engine have several workers?"""
        return self.tensor_parallel_size * self.pipeline_parallel_size > 1

    @property
    def shares_experts(self) -> bool:
        """Do engines divide the experts among them, and so work in step?"""
        return self.enable_expert_parallel and self.num_engines > 1

    @property
    def num_engines(self) -> int:
        """Whole copies of the model."""
        return self.prefill_engines + self.decode_engines or self.data_parallel_size

    def first_gpu(self, replica: int) -> int | None:
        """Index on its machine of an engine's first GPU; None for the only one, which may be anywhere."""
        if self.num_engines * self.num_nodes == 1:
            return None
        num_ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        return replica * num_ranks % max(1, num_ranks * self.num_engines // max(1, self.num_nodes))


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters beside the model: low-rank additions to its layers, another one for each request."""

    enable_lora: bool = option(False, "make room for LoRA adapters")
    max_loras: int = option(4, "most adapters in one step; each has memory on the device")
    max_lora_rank: int = option(16, "largest rank of an adapter")
    max_cpu_loras: int | None = option(
        None, "adapters that are kept in host memory, the least recently used one goes; default max_loras"
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Several tokens a step: cheap guesses, verified by the model.

    The output stays the same, unless speculative_config names another rejection_sample_method than strict.
    """

    speculative_config: Mapping[str, object] | str | None = option(
        None, 'JSON, such as {"method": "ngram", "num_speculative_tokens": 4}; see docs/speculation.md'
    )
    speculative_model: str | None = option(
        None,
        "a small model or head that drafts, instead of speculative_config: a folder, hub id, sprout-eagle3",
        alias=("spec_model",),
    )
    speculative_method: str | None = option(
        None,
        "how, instead of speculative_config: ngram, suffix, draft_model, eagle3, ..; default: the model's",
        alias=("spec_method",),
    )
    num_speculative_tokens: int | None = option(
        None, "drafts a step, with speculative_model or speculative_method", alias=("spec_tokens",)
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which proposer guesses, and how much.  The default guesses nothing.

    Raises ValueError for numbers that make no sense; the method's name is checked where it is loaded.
    """

    method: str = "none"
    num_speculative_tokens: int = 0  # drafts a row
    model: str | None = None  # of a proposer with weights: a folder, hub id or bundled model
    revision: str | None = None  # of that model, on the hub
    quantization: str | None = None  # of that model: a scheme for plain weights
    draft_tensor_parallel_size: int | None = None  # as the model's, if said
    # draft_model: all drafts in one pass; default, if the checkpoint was made for it
    parallel_drafting: bool | None = None
    # drafts by what they bring, and none where they do not pay; default, but for synthetic acceptance
    adaptive: bool | None = None
    # medusa: a tree instead of a chain, as paths of ranks such as [[0], [1], [0, 0]]; or that as a text
    speculative_token_tree: Sequence[Sequence[int]] | str | None = None
    # heads: trees instead of chains, grown from so many of the likeliest nodes at each depth; 1: chains
    speculative_eagle_topk: int = 1
    speculative_num_steps: int | None = None  # of such trees: how deep they may be
    suffix_decoding_max_tree_depth: int = 24  # suffix: most tokens of a match and of what follows
    suffix_decoding_max_cached_requests: int = 32  # suffix: finished texts that are looked at, too
    prompt_lookup_min: int = 2  # ngram: fewest tokens that must have occurred before
    prompt_lookup_max: int = 5  # ngram: most tokens that are looked for
    rejection_sample_method: str = "strict"  # strict, standard or synthetic: see docs/speculation.md
    # synthetic: the share of verifications in which the first, the first two, .. drafts stand
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None  # the same as mean tokens of a verification

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_type(f"{f.name} in speculative_config", getattr(self, f.name), str(f.type))
        if self.method == "none":
            if self.num_speculative_tokens or self.model is not None:
                raise ValueError(
                    "method none drafts nothing; leave out num_speculative_tokens and model, or name a method"
                )
            return
        if self.is_open:
            return
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, must be in [1, {MAX_DRAFTS}]: "
                f"most drafts a request and step, which method {self.method} asks for"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, must be in [1, prompt_lookup_max], "
                f"and prompt_lookup_max is {self.prompt_lookup_max}"
            )
        if self.method in ARE_CERTAIN and self.model is not None:
            raise ValueError(
                f"method {self.method} reads no model, but model is {self.model!r}; leave one out"
            )
        depth, num_cached = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
        if depth < 1 or num_cached < 0:
            raise ValueError(
                f"suffix_decoding_max_tree_depth is {depth}, must be at least 1, and "
                f"suffix_decoding_max_cached_requests {num_cached}, must be at least 0"
            )
        if self.method in READS_MODEL and self.model is None:
            example = ", such as sprout-draft" if self.method == "draft_model" else ""
            raise ValueError(f"method {self.method} needs a model{example}; give model=...")
        self._check_tree()
        self._check_synthetic()

    @property
    def is_open(self) -> bool:
        """Is there something left to be read from the checkpoint that drafts (models/draft.py)?"""
        return self.method == BY_CHECKPOINT or self.method in HEADS and not self.num_speculative_tokens

    @property
    def num_extra(self) -> int:
        """Places of a row, beyond those of its drafts, that are written to make them."""
        return int(self.method == "dflash")  # a block begins with the newest token

    @property
    def token_tree(self) -> tuple[tuple[int, ...], ...] | None:
        """The paths of a tree's nodes; None: drafts are a chain."""
        return None if self.speculative_token_tree is None else _read_tree(self.speculative_token_tree)

    @property
    def grows(self) -> bool:
        """Are drafts trees of which each row's grows where the drafter is sure?"""
        return self.speculative_eagle_topk > 1

    @property
    def tree_depth(self) -> int:
        """Of the deepest draft of any tree; 0: drafts are chains."""
        if self.grows:
            assert self.speculative_num_steps is not None, "said with the width"
            return self.speculative_num_steps
        return max(map(len, self.token_tree or ((),)))

    def _check_tree(self) -> None:
        tree = self.token_tree
        self._check_growth()
        if tree is None:
            return
        if self.method != "medusa":
            raise ValueError(f"method {self.method} drafts chains; leave out speculative_token_tree")
        if len(tree) != self.num_speculative_tokens:
            raise ValueError(
                f"speculative_token_tree has {len(tree)} nodes, but num_speculative_tokens is "
                f"{self.num_speculative_tokens}; make them equal"
            )

    def _check_growth(self) -> None:
        width, depth = self.speculative_eagle_topk, self.speculative_num_steps
        num = self.num_speculative_tokens
        if not 1 <= width <= MAX_TOPK:
            raise ValueError(f"speculative_eagle_topk is {width}, must be in [1, {MAX_TOPK}]")
        if depth is None:
            return
        if self.method not in GROW:
            raise ValueError(
                f"method {self.method} grows no trees; leave out speculative_eagle_topk and "
                f"speculative_num_steps, or use method {', '.join(GROW)}"
            )
        if not 1 <= depth <= MAX_DRAFTS:
            raise ValueError(f"speculative_num_steps is {depth}, must be in [1, {MAX_DRAFTS}]")
        if width == 1:
            if depth != num:
                raise ValueError(
                    f"speculative_num_steps is {depth}, but num_speculative_tokens is {num}: a chain has a "
                    "draft a step; make them equal, or raise speculative_eagle_topk for a tree"
                )
            return
        if self.speculative_token_tree is not None:
            raise ValueError(
                f"speculative_token_tree is one tree for all, speculative_eagle_topk {width} grows them; "
                "leave one out"
            )
        asked, most = (depth - 1) * width, width + (depth - 1) * width * width
        if not asked <= num <= most:
            raise ValueError(
                f"num_speculative_tokens is {num}; with speculative_eagle_topk {width} and "
                f"speculative_num_steps {depth} it must be in [{asked}, {most}]: the drafter is asked behind "
                f"{asked} drafts, and names {most}"
            )

    @property
    def is_adaptive(self) -> bool:
        """Does acceptance say how many drafts a request has, and the clock whether it has any?"""
        return not self.is_synthetic if self.adaptive is None else self.adaptive

    @property
    def are_certain(self) -> bool:
        """Is a draft what the text says, and not drawn from a distribution?"""
        return self.method in ARE_CERTAIN

    @property
    def is_synthetic(self) -> bool:
        """Do drafts stand by chance, so that the output is not the model's?"""
        return self.rejection_sample_method == "synthetic"

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Of synthetic acceptance: the share of verifications in which the first, the first two, .. stand."""
        if self.synthetic_acceptance_rates is not None:
            return tuple(self.synthetic_acceptance_rates)
        assert self.synthetic_acceptance_length is not None, "checked where this was made"
        # As vLLM has it: all but the last draft that ever stands always does, so lengths vary the least.
        num_accepted = self.synthetic_acceptance_length - 1
        return tuple(min(1.0, max(0.0, num_accepted - i)) for i in range(self.num_speculative_tokens))

    def _check_synthetic(self) -> None:
        rates, length, num = (
            self.synthetic_acceptance_rates, self.synthetic_acceptance_length, self.num_speculative_tokens
        )  # fmt: skip
        given = [value for value in (rates, length) if value is not None]
        names = "synthetic_acceptance_rates or synthetic_acceptance_length"
        if not self.is_synthetic:
            if given:
                raise ValueError(f"{names} means nothing without rejection_sample_method 'synthetic'")
            return
        if len(given) != 1:
            raise ValueError(f"rejection_sample_method 'synthetic' needs {names}, one of them")
        if length is not None and not 1 <= length <= num + 1:
            raise ValueError(f"synthetic_acceptance_length is {length!r}, must be a number in [1, {num + 1}]")
        if rates is not None and not _are_rates(rates, num):
            raise ValueError(
                f"synthetic_acceptance_rates is {rates!r}, must be a list of {num} numbers in [0, 1], one "
                "for each draft and none above the one before it"
            )

    @classmethod
    def of(cls, options: SpeculativeOptions) -> SpeculativeConfig:
        """Read what the user asked for, in either way.  Raises ValueError, naming what is wrong."""
        said = {
            "method": options.speculative_method,
            "model": options.speculative_model,
            "num_speculative_tokens": options.num_speculative_tokens,
        }
        short = {name: value for name, value in said.items() if value is not None}
        if options.speculative_config is None:
            return cls._from_fields(short)
        if short:
            raise ValueError("speculative_config says all of it; leave out " + ", ".join(SHORT_OPTIONS))
        return cls._from_fields(json_object("speculative_config", options.speculative_config))

    @classmethod
    def _from_fields(cls, given: Mapping[str, object]) -> SpeculativeConfig:
        known = [f.name for f in fields(cls)]
        tell_ignored(name for name in given if name in SPECULATIVE)
        given = _with_our_count({name: value for name, value in given.items() if name not in SPECULATIVE})
        for name in given:
            if name in UNSERVED_SPECULATIVE:
                raise ValueError(f"{name} in speculative_config: {UNSERVED_SPECULATIVE[name]}")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
                raise ValueError(f"unknown key {name!r} in speculative_config{hint}")
        given = _with_method(given)
        if given and not isinstance(given.get("method"), str):
            raise ValueError("speculation needs a method, such as ngram, or a model that drafts")
        tree = given.get("speculative_token_tree")
        if tree is not None and "num_speculative_tokens" not in given:
            given = {**given, "num_speculative_tokens": len(_read_tree(tree))}
        return cls(**_with_growth(given))  # type: ignore[arg-type]


def _with_method(given: Mapping[str, object]) -> Mapping[str, object]:
    """vLLM's ways to say it: a model's checkpoint tells how it drafts, unless the model is called ngram."""
    if (method := given.get("method")) in SAME_METHODS:
        given = {**given, "method": SAME_METHODS[str(method)]}
    if given.get("model") in NGRAM_MODELS:
        return {"method": "ngram"} | {name: value for name, value in given.items() if name != "model"}
    return {"method": BY_CHECKPOINT} | dict(given) if given.get("model") is not None else given


def _with_our_count(given: Mapping[str, object]) -> Mapping[str, object]:
    """SGLang counts the token before the drafts, too."""
    if "speculative_num_draft_tokens" not in given:
        return given
    num = given["speculative_num_draft_tokens"]
    _check_type("speculative_num_draft_tokens in speculative_config", num, "int")
    if "num_speculative_tokens" in given:
        raise ValueError(
            f"speculative_num_draft_tokens {num} and num_speculative_tokens say the same, the first 1 more: "
            "leave one out"
        )
    rest = {name: value for name, value in given.items() if name != "speculative_num_draft_tokens"}
    return {**rest, "num_speculative_tokens": int(num) - 1}  # type: ignore[call-overload]


def _with_growth(given: Mapping[str, object]) -> Mapping[str, object]:
    """With what follows from the width of trees that grow, or from the number of steps alone, if not said."""
    width, depth = given.get("speculative_eagle_topk", 1), given.get("speculative_num_steps")
    num = given.get("num_speculative_tokens")
    if not isinstance(width, int) or depth is not None and not isinstance(depth, int):
        return given  # said where types are checked
    if width > 1 and depth is None:
        depth = min(TREE_DEPTH, 1 + num // width) if isinstance(num, int) and num > 0 else TREE_DEPTH
        given = {**given, "speculative_num_steps": depth}
    if depth is not None and num is None:
        given = {**given, "num_speculative_tokens": max(width, (depth - 1) * width) if width > 1 else depth}
    return given


def _read_tree(tree: object) -> tuple[tuple[int, ...], ...]:
    """The paths of a tree's nodes, from lists of ranks or a text of such.  Raises ValueError otherwise."""
    try:
        paths = ast.literal_eval(tree) if isinstance(tree, str) else tree
        read = tuple(tuple(int(rank) for rank in path) for path in paths)  # type: ignore[union-attr]
    except (ValueError, TypeError, SyntaxError):
        read = ()
    if not read or min(rank for path in read for rank in path or (-1,)) < 0:
        raise ValueError(
            f"speculative_token_tree is {tree!r:.100}, must be paths of ranks, such as [[0], [1], [0, 0]]"
        )
    return read


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raise ValueError if a value is not of its field's type, as written there, and we know that type."""
    parts = [part.partition("[")[0] for part in annotation.split(" | ")]
    if (value is None and "None" in parts) or not KINDS.keys() >= {*parts} - {"None"}:
        return
    kinds, meanings = zip(*(KINDS[part] for part in parts if part != "None"), strict=True)
    is_stray_flag = isinstance(value, bool) and bool not in kinds  # Python counts True as 1
    if is_stray_flag or not isinstance(value, kinds):
        raise ValueError(f"{name} is {value!r:.100}, must be {' or '.join(meanings)}")


def _plain(value: object) -> object:
    """A path as its text, and a whole number of numpy's as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_rates(rates: object, num: int) -> bool:
    """Is this a list of `num` shares, each at most the one before it?"""
    if not isinstance(rates, list | tuple) or len(rates) != num or not all(map(_is_number, rates)):
        return False
    return all(0 <= rate <= before for rate, before in zip(rates, (1.0, *rates), strict=False))


# What annotations mean, and in words; numpy's numbers are such, its flags are not.  Others are checked where
# they are read.
KINDS: dict[str, tuple[type, str]] = {
    "str": (str, "a text"),
    "bool": (bool, "True or False"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "Sequence": (Sequence, "a list of whole numbers"),
}
MAX_DRAFTS = 64
MAX_TOPK = 8  # nodes at a depth behind which a drafter is asked: queries of a short row
TREE_DEPTH = 5  # of trees that grow, if it is not said: SGLang's
GROW = ("eagle", "eagle3", "mtp")  # methods that grow trees
BY_CHECKPOINT = "as the model's checkpoint says"  # no name of a method
HEADS = ("dflash", "eagle", "eagle3", "medusa", "mtp")  # methods whose checkpoint says how much to draft, too
ARE_CERTAIN = ("grammar", "ngram", "suffix")  # methods whose drafts are not drawn
# Methods that read the checkpoint which `model` names.
READS_MODEL = ("dflash", "draft_model", "eagle", "eagle3", "medusa", "pard")
# vLLM's other names of methods.
SAME_METHODS = {
    "ngram_gpu": "ngram",
    **dict.fromkeys(("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"),
}
FP8 = "float8_e4m3fn"  # torch's name
FP8_CACHES = {"fp8": FP8, "fp8_e4m3": FP8, "fp8_e5m2": "float8_e5m2"}  # values of kv_cache_dtype
SHORT_OPTIONS = ("speculative_model", "speculative_method", "num_speculative_tokens")
NGRAM_MODELS = ("ngram", "[ngram]")  # vLLM's names of the method, in a model's place


def json_object(name: str, value: Mapping[str, object] | str) -> Mapping[str, object]:
    """`value`, or what it says as JSON.  Raises ValueError if that is no object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} {value!r} is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f'{name} is {value!r}, must be an object, as {{"key": 1}}')
    return value


Section = (
    ModelConfig
    | CacheConfig
    | SchedulerConfig
    | DeviceConfig
    | ParallelConfig
    | LoraConfig
    | SpeculativeOptions
)
SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "parallel": ParallelConfig,
    "lora": LoraConfig,
    "speculative": SpeculativeOptions,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user asked for.  `EngineConfig.from_options(max_model_len=4096, ...)` sorts flat options."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> EngineConfig:
        """Sort flat options (vLLM's names; nano-vllm's are accepted, too) into sections.

        None is an option's default.  Raises ValueError for an unknown option, naming the nearest one, and for
        a value of another type or out of its choices.  Some of vLLM's have no effect, which a warning tells.
        """
        known = {
            name: (section, f) for section, f in all_options() for name in (f.name, *f.metadata["alias"])
        }
        chosen: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
        tell_ignored(name for name in options if name in ENGINE)
        for name, value in options.items():
            if name in ENGINE:
                continue
            if name not in known:
                if name in UNSERVED:
                    raise ValueError(f"{name} is not supported: {UNSERVED[name]}")
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown option {name!r}{hint} (`pellucid generate --help` lists them)")
            section, f = known[name]
            if f.name in chosen[section]:
                raise ValueError(f"option {name!r} says again what {f.name!r} says; give one of them")
            if value is None:
                continue
            choices = f.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{name} is {value!r}, must be one of {', '.join(choices)}")
            chosen[section][f.name] = value = _plain(value)
            _check_type(name, value, str(f.type))
        return cls(**{section: SECTIONS[section](**values) for section, values in chosen.items()})  # type: ignore[arg-type]


def all_options() -> Iterator[tuple[str, Field[object]]]:
    """Every option as (section, dataclass field), in order of importance."""
    for section, config in SECTIONS.items():
        for f in fields(config):
            yield section, f


NOT_SPECULATIVE = SpeculativeConfig()
