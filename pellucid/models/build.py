"""From a checkpoint to a model that runs: the one call that workers make."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid.attention.base import AttentionBackend, choose_backend
from pellucid.config import Resolved
from pellucid.dist.collectives import ALONE, UNLINKED, Group, Links
from pellucid.dist.mesh import WHOLE_MODEL, Stage
from pellucid.kv.specs import KVGroupSpec
from pellucid.layers.attention import Attention
from pellucid.layers.stage import Inlet
from pellucid.models.builder import Builder, Site
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fields import Fields
from pellucid.models.loader import fill_dummy, load_weights, weights_of
from pellucid.models.registry import MODELS, Model
from pellucid.platform import Platform
from pellucid.quant.base import Coords, choose_scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A loaded model, and what the worker must give it before it can run."""

    model: Model
    kv_groups: tuple[KVGroupSpec, ...]  # the same on every rank, but for the number of layers
    attention_layers: tuple[Attention, ...]  # each needs its `kv_cache`, of kv_groups[layer.group]
    backend: AttentionBackend  # of every attention layer
    inlet: Inlet | None  # behind the first stage of a pipeline; needs its `stream`
    vocab_size: int
    weight_bytes: int  # on this device, before repacking


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a model is built, whatever its family."""

    dtype: torch.dtype  # of weights and activations
    device: torch.device
    block_size: int  # tokens
    max_model_len: int  # tokens; rotary tables are this long
    kv_dtype: torch.dtype | None = None  # of the KV cache; default `dtype`
    quantization: str | None = None  # a scheme's name; default the checkpoint's own
    group: Group = ALONE  # the ranks that share every layer, a slice each
    stage: Stage = WHOLE_MODEL  # which of the layers are built
    first_group: int = 0  # KV groups before this model's
    seed: int = 0  # of dummy weights
    show_progress: bool = True


def build_model(resolved: Resolved, device: torch.device, links: Links = UNLINKED) -> BuiltModel:
    """Build and load this rank's part of the model that `resolved` chose, as `build` does."""
    user = resolved.user
    options = BuildOptions(
        dtype=getattr(torch, resolved.dtype),
        kv_dtype=getattr(torch, resolved.kv_dtype),
        device=device,
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len + resolved.num_spec,  # drafts may reach past the end
        quantization=user.device.quantization,
        group=links.tp,
        stage=Stage(links.mesh.rank_of("pp"), resolved.pipeline_cuts),
        seed=user.model.seed,
        show_progress=links.mesh.rank == 0,
    )
    return build(resolved.checkpoint, resolved.platform, options, user.device.attention_backend)


def build(
    checkpoint: Checkpoint,
    platform: Platform,
    options: BuildOptions,
    backend: AttentionBackend | str | None = None,
) -> BuiltModel:
    """Build the checkpoint's model on the device and load it, or fill a dummy with random weights.

    backend: one in hand, a name, or None for the best that supports the model here.
    Raises ValueError if no backend or no scheme serves the model here, or if the weights do not fit it.
    """
    family = MODELS.load(checkpoint.architecture)
    site = Site(
        scheme=choose_scheme(checkpoint.config, options.quantization),
        stacked=family.stacked,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype or options.dtype,
        device=options.device,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        coords=Coords(options.group.rank, options.group.size),
        group=options.group,
        stage=options.stage,
        first_group=options.first_group,
    )
    builder = Builder(site)
    model = family(Fields(checkpoint.config), builder)
    if backend is None or isinstance(backend, str):
        backend = choose_backend(backend, builder.attention_needs(), platform)
    builder.bind(backend)
    weight_bytes = sum(weight.nbytes for weight in weights_of(model))
    if checkpoint.is_dummy:
        fill_dummy(model, options.seed)
    else:
        load_weights(model, checkpoint, elsewhere=site.elsewhere, show_progress=options.show_progress)
    return BuiltModel(
        model=model,
        kv_groups=builder.kv_groups(),
        attention_layers=tuple(builder.attention_layers),
        backend=backend,
        inlet=site.inlet,
        vocab_size=checkpoint.vocab_size,
        weight_bytes=weight_bytes,
    )
