"""From checkpoints to models that run, as workers want them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.attention.base import AnyBackend, choose_backend
from pellucid.dist.collectives import ALONE, UNLINKED, Group, Links
from pellucid.dist.mesh import NOWHERE, WHOLE_MODEL, Stage
from pellucid.forward import ForwardInput
from pellucid.kv.layout import LayerCache
from pellucid.layers.attention import Attention
from pellucid.layers.experts import Experts
from pellucid.layers.latent import LatentAttention
from pellucid.layers.leaf import Leaf, choose_leaf
from pellucid.layers.stage import Inlet
from pellucid.lora.bank import AdapterLimits, Bank
from pellucid.models.builder import BuildContext, Builder
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fields import Fields
from pellucid.models.head import BuiltHead, HeadPlan, Lender
from pellucid.models.kinds import kinds_of
from pellucid.models.loader import (
    check_tied,
    fill_dummy,
    load_weights,
    open_source,
    torch_module,
    weights_of,
)
from pellucid.models.registry import MODELS, Model
from pellucid.models.text_config import spellings_of
from pellucid.platform import Platform
from pellucid.quant.base import Coords
from pellucid.quant.quantization import choose_quantization
from pellucid.quant.schemes.base import StoredConfig
from pellucid.resolve import Resolved
from pellucid.taps import Taps
from pellucid.weights.source import Claimed, TensorSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A loaded model, and what the worker must give it before it can run."""

    model: Model
    caches: tuple[LayerCache, ...]  # of all layers, on whatever rank
    attention_layers: tuple[
        Attention | LatentAttention, ...
    ]  # those that are here; each needs its `kv_cache` and `table`
    backend: AnyBackend  # of every attention layer
    inlet: Inlet | None  # behind the first stage of a pipeline; needs its `stream`
    vocab_size: int
    weight_bytes: int  # on this device, before repacking
    token_bytes: int  # of these, what a token is multiplied with, on average
    lora_banks: tuple[Bank, ...] = ()  # of the layers that are here
    modules: frozenset[str] = frozenset()  # of all pipeline stages: paths that a checkpoint's weights have
    adaptable: frozenset[str] = frozenset()  # what adapters may change: of these, and the head
    read_own: Callable[[str], Tensor | None] = lambda _: None  # a tensor as the checkpoint has it, if it does

    def run(self, fwd: ForwardInput) -> Tensor:
        """Hidden states [T, D], or of the tokens that are wanted.

        `fwd` stays as it is: another model may have planned its attention there.
        """
        attn = tuple(self.backend.metadata(fwd, table) for table in range(len(fwd.block_tables)))
        return self.model(replace(fwd, attn=attn, taps=Taps()))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a model is built, whatever its family."""

    dtype: torch.dtype  # of weights and activations
    device: torch.device
    block_size: int  # tokens
    max_model_len: int  # tokens
    kv_dtype: torch.dtype | None = None  # of the KV cache; default `dtype`
    quantization: str | Mapping[str, object] | None = None  # default the checkpoint's own
    group: Group = ALONE  # the ranks that share every layer, a slice each
    stage: Stage = WHOLE_MODEL  # which of the layers are built
    num_spec: int = 0  # drafts that may reach past max_model_len
    leaf: Leaf | None = None  # who provides norms and activations; default the fastest on `device`
    expert_parallel: bool = False  # the ranks of `group` have whole experts, not slices of all
    engines: Group = ALONE  # that divide the experts among them: this rank in each
    tree_depth: int = 0  # of the drafts that it verifies, if they are trees
    adapters: AdapterLimits | None = None  # that its layers are to have room for
    seed: int = 0  # of dummy weights
    show_progress: bool = True


class ModelFactory:
    """Builds the models of one worker."""

    def __init__(self, resolved: Resolved, device: torch.device, links: Links = UNLINKED) -> None:
        self.resolved, self.device, self.links = resolved, device, links
        self.stage = Stage(links.mesh.rank_of("pp"), resolved.pipeline_cuts)

    def build_target(self, *, tree_depth: int = 0) -> BuiltModel:
        """Build and load this rank's part of the model that is served, as `build` does.

        tree_depth: of the drafts that it verifies, if they are trees.
        """
        checkpoint, quantization = self.resolved.checkpoint, self.resolved.user.device.quantization
        lora = self.resolved.user.lora
        limits = AdapterLimits(lora.max_loras, lora.max_lora_rank) if lora.enable_lora else None
        return self._build(
            *(checkpoint, quantization, self.stage),
            tree_depth=tree_depth,
            adapters=limits,
            engines=self.links.dp,
        )

    def build_draft(self) -> BuiltModel:
        """The same for the checkpoint that `model` in speculative_config names; in the target's dtypes.

        The last pipeline stage has all of it; the others have none of it, and know its caches.
        """
        draft = self.resolved.draft
        assert draft is not None, f"{self.resolved.speculative.method} has no checkpoint of its own"
        return self._build(draft, self.resolved.speculative.quantization, self._beside)

    def build_head(self, plan: HeadPlan, target: BuiltModel, *, tree_depth: int = 0) -> BuiltHead:
        """A draft head, from the checkpoint that its plan says; where and in what as `build_draft`.

        tree_depth: of the trees that it grows.
        """
        resolved = self.resolved
        checkpoint = resolved.checkpoint if plan.is_targets else resolved.draft
        assert checkpoint is not None, f"{resolved.speculative.method} has no checkpoint of its own"
        options = replace(
            self._options(resolved.speculative.quantization, self._beside), tree_depth=tree_depth
        )
        backend = resolved.user.device.attention_backend
        return build_head(
            plan, checkpoint, resolved.platform, options, beside=target.backend, backend=backend
        )

    def lender(self, target: BuiltModel) -> Lender:
        """The target, for a head."""
        return Lender(model=target.model, config=Fields(self.resolved.checkpoint.config), group=self.links.tp)

    @property
    def draft_config(self) -> Fields:
        """The config.json that `model` in speculative_config names."""
        assert self.resolved.draft is not None, f"{self.resolved.speculative.method} names no checkpoint"
        return Fields(self.resolved.draft.config)

    @property
    def _beside(self) -> Stage:
        """What drafts beside the target: whole on the last stage, and known on the others."""
        return WHOLE_MODEL if self.stage.is_last else NOWHERE

    def _build(
        self,
        checkpoint: Checkpoint,
        quantization: str | Mapping[str, object] | None,
        stage: Stage,
        *,
        tree_depth: int = 0,
        adapters: AdapterLimits | None = None,
        engines: Group = ALONE,
    ) -> BuiltModel:
        """engines: those that divide the experts; a draft's are whole in each."""
        options = replace(
            self._options(quantization, stage), tree_depth=tree_depth, adapters=adapters, engines=engines
        )
        resolved = self.resolved
        return build(checkpoint, resolved.platform, options, resolved.user.device.attention_backend)

    def _options(self, quantization: str | Mapping[str, object] | None, stage: Stage) -> BuildOptions:
        resolved = self.resolved
        return BuildOptions(
            dtype=getattr(torch, resolved.dtype),
            kv_dtype=getattr(torch, resolved.kv_dtype),
            device=self.device,
            block_size=resolved.block_size,
            max_model_len=resolved.max_model_len,
            num_spec=resolved.num_spec,
            quantization=quantization,
            group=self.links.tp,
            stage=stage,
            expert_parallel=resolved.user.parallel.enable_expert_parallel,
            seed=resolved.user.model.seed,
            show_progress=self.links.mesh.rank == 0,
        )


def build_head(
    plan: HeadPlan, checkpoint: Checkpoint, platform: Platform, options: BuildOptions,
    *, beside: AnyBackend, backend: str | None = None,
) -> BuiltHead:  # fmt: skip
    """Build and load a draft head, or fill a dummy.  beside: the target's backend.

    Raises ValueError if the weights do not fit it, or no backend serves its attention here.
    """
    source = Claimed(open_source(checkpoint, plan.rename), plan.claims)
    context = make_context(checkpoint, source, plan.stacked, platform, options)
    builder = Builder(context)
    head = plan.make(Fields(checkpoint.config), builder)
    chosen = beside
    if context.specs:
        needs = [replace(spec, tree_depth=options.tree_depth) for spec in builder.attention_needs()]
        chosen = choose_backend(backend, needs, platform)
        builder.bind(chosen)
    if options.stage.is_last:
        if checkpoint.is_dummy:
            fill_dummy(head, options.seed)
        else:
            load_weights(*(head, checkpoint, source, context.formats), show_progress=options.show_progress)
    return BuiltHead(
        model=head,
        caches=builder.caches(),
        attention_layers=tuple(builder.attention_layers),
        backend=chosen,
    )


class Design(NamedTuple):
    """A model that is built, and whose weights are not there yet."""

    model: Model
    builder: Builder
    source: TensorSource


def design(checkpoint: Checkpoint, platform: Platform, options: BuildOptions) -> Design:
    """Build the checkpoint's model; its weights take no memory.  Raises ValueError for what is not served."""
    family = MODELS.load(checkpoint.architecture)
    source = open_source(checkpoint, family.rename)
    builder = Builder(make_context(checkpoint, source, family.stacked, platform, options))
    return Design(family(Fields(checkpoint.config), builder), builder, source)


def make_context(
    checkpoint: Checkpoint, source: TensorSource, stacked: Mapping[str, tuple[str, ...]],
    platform: Platform, options: BuildOptions,
) -> BuildContext:  # fmt: skip
    """Where the layers of a checkpoint are built."""
    stored = StoredConfig(
        config=checkpoint.config,
        side=checkpoint.side,
        tensors=source.infos,
        metadata=source.metadata,
        spellings=spellings(source),
    )
    return BuildContext(
        quantization=choose_quantization(stored, options.quantization, platform, options.dtype),
        stacked=stacked,
        names=frozenset(source.infos),
        dtype=options.dtype,
        kv_dtype=options.kv_dtype or options.dtype,
        device=options.device,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        coords=Coords(options.group.rank, options.group.size),
        group=options.group,
        stage=options.stage,
        num_spec=options.num_spec,
        adapters=options.adapters,
        leaf=options.leaf or choose_leaf(options.device),
        stored=source.infos.keys(),
        is_dummy=checkpoint.is_dummy,
        expert_parallel=options.expert_parallel,
        engines=options.engines,
    )


def spellings(source: TensorSource) -> dict[str, tuple[str, ...]]:
    """The names outside of what the checkpoint calls otherwise than the model, a matrix or a tensor."""
    found: dict[str, tuple[str, ...]] = {}
    for name in source.infos:
        key = source.key(name)
        if key != name:
            for ours, theirs in ((name, key), (name.rpartition(".")[0], key.rpartition(".")[0])):
                found[ours] = spellings_of(theirs)
    return found


def read_own(source: TensorSource, tied: Mapping[str, str], name: str) -> Tensor | None:
    """tied: what has the numbers of another tensor."""
    name = name if name in source.infos else tied.get(name, name)
    return source.read(name) if name in source.infos else None


def build(
    checkpoint: Checkpoint,
    platform: Platform,
    options: BuildOptions,
    backend: AnyBackend | str | None = None,
) -> BuiltModel:
    """Build the checkpoint's model on the device and load it, or fill a dummy with random weights.

    backend: one in hand, a name, or None for the best that supports the model here.
    Raises ValueError if no backend or no method serves the model here, or if the weights do not fit it.
    """
    model, builder, source = design(checkpoint, platform, options)
    context = builder.context
    if backend is None or isinstance(backend, str):
        needs = [replace(spec, tree_depth=options.tree_depth) for spec in builder.attention_needs()]
        backend = choose_backend(backend, needs, platform)
        if options.show_progress:
            for words in dict.fromkeys(backend.describe(spec, platform) for spec in needs):
                logger.info("attention: %s", words)
    builder.bind(backend)
    if options.show_progress:
        kinds = kinds_of(torch_module(model), context.formats, source.infos, options.dtype)
        logger.info("weights:%s", "".join(f"\n  {kind}" for kind in kinds))
    # Nothing here may hold on to a weight: what a layer lets go of as it repacks is to be free at once.
    weight_bytes = sum(weight.nbytes for weight in weights_of(model))
    idle_bytes = sum(m.idle_bytes for m in torch_module(model).modules() if isinstance(m, Experts))
    named = context.elsewhere.union(*(weight.sources for weight in weights_of(model)))
    modules = frozenset(name.rpartition(".")[0] for name in named)
    if checkpoint.is_dummy:
        fill_dummy(model, options.seed)
    else:
        check_tied(source, context.tied)
        load_weights(
            *(model, checkpoint, source, context.formats),
            elsewhere=context.elsewhere,
            show_progress=options.show_progress,
        )
    return BuiltModel(
        model=model,
        caches=builder.caches(),
        attention_layers=tuple(builder.attention_layers),
        backend=backend,
        inlet=context.inlet,
        vocab_size=checkpoint.vocab_size,
        weight_bytes=weight_bytes,
        token_bytes=weight_bytes - idle_bytes,
        lora_banks=tuple(context.lora_banks),
        modules=modules,
        adaptable=frozenset(context.adaptable),
        read_own=partial(read_own, source, context.tied),
    )
