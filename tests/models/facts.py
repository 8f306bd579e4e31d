"""What a family read of a config.json, in few words, each only where a model has it.

`python -m tests.models.facts NAME` shows those of configs/NAME.json.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from pellucid.layers.experts import Sparse
from pellucid.layers.rope import RopeConfig
from pellucid.models.checkpoint import architecture_of
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import GQA, MLA, MLP, DecoderConfig, Norms
from pellucid.models.fields import Fields
from pellucid.models.registry import MODELS
from pellucid.models.text_config import text_config

Facts = dict[str, object]
NORMED = {
    "head": "norms over each head",
    "width": "norms over the width",
    "plain": "norms over each head, no weights",
}


def read(file: Path) -> Facts:
    """Of a config.json, by its family."""
    config = text_config(json.loads(file.read_text()))
    family = MODELS.load(architecture_of(config))
    assert issubclass(family, Decoder)
    return facts(family.declare(Fields(config)))


def facts(cfg: DecoderConfig) -> Facts:
    """By name; runs of layers that are alike as `3 x this, 58 x that`."""
    mixers = [layer.mixer for layer in cfg.layers]
    found: Facts = {
        "sizes": (cfg.vocab_size, cfg.hidden_size, len(cfg.layers)),
        "attention": runs([words_of_mixer(mixer) for mixer in mixers]),
        "rope": runs([words_of_rope(mixer.rope) for mixer in mixers]),
        "mlp": runs([words_of_mlp(layer.mlp) for layer in cfg.layers]),
        "norm": words_of_norms(cfg),
        "tied": cfg.tied,
    }
    scales = (cfg.embedding_scale, cfg.residual_scale, cfg.logit_scale)
    if scales != (1.0, 1.0, 1.0):
        found["scales"] = tuple(round(scale, 6) for scale in scales)
    if cfg.logit_cap is not None:
        found["logit cap"] = cfg.logit_cap
    return found


def runs(words: list[str]) -> str:
    """Layers one after the other, of which a pattern that repeats is told once."""
    for length in range(1, 9):
        pattern = words[:length]
        if len(words) > length and words == (pattern * len(words))[: len(words)]:
            return words_of_runs(pattern) if length == 1 else f"by turns: {words_of_runs(pattern)}"
    return words_of_runs(words)


def words_of_runs(words: list[str]) -> str:
    alike = [(word, len(list(group))) for word, group in groupby(words)]
    return alike[0][0] if len(words) == 1 else ", ".join(f"{num} x {word}" for word, num in alike)


def words_of_mixer(mixer: GQA | MLA) -> str:
    if isinstance(mixer, MLA):
        heads = mixer.heads
        sizes = f"{heads.num} heads of {heads.nope} + {heads.rope}, values {heads.value}"
        latents = f"latents {heads.rank}, of queries {heads.q_rank}"
        return "; ".join([sizes, latents, f"scale {mixer.scale:.6f}", *biases(mixer.bias, mixer.o_bias)])
    heads, scores = mixer.heads, mixer.scores
    parts = [f"{heads.num}/{heads.num_kv} heads of {heads.dim}"]
    parts += [f"window {scores.window}"] if scores.window else []
    parts += [f"chunks of {scores.chunk}"] if scores.chunk else []
    parts += [f"cap {scores.softcap:g}"] if scores.softcap else []
    parts += ["sinks"] if scores.sinks else []
    parts += [f"scale {scores.scale:.6f}"] if abs(scores.scale - heads.dim**-0.5) > 1e-9 else []
    parts += [f"growing by {mixer.q_scale.weight:g} from {mixer.q_scale.interval}"] if mixer.q_scale else []
    parts += [NORMED[mixer.qk_norm]] if mixer.qk_norm else []
    return "; ".join(parts + biases(mixer.qkv_bias, mixer.o_bias))


def biases(qkv: bool, o: bool) -> list[str]:
    return (["qkv bias"] if qkv else []) + (["o bias"] if o else [])


def words_of_rope(rope: RopeConfig | None) -> str:
    if rope is None:
        return "none"
    words = f"{rope.kind} {rope.theta:g} over {rope.rotary_dim}"
    if rope.kind != "default":
        words += f" times {rope.factor:g}"
    if rope.original_max_position_embeddings:
        words += f" from {rope.original_max_position_embeddings}"
    if rope.attention_factor != 1.0:
        words += f", loud {rope.attention_factor:.4f}"
    return words + (", neighbours" if rope.interleaved else "")


def words_of_mlp(mlp: MLP) -> str:
    if not isinstance(mlp, Sparse):
        return f"{mlp.act.kernel} {mlp.hidden}" + (", bias" if mlp.bias else "")
    r = mlp.routing
    words = f"{r.top_k} of {r.num_experts} by {r.score}, {mlp.hidden}"
    words += f", {r.top_groups} of {r.groups} groups by {r.group_score}" if r.groups > 1 else ""
    words += "" if r.renormalise else ", as they are"
    words += f", times {r.scale:g}" if r.scale != 1.0 else ""
    words += ", bias" if mlp.bias else ""
    words += ", weighed before" if mlp.weighs_input else ""
    words += f", beside {mlp.shared.hidden}" if mlp.shared else ""
    return words + (f" by {mlp.shared.gate}" if mlp.shared and mlp.shared.gate else "")


def words_of_norms(cfg: DecoderConfig) -> str:
    words = f"{cfg.norm.eps:g}" + (", wide" if cfg.norm.wide else "")
    words += f", {cfg.norm.offset:g} + w" if cfg.norm.offset else ""
    behind, before = (cfg.norms.behind_attention, cfg.norms.behind_mlp), cfg.norms.before_attention
    return (
        words
        if cfg.norms == Norms()
        else words + (", on both sides" if before and all(behind) else ", behind")
    )


if __name__ == "__main__":
    name = sys.argv[1]
    print(json.dumps({name: read(Path(__file__).parent / "configs" / f"{name}.json")}, indent=2))
